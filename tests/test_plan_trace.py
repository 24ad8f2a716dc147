"""`parallel2d plan --trace`: the formulas beside a traced step, as the command prints them."""

import json

import pytest
import yaml

from parallel2d import MeshShape, UserError
from parallel2d.cli.plan_model import planned_model
from parallel2d.cli.plan_trace import as_json, trace_beside
from parallel2d.planner.model import ModelShape
from parallel2d.planner.predict import predict
from parallel2d.planner.setup import Setup

# A vocabulary that tp does not divide.
MODEL = {"preset": "debug", "vocab_size": 1003, "num_layers": 1, "num_kv_heads": 2, "qk_norm": True}
DATA = {"seq_len": 32, "global_batch": 16}
EIGHT = ("--gpus", "8", "--gpu", "h100")


@pytest.fixture
def recipe(tmp_path):
    file = tmp_path / "tiny.yaml"
    content = {"model": MODEL, "data": DATA, "activation_checkpoint": "selective"}
    file.write_text(yaml.safe_dump(content))
    return file


def same(formula: dict, trace: dict) -> None:
    """What must be equal is, and the peak of memory is near."""
    assert formula["collectives"] == trace["collectives"] and trace["collectives"]
    assert formula["flops_per_step"] == trace["flops_per_step"] > 0
    within = 0.01 if formula["peak"] == "loss" else 0.05
    assert formula["allocated_bytes"] == pytest.approx(trace["allocated_bytes"], rel=within)
    assert sum(trace["memory"].values()) == trace["allocated_bytes"]


@pytest.mark.parametrize("layers", [1, pytest.param(9, marks=pytest.mark.slow)])
def test_both_as_json_on_replicas(ask_plan, recipe, layers):
    content = yaml.safe_load(recipe.read_text())
    recipe.write_text(yaml.safe_dump({**content, "model": MODEL | {"num_layers": layers}}))
    found = json.loads(ask_plan("--model", recipe, *EIGHT, "--trace", "--mesh", "2x2x2", "--json"))
    same(**{side: found[side] for side in ("formula", "trace")})
    assert [found["formula"][axis] for axis in ("dp_replicate", "dp_shard", "tp")] == [2, 2, 2]
    axes = {entry["axis"] for entry in found["trace"]["collectives"]}
    assert axes == {"dp_replicate", "dp_shard", "tp", "world"}
    # Two shallow traces do not tell what the allocator reserves.
    assert (found["trace"]["reserved_bytes"] is None) == (layers == 9)


def test_more_micro_batches_than_two_are_traced_as_two(recipe):
    model = planned_model(str(recipe))
    setup = Setup(64, 32, 3, "none")  # enough tokens for activations to decide the peak
    beside = trace_beside(model, predict(ModelShape.of(model.config), MeshShape(1, 2, 2), setup, None))
    found = as_json(beside)
    assert found["formula"]["accumulation"] == 2
    same(found["formula"], found["trace"])


def test_both_beside_each_other(ask_plan, recipe):
    said = ask_plan("--model", recipe, *EIGHT, "--trace", "--mesh", "4x2").splitlines()
    assert said[0].startswith("mesh 4×2, micro-batch ") and "checkpointing selective" in said[0]
    sent = [line.split() for line in said if line.startswith(("dp_shard", "tp", "world"))]
    assert len(sent) == 6 and "differs" not in "\n".join(said)
    for _, _, count, size, traced_count, traced_size in sent:
        assert (count, size) == (traced_count, traced_size)
    flops, allocated = (
        next(line.split() for line in said if line.strip().startswith(name))
        for name in ("floating-point", "allocated")
    )
    assert flops[-1] == flops[-2]
    assert float(allocated[-2]) == pytest.approx(float(allocated[-1]), abs=0.0011)  # GiB, three digits


@pytest.mark.parametrize(
    "arguments, errors",
    [
        (("--model", "debug", "--trace"), ["--trace needs --mesh"]),
        (("--model", "debug", "--mesh", "4x2"), ["--mesh is what --trace traces"]),
        (
            ("--model", "debug", "--trace", "--mesh", "4x2", "--explain", "4x2", "--plot", "p.png"),
            ["--trace and --explain: use one", "--plot draws all meshes"],
        ),
        (("--trace", "--mesh", "4x2"), ["--model is missing"]),
        (("--model", "debug", "--trace", "--mesh", "3x2"), ["mesh 3x2 has 6 ranks, not 8"]),
        (("--model", "debug", "--trace", "--mesh", "8by1"), ["is not DPxTP"]),
        (("--model", "debug", "--trace", "--mesh", "8x1x1"), ["replicas of whole weights, not FSDP"]),
        (
            ("--model", "debug", "--trace", "--mesh", "4x2", "--global_batch", "6", "--seq_len", "31"),
            ["global_batch 6 is not divisible by dp 4", "seq_len 31 is not divisible by tp 2"],
        ),
        (
            ("--model", "debg", "--trace", "--mesh", "4x2"),
            ["model 'debg' is not known: nearest names: debug"],
        ),
        (
            ("--model", "debug", "--trace", "--mesh", "4x2", "--compile", "true"),
            ["compiled blocks cannot be traced"],
        ),
    ],
)
def test_what_cannot_be_traced_is_told_at_once(ask_plan, arguments, errors):
    with pytest.raises(UserError) as told:
        ask_plan(*EIGHT, *arguments)
    assert all(error in str(told.value) for error in errors)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["64x1", "8x8", "2x8x4"])
def test_a_real_size_from_two_shallow_traces(ask_plan, mesh):
    arguments = ("--model", "llama3-8b", "--gpus", "64", "--gpu", "h100", "--trace", "--mesh", mesh, "--json")
    found = json.loads(ask_plan(*arguments))
    same(found["formula"], found["trace"])
