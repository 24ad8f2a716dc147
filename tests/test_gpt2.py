"""GPT-2: on every mesh what plain PyTorch computes on one process, and each knob does what it says."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from parallel2d.models.gpt2 import GPT2, GPT2Config
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel2d import MeshShape, Precision, build_mesh, gradient_norm, init_weights, launch, parallelize
from parallel2d.collectives import gather_whole
from parallel2d.loss import VocabShard, cross_entropy_sum
from parallel2d.mesh import dp_rank, dp_size, sum_over_dp
from parallel2d.seeds import seed_of
from parallel2d.shards import local_box
from tests.ranks import run_ranks

# 21 positions and 301 tokens: neither tp 2 nor tp 4 divides them.
CONFIG = GPT2Config(
    vocab_size=301, width=32, num_layers=2, num_heads=8, ffn_width=48, max_positions=21, norm_eps=1e-3
)
FLOAT64 = Precision(torch.float64, torch.float64, torch.float64)
CPU = torch.device("cpu")
Numbers = tuple[float, float, dict[str, Tensor]]


def batch(seq_len: int = 16) -> tuple[Tensor, Tensor]:
    ids = torch.randint(301, (4, seq_len + 1), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1], ids[:, 1:]


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Weights by name, biases and norms too: zeros and ones would hide mistakes."""
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(seed_of(3, name))
        whole = torch.randn(parameter.shape, dtype=torch.float64, generator=generator) / 4
        if isinstance(parameter, DTensor):
            parameter.to_local().copy_(local_box(parameter).cut(whole))
        else:
            parameter.copy_(whole)


def alone() -> Numbers:
    model = GPT2(CONFIG).double()
    fill(model)
    ids, targets = batch()
    loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    norm = torch.cat([g.flatten() for g in gradients.values()]).norm()
    return loss.item(), norm.item(), gradients


def on_mesh(shape: MeshShape) -> Numbers:
    with launch.world(shape.world, "cpu", 60):
        mesh = build_mesh(shape, "cpu")
        model = build(mesh, CONFIG, FLOAT64)
        fill(model)
        ids, targets = (x.chunk(dp_size(mesh))[dp_rank(mesh)] for x in batch())
        loss = cross_entropy_sum(model(ids), targets, VocabShard.of(301, mesh["tp"])) / (4 * 16)
        (loss * dp_size(mesh)).backward()
        total = sum_over_dp(loss.detach(), mesh).item()
        gradients = {name: gather_whole(p.grad) for name, p in model.named_parameters()}
        return total, gradient_norm(model.parameters()).item(), gradients


def build(mesh: Any, config: GPT2Config, precision: Precision) -> GPT2:
    with torch.device("meta"):
        model = GPT2(config)
    parallelize(model, mesh, plan=model.tp_plan(), units=list(model.blocks), precision=precision)
    init_weights(model, CPU, seed=0)
    return model


@pytest.mark.parametrize(
    "shape",
    [
        MeshShape(tp=2),
        MeshShape(1, 2, 2),
        *(pytest.param(m, marks=pytest.mark.slow) for m in (MeshShape(tp=4), MeshShape(2, 2, 2))),
    ],
    ids=str,
)
def test_float64_equals_plain_pytorch(shape):
    loss, norm, gradients = alone()
    for ours in run_ranks(shape.world, on_mesh, shape):
        assert ours[:2] == pytest.approx((loss, norm), rel=1e-12)
        assert ours[2].keys() == gradients.keys()
        for name, gradient in gradients.items():
            # A bias of the keys shifts all scores of a query alike, which softmax does not see: 0 ± rounding.
            scale = norm if name.endswith("attention.k.bias") else gradient.abs().max()
            error = (ours[2][name] - gradient).abs().max() / scale
            assert error < 1e-9, f"{name}: {error}"


def test_a_sequence_beyond_the_positions_is_one_error():
    with pytest.raises(ValueError, match=r"sequence length 22 is more than model\.max_positions 21"):
        GPT2(CONFIG)(batch(22)[0])


def logits(training: bool = False, **fields: Any) -> Tensor:
    model = GPT2(dataclasses.replace(CONFIG, **fields)).train(training)
    fill(model)
    torch.manual_seed(0)
    with torch.no_grad():
        return model(batch()[0])


RATES = ("embedding_dropout", "residual_dropout", "attention_dropout")


@pytest.mark.parametrize("rate", RATES)
def test_each_dropout_acts_in_training_only(rate):
    assert torch.equal(logits(**{rate: 0.5}), logits())
    assert not torch.allclose(logits(training=True, **{rate: 0.5}), logits(), rtol=1e-2)


def test_norm_eps_reaches_the_logits():
    assert not torch.allclose(logits(norm_eps=0.1), logits(), rtol=1e-3)


def test_initial_weights():
    model = GPT2(dataclasses.replace(CONFIG, width=256, num_heads=4, max_positions=64, init_std=0.5))
    stds = {n: p.std().item() for n, p in model.named_parameters() if p.ndim == 2}
    expected = {
        "embedding.weight": 0.5,
        "positions.weight": 0.25,
        "blocks.1.attention.q.weight": 0.5,
        "blocks.1.attention.o.weight": 0.25,
        "blocks.1.ffn.up.weight": 0.5,
        "blocks.1.ffn.down.weight": 0.25,
    }
    assert {n: stds[n] for n in expected} == pytest.approx(expected, rel=0.05)
    assert all(not p.any() for n, p in model.named_parameters() if n.endswith("bias"))


def masks(shape: MeshShape) -> list[list[int]]:
    """The positions that survive the embedding's dropout, by tp rank."""
    with launch.world(shape.world, "cpu", 60):
        model = build(build_mesh(shape, "cpu"), dataclasses.replace(CONFIG, embedding_dropout=0.5), FLOAT64)
        seen: list[Tensor] = []
        model.blocks[0].attention_norm.register_forward_pre_hook(lambda _, x: seen.append(x[0] != 0))
        torch.manual_seed(0)
        model(batch()[0])
        return seen[0].flatten().int().tolist()


def test_tp_ranks_drop_independently():
    first, second = run_ranks(2, masks, MeshShape(tp=2))
    agreement = sum(a == b for a, b in zip(first, second, strict=True)) / len(first)
    assert 0.4 < agreement < 0.6 and 0.4 < sum(first) / len(first) < 0.6


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_heads": 6}, "width 32 is not divisible by model.num_heads 6"),
        ({"ffn_width": 50}, "ffn_width 50 is not divisible by tp 4: use tp 1, 2, 5, 10, 25, 50"),
        ({"max_positions": 3}, "max_positions 3 leaves ranks of tp 4 without a row"),
        ({"attention_dropout": 1.0}, "model.attention_dropout 1.0 is not in [0, 1)"),
        ({"num_layers": 0}, "model.num_layers 0 is not positive"),
    ],
)
def test_what_does_not_fit_is_named(fields, message):
    assert message in "\n".join(dataclasses.replace(CONFIG, **fields).problems(4))
    assert CONFIG.problems(4) == []


def test_flops_are_six_per_matmul_weight_and_attention():
    model = GPT2(CONFIG)
    weights = sum(p.numel() for n, p in model.named_parameters() if p.ndim == 2 and n != "positions.weight")
    assert model.flops_per_token(16) == 6 * weights + 12 * 2 * 32 * 16
