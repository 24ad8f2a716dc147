"""Dropout masks: independent across dp, alike where activations are whole over tp, independent where not."""

import itertools

import pytest
import torch
from parallel2d.models.gpt2 import GPT2, GPT2Config
from torch import Tensor, nn

from parallel2d import MeshShape, UserError, build_mesh, init_weights, launch, parallelize
from parallel2d.loss import VocabShard
from parallel2d.mesh import dp_rank
from parallel2d.optim import build_optimizer
from parallel2d.step import evaluate, seed_step, train_step
from parallel2d.tensor_parallel import match_plan
from tests.ranks import run_ranks


class Noisy(nn.Module):
    """Dropout of features, which tp splits, and of an output, which is whole on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 256, bias=False), nn.Linear(256, 64, bias=False)
        self.of_features, self.of_output = nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.of_output(self.down(self.of_features(self.up(x))))


PLAN = {"up": "colwise", "down": "rowwise", "of_features": "sharded_dropout"}


def masks(shape: MeshShape, step: int) -> list[tuple[list[int], list[int]]]:
    """Which of features and output were dropped in two forwards of a step."""
    with launch.world(shape.world, "cpu", 60):
        mesh = build_mesh(shape, "cpu")
        model = Noisy()
        parallelize(model, mesh, plan=PLAN, units=[model.up])
        seen: dict[nn.Module, list[int]] = {}
        for module in (model.of_features, model.of_output):
            module.register_forward_hook(lambda m, _, y: seen.update({m: (y == 0).flatten().int().tolist()}))
        seed_step(0, step, dp_rank(mesh))
        found = []
        for _ in range(2):
            model(torch.ones(1, 8))
            found.append((seen[model.of_features], seen[model.of_output]))
        return found


def test_masks():
    shape = MeshShape(1, 2, 2)
    first = run_ranks(4, masks, shape, 0)
    (a, b), (c, d) = (first[0], first[1]), (first[2], first[3])  # (tp 0, tp 1) of dp 0 and dp 1
    for call in range(2):
        assert a[call][1] == b[call][1] and c[call][1] == d[call][1], "whole over tp: one mask"
        assert a[call][1] != c[call][1], "another mask on the other dp rank"
        features = [rank[call][0] for rank in (a, b, c, d)]
        assert all(x != y for x, y in itertools.combinations(features, 2)), "split over tp: all differ"
        assert all(0.3 < sum(mask) / len(mask) < 0.7 for mask in features)
    assert a[0] != a[1], "another mask in the next forward"
    assert run_ranks(4, masks, shape, 0) == first, "a function of the seed"
    assert run_ranks(4, masks, shape, 1)[0] != first[0], "another one in the next step"


CONFIG = GPT2Config(61, 32, 1, 4, 64, 16, embedding_dropout=0.2, residual_dropout=0.2, attention_dropout=0.2)


def losses(shape: MeshShape, mode: str) -> tuple[list[float], float]:
    """Training losses of three steps, and an evaluation, in which nothing is dropped."""
    with launch.world(shape.world, "cpu", 60) as device:
        mesh = build_mesh(shape, "cpu")
        with torch.device("meta"):
            model = GPT2(CONFIG)
        parallelize(model, mesh, plan=model.tp_plan(), units=list(model.blocks), activation_checkpoint=mode)
        init_weights(model, device, seed=0)
        optimizer, vocab = build_optimizer(model, 1e-2, (0.9, 0.95), 0.1), VocabShard.of(61, mesh["tp"])
        batch = (torch.arange(32).view(2, 16), torch.arange(1, 33).view(2, 16))
        found = []
        for step in range(3):
            seed_step(0, step, dp_rank(mesh))
            found.append(train_step(model, [batch, batch], optimizer, vocab, mesh, 1.0).loss)
        return found, evaluate(model, [batch], vocab, mesh)


def test_the_same_seed_is_the_same_run_and_recomputing_draws_the_same_masks():
    shape = MeshShape(1, 2, 2)
    first = run_ranks(4, losses, shape, "none")[0]
    assert run_ranks(4, losses, shape, "none")[0] == first
    for mode in ("full", "selective"):
        trained, evaluated = run_ranks(4, losses, shape, mode)[0]
        assert trained == pytest.approx(first[0], rel=1e-6) and evaluated == pytest.approx(first[1], rel=1e-6)
    # Nothing is dropped in evaluation: on any mesh the same, up to the weights that dropout trained.
    assert first[1] < min(first[0])


def test_a_sequence_plan_must_name_every_dropout():
    with torch.device("meta"):
        model = GPT2(CONFIG)
    plan = {key: style for key, style in model.tp_plan().items() if key != "blocks.*.ffn.dropout"}
    with pytest.raises(UserError, match=r"it leaves out blocks\.0\.ffn\.dropout"):
        match_plan(model, plan)
