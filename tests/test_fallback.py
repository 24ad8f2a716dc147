"""Damage that a run meets: auto goes on at the newest that is intact."""

import shutil
from pathlib import Path

import pytest

from parallel2d.checkpoint.find import checkpoints_in
from tests.ranks import TINY_RUN, run_recipe
from tests.spoils import spoil_newest


@pytest.fixture(scope="module")
def run_of_4(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("straight") / "run"
    assert (
        run_recipe(1, *TINY_RUN, "--steps", "4", "--checkpoint.every", "1", "--out", str(out))[0].exitcode
        == 0
    )
    return out


def test_auto_falls_back_says_so_and_saves_that_step_again(run_of_4, tmp_path, read_metrics):
    out = tmp_path / "run"
    shutil.copytree(run_of_4, out)
    spoil_newest(out / "checkpoints", 1)
    flags = ["--steps", "5", "--checkpoint.every", "1", "--checkpoint.keep", "0", "--out", str(out)]
    outcomes = run_recipe(2, "--dp", "2", *TINY_RUN, *flags)
    assert [o.exitcode for o in outcomes] == [0, 0], outcomes
    said = outcomes[0].stdout
    assert "step-00000004/__0_0.distcp is damaged: bytes" in said and "passed over" in said
    assert "step-00000004 is now step-00000004.damaged" in said and "after step 3 of" in said
    whole, damaged = checkpoints_in(out / "checkpoints")
    assert [c.step for c in whole] == [2, 3, 4, 5] and not damaged
    assert (out / "checkpoints/step-00000004.damaged").is_dir()
    straight, again = read_metrics(run_of_4), read_metrics(out)
    assert again[4]["loss"] == pytest.approx(straight[4]["loss"], rel=1e-9)


@pytest.mark.parametrize("choice", ["auto", "step-00000004"])
def test_without_an_intact_one_nothing_is_trained(run_of_4, tmp_path, choice):
    out = tmp_path / "run"
    shutil.copytree(run_of_4, out)
    names = spoil_newest(out / "checkpoints", 3 if choice == "auto" else 1)
    before = (out / "metrics.jsonl").read_text()
    resume = choice if choice == "auto" else str(out / "checkpoints" / choice)
    flags = ["--steps", "5", "--checkpoint.resume", resume, "--out", str(out)]
    (outcome,) = run_recipe(1, *TINY_RUN, *flags)
    told = "no checkpoint is intact" if choice == "auto" else "step-00000004/__0_0.distcp is damaged"
    assert outcome.exitcode == 2 and told in outcome.stderr
    assert all(f"{name}/__0_0.distcp is damaged" in outcome.stderr for name in names)
    assert (out / "metrics.jsonl").read_text() == before
    assert not list((out / "checkpoints").glob("*.damaged"))
