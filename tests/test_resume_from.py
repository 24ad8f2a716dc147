"""Where a run goes on, what it refuses to mix, and what it takes of a model that is another one."""

import json
import shlex
import shutil
from pathlib import Path

import pytest

from parallel2d import UserError
from parallel2d.checkpoint.files import commit
from parallel2d.checkpoint.find import name_of
from parallel2d.checkpoint.load import resume_from
from parallel2d.checkpoint.manifest import MANIFEST_FILE, Manifest, read_manifest
from parallel2d.config import CheckpointConfig
from tests.ranks import TINY_RUN, run_recipe
from tests.spoils import sealed

MODEL = {"width": 8}


def bare(run: Path, *steps: int, optimizer: str = "AdamW") -> Path:
    """A run folder with checkpoints that hold no tensor."""
    for step in steps:
        writing = run / "checkpoints" / f"{name_of(step)}.tmp"
        writing.mkdir(parents=True)
        facts = Manifest(step, {}, {}, "Llama", optimizer, {"model": MODEL}, {}, {})
        commit(writing, run / "checkpoints" / name_of(step), facts)
    return run


def test_where_a_run_goes_on(tmp_path):
    run, new = bare(tmp_path / "run", 2, 9, 10), tmp_path / "new"
    assert resume_from("auto", run, MODEL).steps == [10, 9, 2]
    assert resume_from("auto", new, MODEL) is resume_from("never", new, MODEL) is None
    assert resume_from(str(run), new, MODEL).step == 10
    assert resume_from(str(run / "checkpoints"), new, MODEL).step == 10
    assert resume_from(str(run / "checkpoints" / name_of(2)), new, MODEL).steps == [2]
    assert resume_from(str(run / "checkpoints" / name_of(10)), run, MODEL).step == 10
    assert resume_from(str(run), new, {"width": 16}, partial=True).step == 0


@pytest.mark.parametrize("steps", [(2, 10), (99_999_999, 100_000_000)], ids=str)
def test_what_would_mix_runs_is_refused(tmp_path, steps):
    run, other = bare(tmp_path / "run", *steps), bare(tmp_path / "other", 3)
    older, newest = (str(run / "checkpoints" / name_of(step)) for step in steps)
    message = (
        f"holds checkpoints up to {name_of(steps[1])}, .* use another --out, or --checkpoint.resume auto"
    )
    for choice in ("never", older, str(other)):
        with pytest.raises(UserError, match=message):
            resume_from(choice, run, MODEL)
    # With weights alone the run would begin at step 0 and come to the steps that are there.
    with pytest.raises(UserError, match="would overwrite"):
        resume_from(newest, run, MODEL, partial=True)


def test_another_model_and_no_checkpoint(tmp_path):
    run = bare(tmp_path / "run", 1)
    with pytest.raises(UserError, match=r"of another model \(width 8 there, 16 here\)"):
        resume_from("auto", run, {"width": 16})
    with pytest.raises(UserError, match="neither a checkpoint"):
        resume_from(str(tmp_path / "nothing"), tmp_path / "new", MODEL)


def test_weights_alone_begin_a_run_in_another_folder_or_at_step_0(tmp_path):
    assert resume_from("auto", bare(tmp_path / "imported", 0, optimizer=""), MODEL).step == 0
    run = bare(tmp_path / "run", 7, optimizer="")
    assert resume_from(str(run), tmp_path / "new", MODEL).step == 0
    with pytest.raises(UserError, match=r"would overwrite: use another --out$"):
        resume_from("auto", run, MODEL)


def test_what_is_damaged_is_passed_over_but_not_a_later_format(tmp_path):
    run = bare(tmp_path / "run", 8, 99_999_999, 100_000_000)
    newest = run / "checkpoints" / name_of(100_000_000)
    (newest / "foreign").touch()
    resume = resume_from("auto", run, MODEL)
    assert resume.steps == [99_999_999, 8] and list(resume.damaged) == [newest]
    (newest / "foreign").unlink()
    sealed(newest, lambda content: content.update(format=2))
    with pytest.raises(UserError, match="is of format 2, and this version reads 1: upgrade"):
        resume_from("auto", run, MODEL)
    for path in (run / "checkpoints").iterdir():
        (path / MANIFEST_FILE).write_text("{")
    with pytest.raises(UserError, match=r"(?s)is intact:.*100000000.*99999999.*00000008"):
        resume_from("auto", run, MODEL)


def test_partial_and_best_need_what_they_rest_on():
    for choice in ("auto", "never"):
        (problem,) = CheckpointConfig(resume=choice, partial=True).problems(50)
        assert "checkpoint.partial is for checkpoint.resume PATH" in problem
    assert CheckpointConfig(resume="runs/x", partial=True, keep_best=1).problems(50) == []
    for every, val_every in ((100, 0), (100, 30)):
        (problem,) = CheckpointConfig(every=every, keep_best=1).problems(val_every)
        assert f"make checkpoint.every {every} a multiple of log.val_every {val_every}" in problem


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("straight") / "run"
    assert run_recipe(1, *TINY_RUN, "--steps", "2", "--out", str(out))[0].exitcode == 0
    return out


def test_partial_takes_what_fits_and_begins_anew(straight, tmp_path, read_metrics):
    """Another vocabulary and a layer more."""
    flags = ["--model.vocab_size", "300", "--model.num_layers", "2", "--steps", "1", "--out", str(tmp_path)]
    resume = ["--checkpoint.resume", str(straight)]
    (refused,) = run_recipe(1, *TINY_RUN, *flags, *resume)
    assert refused.exitcode == 2 and "take the weights that fit" in refused.stderr
    (taken,) = run_recipe(1, *TINY_RUN, *flags, *resume, "--checkpoint.partial", "true")
    assert taken.exitcode == 0, taken.stderr
    assert "2 of another shape: model.embedding.weight [256, 32] instead of [300, 32]" in taken.stdout
    assert "missing: model.blocks.1." in taken.stdout and "optimizer." not in taken.stdout
    assert f"start     step 0, with the weights of {straight}/checkpoints/step-00000002" in taken.stdout
    assert list(read_metrics(tmp_path)) == [1]
    # The same command, and config.yaml, still say where the run began: it goes on from where it has come.
    more = ["--checkpoint.partial", "true", "--checkpoint.every", "1"]
    (again,) = run_recipe(1, *TINY_RUN, *flags, *resume, *more)
    assert again.exitcode == 0 and "is at step 1" in again.stdout, again.stderr
    (command,) = {line for line in taken.stdout.splitlines() if "--steps 2" in line and "--dp" not in line}
    assert f"--config {tmp_path}/config.yaml" in command
    (again,) = run_recipe(1, *shlex.split(command)[2:])
    assert again.exitcode == 0 and "after step 1 of" in again.stdout, again.stderr
    manifest = read_manifest(tmp_path / "checkpoints" / name_of(1))
    assert manifest.trainer["step"] == 1 and manifest.trainer["position"] == 4


def test_weights_alone_are_a_start(straight, tmp_path, read_metrics):
    """The optimizer is fresh: the first update is as long as the learning rate says, and step 1."""
    weights = tmp_path / "weights" / name_of(2)
    shutil.copytree(straight / "checkpoints" / name_of(2), weights)
    sealed(weights, lambda content: content.update(optimizer=""))
    flags = ["--steps", "1", "--checkpoint.resume", str(weights), "--out", str(tmp_path / "run")]
    (outcome,) = run_recipe(1, *TINY_RUN, *flags)
    assert outcome.exitcode == 0, outcome.stderr
    assert "start     step 0, with the weights of" in outcome.stdout
    lines = [json.loads(line) for line in (straight / "metrics.jsonl").read_text().splitlines()]
    after_2 = next(line["val_loss"] for line in lines if line["step"] == 2 and "val_loss" in line)
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert first == {"step": 0, "val_loss": after_2}
    assert read_metrics(tmp_path / "run")[1]["lr"] == read_metrics(straight)[1]["lr"]
