"""Gradient norm and clipping on shards, decay groups, schedules."""

import itertools

import pytest
import torch
from torch import nn

from parallel2d import MeshShape, build_mesh, clip_gradients, gradient_norm, init_weights, launch, parallelize
from parallel2d.optim import LearningRate, build_optimizer
from tests.ranks import run_ranks


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(5), nn.Linear(5, 8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.norm(x)))


PLAN = {"up": "colwise", "down": "rowwise"}


def sharded_model(shape: MeshShape, dtype: torch.dtype = torch.float32) -> nn.Module:
    with torch.device("meta"):
        model = Model()
    parallelize(model, build_mesh(shape, "cpu"), plan=PLAN, units=[])
    init_weights(model, torch.device("cpu"), 0)
    return model


def norms(shape: MeshShape) -> tuple[float, float, float]:
    """Our norm, the norm of the whole gradients, and our norm after clipping to 0.1."""
    with launch.world(shape.world, "cpu", 60):
        model = sharded_model(shape)
        model(torch.ones(3, 5)).square().sum().backward()
        gradients = [p.grad.full_tensor().double() for p in model.parameters()]
        expected = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
        norm = gradient_norm(model.parameters())
        clip_gradients(model.parameters(), norm, 0.1)
        return norm.item(), expected.item(), gradient_norm(model.parameters()).item()


@pytest.mark.parametrize(
    "shape", [MeshShape(), MeshShape(1, 3, 2), MeshShape(2, 2, 2), MeshShape(1, 7, 1)], ids=str
)
def test_norm_and_clipping(shape):
    for norm, expected, clipped in run_ranks(shape.world, norms, shape):
        assert norm == pytest.approx(expected, rel=1e-12)
        assert clipped == pytest.approx(0.1, rel=1e-4)


def decayed(shape: MeshShape, weight_decay: float) -> dict[str, torch.Tensor]:
    with launch.world(shape.world, "cpu", 60):
        model = sharded_model(shape)
        optimizer = build_optimizer(model, 0.1, (0.9, 0.95), weight_decay)
        model(torch.ones(3, 5)).square().sum().backward()
        optimizer.step()
        return {n: p.detach().full_tensor() for n, p in model.named_parameters()}


def test_only_matrices_decay_on_every_mesh():
    start = run_ranks(1, decayed, MeshShape(), 0.0)[0]
    for shape in (MeshShape(), MeshShape(1, 2, 2)):
        plain, with_decay = (run_ranks(shape.world, decayed, shape, wd)[0] for wd in (0.0, 0.5))
        for name, weight in plain.items():
            assert torch.allclose(weight, start[name], rtol=1e-5, atol=1e-7)
            assert torch.equal(weight, with_decay[name]) == (weight.ndim == 1), name


def rates(schedule: str, total: int = 20, warmup: int = 4) -> list[float]:
    rate = LearningRate(1.0, schedule, warmup, total, 0.1)
    return [rate(step) for step in range(total)]


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear", "wsd"])
def test_schedules(schedule):
    values = rates(schedule)
    assert values[:4] == [0.25, 0.5, 0.75, 1.0]
    assert values[-1] == pytest.approx(1.0 if schedule == "constant" else 0.1)
    assert all(a >= b for a, b in itertools.pairwise(values[3:]))
    if schedule == "wsd":
        assert values[4:16] == [1.0] * 12 and values[16] < 1.0
    if schedule == "cosine":
        assert values[11] == pytest.approx(0.1 + 0.9 / 2)


def test_schedules_of_very_short_runs():
    assert rates("cosine", total=1, warmup=0) == [pytest.approx(0.1)]
    assert rates("linear", total=3, warmup=5) == [pytest.approx(0.2), pytest.approx(0.4), pytest.approx(0.6)]
