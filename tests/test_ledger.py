"""What a step sends is what the formula says: counts and bytes, per axis and kind."""

import pytest
import torch
from parallel2d.models.llama import Llama, LlamaConfig

from parallel2d import MeshShape, Precision, build_mesh, init_weights, launch, parallelize
from parallel2d.ledger import Ledger, Observer, Step, expected_step
from parallel2d.loss import VocabShard
from parallel2d.optim import build_optimizer
from parallel2d.step import train_step
from tests.ranks import run_ranks, run_recipe

MESHES = [MeshShape(), MeshShape(1, 2, 1), MeshShape(1, 1, 2), MeshShape(1, 3, 2), MeshShape(2, 2, 2)]


def both(shape: MeshShape, layers: int, accumulation: int, mode: str, tied: bool) -> tuple[Ledger, Ledger]:
    with launch.world(shape.world, "cpu", 60) as device:
        # Sizes that no axis divides.
        config = LlamaConfig(61, 36, layers, 6, 6, 0, 50, tie_embeddings=tied)
        mesh = build_mesh(shape, "cpu")
        with torch.device("meta"):
            model = Llama(config)
        units = list(model.blocks)
        precision = Precision(torch.float32, torch.bfloat16, torch.float32)
        parallelize(
            model, mesh, plan=model.tp_plan(), units=units, precision=precision, activation_checkpoint=mode
        )
        init_weights(model, device, 0)
        optimizer = build_optimizer(model, 1e-3, (0.9, 0.95), 0.1)
        vocab = VocabShard.of(61, mesh["tp"])
        batch = (torch.zeros(2, 8, dtype=torch.int64), torch.zeros(2, 8, dtype=torch.int64))
        step = Step(2, 8, 36, accumulation, precision.compute, precision.reduce, mode)
        with Observer(mesh) as observer:
            train_step(model, [batch] * accumulation, optimizer, vocab, mesh, 1.0)
        return expected_step(model, units, mesh, step), observer.ledger


@pytest.mark.parametrize(("shape", "layers"), [*((shape, 2) for shape in MESHES), (MESHES[-1], 5)], ids=str)
def test_expected_is_observed(shape, layers):
    for expected, observed in run_ranks(shape.world, both, shape, layers, 1, "none", False):
        assert dict(observed) == dict(expected)


@pytest.mark.parametrize(
    ("accumulation", "mode", "tied"),
    [(3, "none", False), (1, "full", False), (1, "selective", False), (2, "none", True)],
)
def test_accumulation_checkpointing_and_ties(accumulation, mode, tied):
    shape = MeshShape(2, 2, 2)
    for expected, observed in run_ranks(shape.world, both, shape, 2, accumulation, mode, tied):
        assert dict(observed) == dict(expected)


def test_one_process_sends_nothing():
    assert run_ranks(1, both, MeshShape(), 2, 1, "none", False) == [({}, {})]


def test_the_recipe_prints_the_table_once(tmp_path):
    flags = ("--dp", "2", "--tp", "2", "--ledger", "true", "--steps", "2", "--data.seq_len", "32")
    flags += ("--log.val_batches", "1", "--log.sample_tokens", "0", "--out", str(tmp_path / "run"))
    outcome = run_recipe(4, *flags, "--activation_checkpoint", "full", "--data.micro_batch", "4")[0]
    assert outcome.exitcode == 0, outcome.stderr
    assert outcome.stdout.count("axis          collective") == 1
    assert "tp            reduce_scatter" in outcome.stdout and "differs" not in outcome.stdout
