"""Each mistake: one clear message, once, a status ≠ 0, and nothing written."""

from pathlib import Path

import pytest

from parallel2d.run_folder import lock
from tests.ranks import run_recipe

SMALL = ("--data.seq_len", "32", "--data.global_batch", "8", "--steps", "2", "--log.val_batches", "1")
SMALL += ("--log.sample_tokens", "0")


def said(world: int, *flags: str) -> str:
    """What all ranks print to stderr together, after a failure with status 2."""
    outcomes = run_recipe(world, *flags, timeout_s=15)
    everything = "".join(o.stderr for o in outcomes)
    assert 2 in {o.exitcode for o in outcomes}
    assert "Traceback" not in everything
    assert "".join(o.stdout for o in outcomes) == ""
    return everything


@pytest.mark.parametrize(
    ("flags", "messages"),
    [
        (
            (
                "--dp",
                "1",
                "--tp",
                "4",
                "--model.num_heads",
                "6",
                "--model.num_kv_heads",
                "6",
                "--model.width",
                "96",
            ),
            ("num_heads 6 is not divisible by tp 4: use tp 1, 2, 3, 6", "processes that work: 4×1, 2×2"),
        ),
        (("--dp", "3", "--tp", "2"), ("dp 3 × tp 2 = 6 is not the world of 4", "work: 4×1, 2×2, 1×4")),
        (("--tp", "4", "--data.seq_len", "30"), ("data.seq_len 30 is not divisible by tp 4: use 28 or 32",)),
        (("--dp", "4", "--data.global_batch", "6"), ("data.global_batch 6 is not divisible by dp 4: use 8",)),
        (("--dp", "4", "--dp_replicate", "3"), ("dp 4 is not divisible by dp_replicate 3",)),
        (("--data.path", "/nowhere"), ("data.path '/nowhere' does not exist",)),
        (("--optim.learning_rate", "1"), ("nearest known keys",)),
        (("--model.vocab_size", "100"), ("model.vocab_size 100 is below 256",)),
        (("--checkpoint.resume", "/nowhere"), ("/nowhere is neither a checkpoint",)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_mistakes_of_the_configuration(tmp_path, flags, messages):
    everything = said(4, *SMALL, "--out", str(tmp_path / "run"), *flags)
    for message in messages:
        assert everything.count(message) == 1, everything
    assert not (tmp_path / "run").exists()


def test_a_mistake_in_a_file_and_several_at_once(tmp_path):
    (tmp_path / "x.yaml").write_text("data:\n  sequence: 3\n")
    assert said(2, "--config", str(tmp_path / "x.yaml")).count("'sequence'") == 1
    flags = ("--dp", "3", "--data.seq_len", "33", "--tp", "2", "--optim.lr", "-1")
    everything = said(6, *SMALL, *flags, "--out", str(tmp_path / "run"))
    assert all(m in everything for m in ("seq_len 33", "global_batch 8 is not divisible by dp 3", "lr -1"))


def snapshot(folder: Path) -> dict[Path, tuple[int, int]]:
    return {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in folder.rglob("*")}


def test_another_model_and_a_fresh_start_leave_the_old_run_alone(tmp_path):
    out = ("--out", str(tmp_path / "run"))
    assert run_recipe(1, *SMALL, *out)[0].exitcode == 0
    before = snapshot(tmp_path)
    assert "num_layers 2 there, 3 here" in said(2, *SMALL, *out, "--model.num_layers", "3", "--steps", "4")
    assert "would overwrite" in said(2, *SMALL, *out, "--checkpoint.resume", "never")
    assert snapshot(tmp_path) == before


def test_a_token_outside_the_vocabulary_in_the_middle_of_a_run(tmp_path):
    (tmp_path / "text").write_bytes(b"a" * 2000 + b"\xff" * 2000 + b"a" * 2000)
    flags = ("--data.path", str(tmp_path / "text"), "--model.vocab_size", "200")
    outcomes = run_recipe(2, *SMALL, *flags, "--steps", "30", "--out", str(tmp_path / "run"))
    everything = "".join(o.stderr for o in outcomes)
    assert "the data holds token 255, outside model.vocab_size 200" in everything
    assert "Traceback" not in everything


def test_a_loss_that_is_not_finite_stops_before_the_weights_change(tmp_path):
    flags = ("--optim.lr", "1e30", "--optim.warmup_steps", "0", "--checkpoint.every", "1", "--steps", "9")
    outcomes = run_recipe(4, *SMALL, *flags, "--tp", "2", "--out", str(tmp_path / "run"))
    everything = "".join(o.stderr for o in outcomes)
    assert everything.count(": lower optim.lr") == 1, everything
    assert "Traceback" not in everything


def test_folders_that_are_not_for_a_run(tmp_path):
    (tmp_path / "file").touch()
    assert "cannot be a folder" in said(2, *SMALL, "--out", str(tmp_path / "file"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.yaml").write_text("steps: 3  # my notes\n")
    assert "was not written by a run" in said(2, *SMALL, "--out", str(tmp_path / "mine"))
    assert (tmp_path / "mine" / "config.yaml").read_text() == "steps: 3  # my notes\n"
    flags = ("--data.path", str(tmp_path / "mine"), "--out", str(tmp_path / "mine" / "run"))
    assert "a run would read what it writes" in said(2, *SMALL, *flags)


def test_two_runs_in_one_folder(tmp_path):
    (tmp_path / "run").mkdir()
    with lock(tmp_path / "run"):
        assert "another run is writing to" in said(2, *SMALL, "--out", str(tmp_path / "run"))
    assert run_recipe(2, *SMALL, "--out", str(tmp_path / "run"))[0].exitcode == 0
