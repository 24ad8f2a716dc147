"""What is saved beside ordinary weights: buffers, empty tensors, state that is no tensor; and misuse."""

from pathlib import Path

import pytest
import torch
from torch import nn

from parallel2d import MeshShape, UserError, build_mesh, launch, parallelize
from parallel2d.checkpoint.load import load_checkpoint
from parallel2d.checkpoint.store import CheckpointStore
from tests.ranks import run_ranks
from tests.test_checkpoint import whole


class Odd(nn.Module):
    """Linear, with a causal mask, a flag and a parameter without numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 5)
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))
        self.register_buffer("seen", torch.tensor([True, False]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def odd_model(shape: MeshShape) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Odd()
    parallelize(model, build_mesh(shape, "cpu"), plan={}, units=[])
    return model, torch.optim.AdamW(model.parameters())


def save_odd(folder: str, shape: MeshShape) -> dict[str, torch.Tensor]:
    with launch.world(shape.world, "cpu", 60):
        model, optimizer = odd_model(shape)
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        with CheckpointStore(Path(folder), background=True) as store:
            store.save(1, model, optimizer, {})
        return whole(model, optimizer)


def load_odd(folder: str, shape: MeshShape) -> dict[str, torch.Tensor]:
    with launch.world(shape.world, "cpu", 60):
        model, optimizer = odd_model(shape)
        newest = CheckpointStore(Path(folder)).latest()
        assert newest
        load_checkpoint(newest, model, optimizer)
        return whole(model, optimizer)


def test_infinite_buffers_and_empty_parameters_come_back(tmp_path):
    saved = run_ranks(2, save_odd, str(tmp_path), MeshShape(1, 2, 1))[0]
    assert "model.mask" in saved and "model.nothing" in saved
    for loaded in run_ranks(1, load_odd, str(tmp_path), MeshShape()):
        assert loaded.keys() == saved.keys() and all(torch.equal(loaded[n], saved[n]) for n in saved)


def misuse(folder: str) -> list[str]:
    with launch.world(1, "cpu", 60):
        model, optimizer = odd_model(MeshShape())
        told = []
        with pytest.raises(RuntimeError) as caught:
            CheckpointStore(Path(folder), background=True).save(1, model, optimizer, {})
        told.append(str(caught.value))
        optimizer.state[model.linear.weight]["step"] = 3
        with pytest.raises(UserError) as caught:
            CheckpointStore(Path(folder)).save(1, model, optimizer, {})
        return [*told, str(caught.value)]


def fail_and_fail(folder: str) -> str:
    """The run fails while a save fails in a way that nobody foresees."""
    with launch.world(1, "cpu", 60):
        model, optimizer = odd_model(MeshShape())
        store = CheckpointStore(Path(folder), background=True)
        with pytest.raises(KeyError) as caught, store:
            store._write = lambda *_: 1 / 0  # type: ignore[method-assign]
            store.save(1, model, optimizer, {})
            raise KeyError("of the run")
        return str(caught.value)


def test_misuse_is_told(tmp_path):
    context, no_tensor = run_ranks(1, misuse, str(tmp_path))[0]
    assert "is a context" in context
    assert (
        no_tensor == "optimizer state that is no tensor cannot be saved: optimizer.linear.weight.step (int)"
    )


def test_the_runs_own_failure_is_told(tmp_path):
    assert run_ranks(1, fail_and_fail, str(tmp_path)) == ["'of the run'"]
