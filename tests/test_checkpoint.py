"""Every tensor of a checkpoint, weights and moments, is the same on any mesh that loads it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from parallel2d.models.llama import Llama, LlamaConfig
from torch.distributed.tensor import DTensor

from parallel2d import MeshShape, UserError, build_mesh, launch, parallelize
from parallel2d.checkpoint.load import load_checkpoint
from parallel2d.checkpoint.state import state_tensors
from parallel2d.checkpoint.store import CheckpointStore
from parallel2d.fsdp import Precision
from parallel2d.init import init_weights
from parallel2d.optim import build_optimizer
from tests.ranks import run_ranks, try_ranks

# Sizes that no axis divides; weights that stay whole over tp (the key/value head, biases, norms); a tie.
CONFIG = LlamaConfig(
    vocab_size=61,
    width=36,
    num_layers=1,
    num_heads=6,
    num_kv_heads=1,
    ffn_width=50,
    tie_embeddings=True,
    qkv_bias=True,
    o_bias=True,
    qk_norm=True,
)


def build(shape: MeshShape, config: LlamaConfig = CONFIG, seed: int = 0):
    with torch.device("meta"):
        model = Llama(config)
    mesh = build_mesh(shape, "cpu")
    precision = Precision(torch.float64, torch.float64, torch.float64)
    parallelize(model, mesh, plan=model.tp_plan(), units=list(model.blocks), precision=precision)
    init_weights(model, torch.device("cpu"), seed)
    return model, build_optimizer(model, 1e-2, (0.9, 0.95), 0.1)


def whole(model, optimizer) -> dict[str, torch.Tensor]:
    state = state_tensors(model, optimizer)
    return {n: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for n, t in state.items()}


def update(model, optimizer) -> None:
    model(torch.arange(12).view(1, 12) % 61).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def save(shape: MeshShape, folder: str) -> dict[str, torch.Tensor]:
    with launch.world(shape.world, "cpu", 60):
        model, optimizer = build(shape)
        for _ in range(3):
            update(model, optimizer)
        CheckpointStore(Path(folder)).save(3, model, optimizer, {"model": {}})
        return whole(model, optimizer)


def load(shape: MeshShape, folder: str) -> dict[str, torch.Tensor]:
    with launch.world(shape.world, "cpu", 60):
        model, optimizer = build(shape, seed=1)
        load_checkpoint(CheckpointStore(Path(folder)).latest(), model, optimizer)
        return whole(model, optimizer)


@pytest.mark.parametrize(
    "saved_on", [MeshShape(1, 3, 2), pytest.param(MeshShape(2, 2, 2), marks=pytest.mark.slow)], ids=str
)
def test_any_mesh_loads_any_mesh_bit_for_bit(tmp_path, saved_on):
    saved = run_ranks(saved_on.world, save, saved_on, str(tmp_path))[0]
    assert saved["optimizer.norm.weight.step"].item() == 3
    for shape in (
        MeshShape(),
        MeshShape(1, 2, 2),
        MeshShape(1, 7, 1),
        MeshShape(2, 1, 2),
    ):
        for loaded in run_ranks(shape.world, load, shape, str(tmp_path)):
            assert loaded.keys() == saved.keys()
            assert all(torch.equal(loaded[name], saved[name]) for name in saved), shape


def load_with_a_layer_more(folder: str) -> str:
    with launch.world(2, "cpu", 60):
        model, optimizer = build(MeshShape(1, 2, 1), replace(CONFIG, num_layers=2))
        with pytest.raises(UserError) as caught:
            load_checkpoint(CheckpointStore(Path(folder)).latest(), model, optimizer)
        return str(caught.value)


def test_names_must_match(tmp_path):
    run_ranks(1, save, MeshShape(), str(tmp_path))
    for message in run_ranks(2, load_with_a_layer_more, str(tmp_path)):
        assert "15 missing" in message and "unexpected" not in message and "blocks.1.attention.k" in message


def test_a_checkpoint_is_never_overwritten(tmp_path):
    (tmp_path / "step-00000003").mkdir()
    outcome = try_ranks(1, save, MeshShape(), str(tmp_path))[0]
    assert outcome.exitcode != 0
    assert "is never overwritten" in outcome.stderr


def other_optimizers(folder: str) -> tuple[bool, str]:
    """SGD with momentum, saved and loaded; then a load into AdamW."""
    with launch.world(2, "cpu", 60):
        store = CheckpointStore(Path(folder))
        model, adamw = build(MeshShape(1, 2, 1))
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        update(model, sgd)
        store.save(1, model, sgd, {})
        saved = whole(model, sgd)
        model, adamw = build(MeshShape(1, 1, 2), seed=1)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        load_checkpoint(store.latest(), model, sgd)
        loaded = whole(model, sgd)
        with pytest.raises(UserError) as caught:
            load_checkpoint(store.latest(), model, adamw)
        same = saved.keys() == loaded.keys() and all(torch.equal(saved[name], loaded[name]) for name in saved)
        return same and any("momentum_buffer" in name for name in saved), str(caught.value)


def test_any_optimizer_but_not_another_one(tmp_path):
    for same, message in run_ranks(2, other_optimizers, str(tmp_path)):
        assert same
        assert "has the state of SGD, and this run uses AdamW" in message


def save_infinite_weights(folder: str) -> str:
    with launch.world(4, "cpu", 60):
        model, optimizer = build(MeshShape(1, 2, 2))
        if torch.distributed.get_rank() == 3:
            model.norm.weight.detach().to_local().fill_(float("inf"))
        with pytest.raises(UserError) as caught, CheckpointStore(Path(folder)) as store:
            store.save(1, model, optimizer, {})
        return str(caught.value)


def test_weights_that_are_not_finite_never_replace_good_ones(tmp_path):
    messages = run_ranks(4, save_infinite_weights, str(tmp_path))
    assert all("weights are not finite" in message for message in messages)
    assert list(tmp_path.iterdir()) == []
