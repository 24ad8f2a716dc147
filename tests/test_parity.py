"""Any mesh, same numbers: the real recipe on every mesh against one process."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ranks import TEXT, run_recipe

SMALL = (*TEXT, "--data.seq_len", "32", "--data.global_batch", "8", "--steps", "5", "--log.every", "1")
QUIET = (
    "--log.val_batches",
    "1",
    "--log.val_every",
    "0",
    "--log.sample_tokens",
    "0",
    "--checkpoint.every",
    "0",
)
# The policy of large models, which auto does not choose for so small a one; float32 has auto.
FLOAT64 = ("--precision.param", "float64", "--fsdp.reshard_after_forward", "but_last")
MESHES = [(2, 1, 1), (1, 2, 1), (2, 2, 1), (4, 2, 2)]
MESHES += [
    pytest.param(mesh, marks=pytest.mark.slow) for mesh in [(2, 4, 1), (4, 2, 1), (8, 1, 1), (1, 8, 1)]
]


@pytest.fixture(scope="module")
def curves(tmp_path_factory, request) -> Callable[..., dict]:
    """curves(dp, tp, dp_replicate, *flags): the loss, norm and validation curves of a run, cached."""
    cache: dict[tuple, dict] = {}

    def run(dp: int, tp: int, dp_replicate: int, *flags: str) -> dict:
        key = (dp, tp, dp_replicate, flags)
        if key not in cache:
            out = tmp_path_factory.mktemp("run")
            mesh = ("--dp", str(dp), "--tp", str(tp), "--dp_replicate", str(dp_replicate))
            outcomes = run_recipe(dp * tp, *mesh, "--out", str(out), *SMALL, *QUIET, *flags)
            assert [o.exitcode for o in outcomes] == [0] * (dp * tp), outcomes[0].stderr
            cache[key] = read_curves(out)
        return cache[key]

    return run


def read_curves(out: Path) -> dict[tuple[int, str], float]:
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return {(r["step"], k): r[k] for r in lines for k in ("loss", "grad_norm", "val_loss") if k in r}


def worst_error(ours: dict, reference: dict) -> float:
    assert ours.keys() == reference.keys()
    return max(abs(ours[key] - value) / abs(value) for key, value in reference.items())


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_float64_equals_one_process(curves, mesh):
    reference = curves(1, 1, 1, *FLOAT64)
    assert len(reference) == 12  # loss and grad_norm of five steps, two validations
    assert worst_error(curves(*mesh, *FLOAT64), reference) < 1e-9


@pytest.mark.parametrize("mesh", [(2, 2, 1), pytest.param((4, 2, 2), marks=pytest.mark.slow)], ids=str)
def test_float32_equals_one_process(curves, mesh):
    assert worst_error(curves(*mesh), curves(1, 1, 1)) < 1e-4


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_activation_checkpoint_changes_nothing(curves, mode):
    ours = curves(2, 2, 1, *FLOAT64, "--activation_checkpoint", mode)
    assert worst_error(ours, curves(1, 1, 1, *FLOAT64)) < 1e-9


def test_shards_of_uneven_size(curves):
    """Three does not divide the width 128, nor 128 rows of the vocabulary's share."""
    flags = (*FLOAT64, "--data.global_batch", "9")
    assert worst_error(curves(3, 2, 1, *flags), curves(1, 1, 1, *flags)) < 1e-9


@pytest.mark.slow
def test_accumulation_changes_nothing(curves):
    ours = curves(2, 2, 1, *FLOAT64, "--data.micro_batch", "1")
    assert worst_error(ours, curves(1, 1, 1, *FLOAT64)) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "flags"),
    [((1, 4, 1), ("--model.vocab_size", "259")), ((2, 2, 1), ("--model.tie_embeddings", "true"))],
    ids=str,
)
def test_uneven_vocabulary_and_tied_head(curves, mesh, flags):
    reference = curves(1, 1, 1, *FLOAT64, *flags)
    assert worst_error(curves(*mesh, *FLOAT64, *flags), reference) < 1e-9


def test_bfloat16_compute_is_applied_on_one_process_too(curves):
    """The policy must not depend on there being other ranks: both runs differ from float32, a little."""
    flags = ("--precision.compute", "bfloat16", "--steps", "3")
    alone, sharded = curves(1, 1, 1, *flags), curves(2, 2, 1, *flags)
    exact = curves(1, 1, 1, "--steps", "3")
    assert 1e-5 < worst_error(alone, exact) < 2e-2
    assert 1e-5 < worst_error(sharded, exact) < 2e-2


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--optim.final", "0.9"),
        ("--optim.beta1", "0.5"),
        ("--optim.beta2", "0.5"),
        ("--optim.weight_decay", "5"),
        ("--optim.max_norm", "0.01"),
        ("--precision.reduce", "bfloat16"),
        ("--data.val_fraction", "0.3"),
    ],
)
def test_each_knob_reaches_the_curve(curves, flag, value):
    warmed_up = ("--optim.warmup_steps", "2")  # the default is as long as these runs: nothing would decay
    assert curves(2, 1, 1, *warmed_up, flag, value) != curves(2, 1, 1, *warmed_up)
