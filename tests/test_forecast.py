"""The recipe's own use of the planner: --dp auto --tp auto, and the prediction beside what is measured."""

import re
from dataclasses import dataclass, field, replace

import pytest
import torch
from parallel2d.models.llama import PRESETS, LlamaConfig

from parallel2d import MeshShape, UserError, forecast
from parallel2d.config import DataConfig, FsdpConfig, PrecisionConfig, RunConfig
from parallel2d.planner.hardware import GIB, Cluster, load_gpus
from parallel2d.planner.model import ModelShape
from tests.ranks import TINY_RUN, run_recipe

BIG = ModelShape.of(PRESETS["llama3-8b"])


@dataclass(frozen=True)
class Run(RunConfig):
    model: LlamaConfig = field(default_factory=LlamaConfig)


AUTO = Run("auto", "auto", device="cpu", data=DataConfig(seq_len=8192, global_batch=16))


def test_the_recipe_takes_a_mesh_and_says_what_it_predicts_and_measures(tmp_path):
    # One sequence: only tp can use both processes.
    flags = ("--dp", "auto", "--tp", "auto", "--data.global_batch", "1", "--steps", "2")
    outcomes = run_recipe(2, *TINY_RUN, *flags, "--out", str(tmp_path / "run"))
    assert [o.exitcode for o in outcomes] == [0, 0], outcomes[0].stderr
    said = outcomes[0].stdout
    assert "plan      dp 1, tp 2, dp_replicate 1: the best of 1 meshes that work" in said
    assert re.search(r"forecast  \S+ GiB of tensors on rank 0 at its peak \(parameters ", said)
    assert re.search(r"memory    predicted \S+ GiB of tensors, measured \S+ GiB resident, Python", said)


def test_meshes_of_a_world():
    def sizes(*arguments: int) -> list[tuple[int, int, int]]:
        return [(m.dp_replicate, m.dp_shard, m.tp) for m in forecast.meshes(*arguments)]

    assert sizes(4, -1, -1, 1) == [(1, 4, 1), (2, 2, 1), (1, 2, 2), (1, 1, 4)]
    assert sizes(8, -1, 2, 1) == [(1, 4, 2), (2, 2, 2)] and sizes(8, 2, -1, 1) == [(1, 2, 4)]
    assert sizes(8, -1, -1, 2) == [(2, 4, 1), (2, 2, 2)] and sizes(8, -1, 3, 1) == []


def test_the_best_mesh_fits_first_and_is_fast_then():
    h100 = Cluster.of(load_gpus()["h100"])
    long = replace(AUTO, data=DataConfig(seq_len=16_384, global_batch=16, micro_batch=1))
    full = replace(long, activation_checkpoint="full")
    every = forecast.meshes(8, -1, -1, 1)
    assert forecast.best_mesh(full, BIG, every, "cuda", h100) == MeshShape(1, 8, 1)
    # A sequence on a rank with everything kept is more than the GPU has.
    kept = forecast.best_mesh(long, BIG, every, "cuda", h100)
    assert kept.tp > 1
    found = forecast.forecast(long, BIG, kept, "cuda", h100)
    assert (found.verdict, found.memory.reserved < h100.gpu.memory_gib * GIB) == ("fit", True)
    assert "tokens/s" in forecast.before(long, found)
    # Sixteen long sequences at once fit on no mesh.
    with pytest.raises(
        UserError, match=r"no mesh of these 8 GPUs fits: 8×1 needs the least, \d+\.\d GiB of 79.1"
    ):
        forecast.best_mesh(
            replace(long, data=DataConfig(seq_len=65_536, global_batch=128)), BIG, every, "cuda", h100
        )
    # Without a known GPU no speed is known: the least tp.
    assert forecast.best_mesh(long, BIG, every, "cpu", None) == MeshShape(1, 8, 1)


def test_numbers_stay_and_auto_is_for_a_run():
    with pytest.raises(UserError, match=r"dp auto, tp auto, dp_replicate 2: 2 processes have no such mesh"):
        forecast.with_planned_mesh(replace(AUTO, dp_replicate=2), BIG, lambda c, m: [])
    assert forecast.with_planned_mesh(Run(4, 2), BIG, lambda c, m: ["no"]) == Run(4, 2)
    with pytest.raises(UserError, match="auto is for a run"):
        _ = AUTO.sizes
    with pytest.raises(UserError, match="auto is for a run"):
        _ = replace(AUTO, dp=2).sizes


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"freeze": ["*norm*"]}, "frozen weights"),
        ({"fsdp": FsdpConfig(offload=True)}, "offload"),
        ({"fsdp": FsdpConfig(gradient_sync="last")}, "gradient_sync last"),
    ],
)
def test_what_the_formulas_do_not_cover_is_not_predicted(changes, reason):
    config = replace(AUTO, **changes)
    found = forecast.forecast(config, BIG, MeshShape(1, 8, 1), "cpu", None)
    assert forecast.before(config, found) == f"forecast  none: the formulas do not cover {reason}"
    assert "predicted" not in forecast.after(config, found, torch.device("cpu"))


def test_both_vocabularies_of_a_run_say_the_same():
    config = replace(AUTO, precision=PrecisionConfig(compute="bfloat16"), activation_checkpoint="full")
    ours, theirs = (
        forecast.setup_of(config, 4, "cpu").step(BIG),
        forecast.step_of(config, BIG.width, 4, "cpu"),
    )
    sizes = {key: getattr(theirs, key).itemsize for key in ("compute", "reduce")}
    assert {key: getattr(ours, key).itemsize for key in sizes} == sizes
    assert replace(ours, compute=theirs.compute, reduce=theirs.reduce) == theirs
