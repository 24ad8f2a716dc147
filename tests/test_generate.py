"""A sharded model writes what the same model writes on one process."""

import pytest
import torch

from parallel2d import MeshShape, build_mesh, launch
from parallel2d.generate import generate
from parallel2d.loss import VocabShard
from tests.ranks import run_ranks
from tests.test_checkpoint import CONFIG, build


def text(shape: MeshShape, temperature: float) -> tuple[list[int], bool, bool]:
    with launch.world(shape.world, "cpu", 60):
        model, _ = build(shape)
        vocab = VocabShard.of(CONFIG.vocab_size, build_mesh(shape, "cpu")["tp"])
        before = torch.get_rng_state()
        ids = generate(
            model, torch.tensor([[3, 1, 4]]), 9, vocab=vocab, context=5, temperature=temperature, seed=0
        )
        sharded = all(p.to_local().numel() < p.numel() for p in model.parameters() if p.ndim > 1)
        untouched = torch.equal(before, torch.get_rng_state()) and model.training
        return ids[0].tolist(), untouched, sharded


@pytest.mark.parametrize("temperature", [1.0, pytest.param(0.0, marks=pytest.mark.slow)])
def test_equals_one_process(temperature):
    expected, untouched, _ = run_ranks(1, text, MeshShape(), temperature)[0]
    assert untouched and len(expected) == 12 and expected[:3] == [3, 1, 4]
    for shape in (MeshShape(1, 2, 2), MeshShape(1, 3, 2)):
        assert run_ranks(shape.world, text, shape, temperature) == [(expected, True, True)] * shape.world
