"""Each number of a LlamaConfig does what it says, on one device."""

import dataclasses

import pytest
import torch
from parallel2d.models.llama import Llama, LlamaConfig

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
