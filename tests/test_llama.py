"""Each number of a LlamaConfig does what it says, on one device."""

import dataclasses

import pytest
import torch
from parallel2d.models.llama import Llama, LlamaConfig
from parallel2d.models.parts import RMSNorm
from parallel2d.models.rope import RopeScaling, rotary_table, rotate
from torch import nn

CONFIG = LlamaConfig(vocab_size=64, width=32, num_layers=2, num_heads=4, num_kv_heads=4, ffn_width=48)
IDS = torch.arange(12).view(1, 12)


def logits(**fields) -> torch.Tensor:
    torch.manual_seed(0)
    with torch.no_grad():
        return Llama(dataclasses.replace(CONFIG, **fields))(IDS)


@pytest.mark.parametrize("fields", [{"rope_theta": 100.0}, {"norm_eps": 1e-2}, {"init_std": 0.04}], ids=str)
def test_a_field_changes_the_logits(fields):
    assert torch.equal(logits(), logits())
    assert not torch.allclose(logits(), logits(**fields), rtol=1e-3, atol=0)


def test_init_std_is_the_standard_deviation():
    weight = Llama(dataclasses.replace(CONFIG, init_std=0.5, width=256)).blocks[0].ffn.gate.weight
    assert weight.std().item() == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize("shape", [(2, 5, 7), (3, 1), (2, 3, 5, 4)], ids=str)
def test_the_norm_is_torchs_with_its_gradients(shape):
    torch.manual_seed(0)
    ours, torchs = RMSNorm(shape[-1], 1e-5).double(), nn.RMSNorm(shape[-1], 1e-5).double()
    nn.init.normal_(ours.weight)
    torchs.load_state_dict(ours.state_dict())
    # Heads lie between positions and features in memory, as attention has them.
    x = torch.randn(shape, dtype=torch.float64).movedim(-2, 0).contiguous().movedim(0, -2)
    upstream = torch.randn(shape, dtype=torch.float64)
    found = []
    for norm in (ours, torchs):
        leaf = x.clone().requires_grad_()
        y = norm(leaf)
        found.append((y, *torch.autograd.grad(y, (leaf, norm.weight), upstream)))
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(*found, strict=True))


def test_rotary_turns_pairs_half_a_head_apart_and_back_in_backward():
    torch.manual_seed(0)
    cos, sin = rotary_table(5, 6, 100.0, RopeScaling(), torch.device("cpu"))
    x = torch.randn(2, 3, 5, 6, dtype=torch.float64, requires_grad=True)
    pairs = torch.complex(x[..., :3], x[..., 3:]) * torch.polar(torch.ones(()), torch.atan2(sin, cos[:, :3]))
    expected = torch.cat((pairs.real, pairs.imag), dim=-1)
    y = rotate(x, cos, sin)
    assert torch.allclose(y, expected, rtol=0, atol=1e-6)
    upstream = torch.randn_like(y)
    (gradient,) = torch.autograd.grad(y, x, upstream)
    assert torch.allclose(gradient, torch.autograd.grad(expected, x, upstream)[0], rtol=0, atol=1e-6)
    assert rotate(x.bfloat16(), cos, sin).dtype == torch.bfloat16
