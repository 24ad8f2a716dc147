"""A run that stops and goes on is the run that did not stop; on another mesh, too."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from parallel2d import MeshShape, build_mesh, init_weights, launch, parallelize
from parallel2d.checkpoint.load import load_checkpoint
from parallel2d.checkpoint.manifest import read_manifest
from parallel2d.checkpoint.store import CheckpointStore
from parallel2d.step import seed_step
from tests.ranks import TEXT, TINY_RUN, run_ranks, run_recipe

FLAGS = (
    *TEXT,
    "--data.seq_len",
    "32",
    "--data.global_batch",
    "8",
    "--log.every",
    "1",
    "--log.val_every",
    "0",
)
FLAGS += ("--log.val_batches", "1", "--log.sample_tokens", "0", "--checkpoint.every", "5", "--steps", "10")


def train(out: Path, dp: int, tp: int, *flags: str) -> str:
    """Run the recipe; rank 0's output."""
    outcomes = run_recipe(dp * tp, "--dp", str(dp), "--tp", str(tp), "--out", str(out), *FLAGS, *flags)
    assert [o.exitcode for o in outcomes] == [0] * (dp * tp), outcomes[0].stderr
    return outcomes[0].stdout


def stop_after_step_5(straight: Path, stopped: Path) -> None:
    """A copy of a run as it was when step 5's checkpoint was its newest, some later lines included."""
    shutil.copytree(straight, stopped)
    shutil.rmtree(stopped / "checkpoints" / "step-00000010")


@pytest.fixture(scope="module")
def straight_float32(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("straight") / "run"
    train(out, 2, 2)
    return out


@pytest.fixture(scope="module")
def straight_float64(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("straight") / "run"
    train(out, 4, 2, "--precision.param", "float64")
    return out


def test_same_mesh_bit_for_bit(straight_float32, tmp_path, read_metrics):
    stop_after_step_5(straight_float32, tmp_path / "run")
    assert "after step 5" in train(tmp_path / "run", 2, 2)
    straight, resumed = read_metrics(straight_float32), read_metrics(tmp_path / "run")
    assert list(resumed) == list(range(1, 11))
    for step in straight:
        for key in ("loss", "grad_norm", "lr", "tokens"):
            assert resumed[step][key] == straight[step][key], (step, key)


@pytest.mark.parametrize(
    "mesh",
    [(1, 1, 1), *(pytest.param(m, marks=pytest.mark.slow) for m in [(2, 4, 1), (8, 1, 1), (4, 2, 2)])],
    ids=str,
)
def test_other_mesh_to_1e_9(straight_float64, tmp_path, read_metrics, mesh):
    dp, tp, replicas = mesh
    stop_after_step_5(straight_float64, tmp_path / "run")
    flags = ("--precision.param", "float64", "--dp_replicate", str(replicas))
    assert "after step 5" in train(tmp_path / "run", dp, tp, *flags)
    straight, resumed = read_metrics(straight_float64), read_metrics(tmp_path / "run")
    for step in range(6, 11):
        for key in ("loss", "grad_norm"):
            assert resumed[step][key] == pytest.approx(straight[step][key], rel=1e-9), (step, key)


def test_a_finished_run_is_left_alone(straight_float32, tmp_path):
    shutil.copytree(straight_float32, tmp_path / "run")
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")}
    assert "is at step 10: to go on, raise --steps (now 10)" in train(tmp_path / "run", 2, 2)
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")} == before


def test_the_last_step_is_saved_and_old_ones_go(tmp_path):
    train(tmp_path / "run", 1, 1, "--steps", "7", "--checkpoint.every", "2", "--checkpoint.keep", "2")
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == [
        "step-00000006",
        "step-00000007",
    ]


def test_leftovers_are_cleared_and_foreign_names_are_not(straight_float32, tmp_path):
    stop_after_step_5(straight_float32, tmp_path / "run")
    checkpoints = tmp_path / "run" / "checkpoints"
    (checkpoints / "step-00000010.tmp").mkdir()
    (checkpoints / "step-00000005-backup").mkdir()
    (checkpoints / "step-00000030.tmp").touch()
    assert "after step 5" in train(tmp_path / "run", 2, 2)
    assert not (checkpoints / "step-00000010.tmp").exists()
    assert (checkpoints / "step-00000005-backup").exists()


def test_other_data_is_read_from_its_start(straight_float32, tmp_path):
    stop_after_step_5(straight_float32, tmp_path / "run")
    assert "the data or its order differs" in train(tmp_path / "run", 2, 2, "--seed", "1", "--steps", "6")
    assert read_manifest(tmp_path / "run/checkpoints/step-00000006").trainer["position"] == 8


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(nn.functional.dropout(self.first(x), 0.5, self.training))


def train_with_dropout(folder: str, start: int, stop: int) -> list[float]:
    with launch.world(4, "cpu", 60) as device:
        mesh = build_mesh(MeshShape(1, 2, 2), "cpu")
        with torch.device("meta"):
            model = Noisy()
        parallelize(model, mesh, plan={"first": "colwise", "second": "rowwise"}, units=[])
        init_weights(model, device, 0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        store = CheckpointStore(Path(folder))
        if start:
            load_checkpoint(store.latest(), model, optimizer)
        losses = []
        for step in range(start, stop):
            seed_step(0, step, mesh["dp_shard"].get_local_rank())
            loss = model(torch.ones(4, 8)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        store.save(stop, model, optimizer, {})
        return losses


def test_random_state_resumes_too(tmp_path):
    straight = run_ranks(4, train_with_dropout, str(tmp_path / "a"), 0, 6)
    first = run_ranks(4, train_with_dropout, str(tmp_path / "b"), 0, 3)
    second = run_ranks(4, train_with_dropout, str(tmp_path / "b"), 3, 6)
    assert [a + b for a, b in zip(first, second, strict=True)] == straight
    assert straight[0] != straight[2]  # data-parallel ranks draw different masks


def test_the_flags_of_retention_and_async_reach_the_run(tmp_path):
    """At a rate that spoils the model the best checkpoint is an early one, which no other rule keeps."""
    flags = ["--steps", "7", "--checkpoint.every", "1", "--log.val_every", "1", "--optim.lr", "3"]
    kept = ["--checkpoint.keep", "1", "--checkpoint.keep_every", "4", "--checkpoint.keep_best", "1"]
    said = {}
    for choice in ("true", "false"):
        out = tmp_path / choice
        (outcome,) = run_recipe(1, *TINY_RUN, *flags, *kept, "--checkpoint.async", choice, "--out", str(out))
        assert outcome.exitcode == 0, outcome.stderr
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        losses = {line["step"]: line["val_loss"] for line in lines if line.get("val_loss") and line["step"]}
        best = min(losses, key=losses.__getitem__)
        assert best not in (4, 7)
        held = {int(p.name.removeprefix("step-")) for p in (out / "checkpoints").iterdir()}
        assert held == {best, 4, 7}
        said[choice] = outcome.stdout.index("step-00000001 in") < outcome.stdout.index("\nstep 2/7")
    # In the background a save is told of when the next step has ended.
    assert said == {"true": False, "false": True}
