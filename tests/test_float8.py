"""float8 products: rounded on every mesh, of shapes that GPUs take, and only in the blocks."""

import sys

import pytest
import torch
from parallel2d.models.llama import Llama, LlamaConfig

from parallel2d import MeshShape, Precision, UserError, build_mesh, init_weights, launch, parallelize
from parallel2d.config import PrecisionConfig
from parallel2d.float8 import _LEAST_CAPABILITY, float8_problems
from parallel2d.loss import VocabShard
from parallel2d.mesh import dp_rank
from parallel2d.optim import build_optimizer
from parallel2d.planner.search import FLOAT8S
from parallel2d.step import train_step
from tests.ranks import RECIPE, TINY_RUN, run_ranks, run_recipe

CONFIG = LlamaConfig(61, 32, 2, 2, 2, 0, 64)


def curve(shape: MeshShape, float8: str, mode: str = "none", config: LlamaConfig = CONFIG) -> list[float]:
    """Loss and gradient norm of three steps, in float32."""
    with launch.world(shape.world, "cpu", 60) as device:
        mesh = build_mesh(shape, "cpu")
        with torch.device("meta"):
            model = Llama(config)
        precision = Precision(float8=float8)
        units = list(model.blocks)
        plan = model.tp_plan()
        parallelize(model, mesh, plan=plan, units=units, precision=precision, activation_checkpoint=mode)
        init_weights(model, device, 0)
        optimizer = build_optimizer(model, 1e-3, (0.9, 0.95), 0.1)
        vocab = VocabShard.of(config.vocab_size, mesh["tp"])
        ids = torch.randint(config.vocab_size, (6, 13), generator=torch.Generator().manual_seed(1))
        mine = ids.chunk(shape.dp)[dp_rank(mesh)]
        steps = [
            train_step(model, [(mine[:, :-1], mine[:, 1:])], optimizer, vocab, mesh, 1.0) for _ in range(3)
        ]
        return [number for stats in steps for number in (stats.loss, stats.grad_norm)]


@pytest.fixture(scope="module")
def alone() -> dict[str, list[float]]:
    return {recipe: run_ranks(1, curve, MeshShape(), recipe)[0] for recipe in FLOAT8S}


def test_each_recipe_rounds_and_rounds_otherwise(alone):
    assert len({tuple(numbers) for numbers in alone.values()}) == len(FLOAT8S)
    for numbers in alone.values():
        assert numbers == pytest.approx(alone["none"], rel=0.15)


@pytest.mark.parametrize("shape", [MeshShape(1, 3, 1), MeshShape(2, 1, 1)], ids=str)
def test_rows_and_whole_weight_gradients_are_rounded_alike_on_any_dp(alone, shape):
    ours = run_ranks(shape.world, curve, shape, "rowwise_with_gw_hp")[0]
    assert ours == pytest.approx(alone["rowwise_with_gw_hp"], rel=1e-4)
    assert ours != pytest.approx(alone["none"], rel=1e-4)


@pytest.mark.parametrize("recipe", ["tensorwise", pytest.param("rowwise", marks=pytest.mark.slow)])
def test_tp_shares_are_rounded_by_their_own_scales(alone, recipe):
    shape = MeshShape(1, 2, 2)
    ours = run_ranks(4, curve, shape, recipe)[0]
    assert ours == pytest.approx(alone["none"], rel=0.15)
    assert ours != pytest.approx(alone["none"], rel=1e-4)
    # What is computed again is rounded again, to the same numbers.
    for mode in ("selective", "full"):
        assert run_ranks(4, curve, shape, recipe, mode)[0] == pytest.approx(ours, rel=1e-6)


def refused(shape: MeshShape, config: LlamaConfig) -> str:
    with pytest.raises(UserError) as told:
        curve(shape, "rowwise", config=config)
    return str(told.value)


def test_shapes_that_no_gpu_takes_are_refused_on_a_cpu_too():
    (alone,) = run_ranks(1, refused, MeshShape(), LlamaConfig(61, 32, 2, 2, 2, 0, 40))
    assert alone.startswith(
        "float8 products need sizes that are multiples of 16: "
        "ffn.gate of block 0: 32 in, 40 out on a tp rank; "
    )
    assert "1 more: use another width, ffn_width or tp" in alone
    assert (
        "attention.q of block 0: 32 in, 8 out on a tp rank"
        in run_ranks(4, refused, MeshShape(1, 1, 4), LlamaConfig(61, 32, 2, 4, 4, 0, 64))[0]
    )


def test_the_recipe_trains_with_it_and_says_so(tmp_path, read_metrics):
    flags = (*TINY_RUN, "--steps", "2", "--model.ffn_width", "64", "--precision.param", "float32")
    for float8 in ("none", "tensorwise"):
        (outcome,) = run_recipe(
            1, *flags, "--precision.float8", float8, "--out", str(tmp_path / float8), recipe=RECIPE
        )
        assert outcome.exitcode == 0, outcome.stderr
    assert "forecast  none: the formulas do not cover float8" in outcome.stdout
    losses = [read_metrics(tmp_path / float8)[2]["loss"] for float8 in ("none", "tensorwise")]
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], rel=0.05)


def test_the_words_are_the_same_everywhere():
    assert PrecisionConfig.__annotations__["float8"].__args__ == FLOAT8S
    assert ("none", *_LEAST_CAPABILITY) == FLOAT8S


def test_what_is_missing_is_told(monkeypatch):
    assert float8_problems("none", "cuda") == [] == float8_problems("rowwise", "cpu")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    assert float8_problems("tensorwise", "cuda") == []
    assert float8_problems("rowwise", "cuda") == [
        "precision.float8 rowwise needs a GPU of compute capability 9.0: this one has 8.9"
    ]
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.delitem(sys.modules, "torchao.float8")
    assert float8_problems("rowwise", "cpu") == [
        "precision.float8 rowwise needs torchao: pip install 'parallel2d[float8]'"
    ]
