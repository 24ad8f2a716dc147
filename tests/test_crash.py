"""A crash at any moment: what is left is whole, and the run that goes on is the undisturbed one."""

import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallel2d import MeshShape, launch
from parallel2d.checkpoint import files, find
from parallel2d.checkpoint import store as stores
from parallel2d.checkpoint.find import checkpoints_in, name_of, open_checkpoint
from parallel2d.checkpoint.retention import Retention
from parallel2d.checkpoint.store import CheckpointStore
from tests.ranks import RECIPE, TINY_RUN, Outcome, _recipe_main, run_recipe, try_ranks
from tests.test_checkpoint import build

STEPS = 10
FLAGS = (*TINY_RUN, "--dp", "2", "--checkpoint.every", "1", "--checkpoint.keep", "2", "--steps", str(STEPS))


def recipe_with_pid(pids: str, *flags: str) -> None:
    (Path(pids) / os.environ["RANK"]).write_text(str(os.getpid()))
    _recipe_main(RECIPE, flags)


def has_come(checkpoints: Path, phase: str, step: int) -> bool:
    """Whether the moment is there from which the kill is counted."""
    final = checkpoints / name_of(step)
    if phase == "before":
        return (checkpoints / name_of(step - 1)).exists()
    return final.exists() or (phase == "within" and (checkpoints / f"{name_of(step)}.tmp").exists())


def run_and_kill(out: Path, dice: random.Random, phase: str, *flags: str) -> str:
    """Kill one rank of a run or both, soon after `phase` of a save; where in the save the kill fell."""
    checkpoints = out / "checkpoints"
    found = checkpoints_in(checkpoints)[0]
    step = (found[-1].step if found else 0) + dice.choice((2, 3))
    victims = dice.choice(((0,), (1,), (0, 1)))
    pids = out.with_name(f"pids of the run to step {step}")
    pids.mkdir()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(try_ranks, 2, recipe_with_pid, str(pids), "--out", str(out), *FLAGS, *flags)
        while not has_come(checkpoints, phase, step) and not running.done():
            time.sleep(0.0002)
        time.sleep(dice.uniform(0, 0.003 if phase == "within" else 0.02))
        names = {path.name for path in checkpoints.iterdir()}
        for rank in victims:
            os.kill(int((pids / str(rank)).read_text()), signal.SIGKILL)
        outcomes = running.result()
    assert all(outcomes[rank].exitcode == -signal.SIGKILL for rank in victims), outcomes
    if f"{name_of(step)}.tmp" in names:
        return "within"
    return "after" if name_of(step) in names else "before"


def go_on(out: Path, *flags: str) -> Outcome:
    """The same command again; it must go on at the newest checkpoint that the crash left."""
    whole, damaged = checkpoints_in(out / "checkpoints")
    assert not damaged
    outcomes = run_recipe(2, "--out", str(out), *FLAGS, *flags)
    assert [o.exitcode for o in outcomes] == [0, 0], outcomes
    assert (f"after step {whole[-1].step} of" if whole else "from nothing") in outcomes[0].stdout
    return outcomes[0]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("straight") / "run"
    go_on(out)
    return out


def assert_same_curve(out: Path, undisturbed: Path, read_metrics) -> None:
    ours, straight = read_metrics(out), read_metrics(undisturbed)
    assert list(ours) == list(straight) == list(range(1, STEPS + 1))
    for step, line in straight.items():
        for key in ("loss", "grad_norm"):
            assert ours[step][key] == pytest.approx(line[key], rel=1e-9), (step, key)


def survive(out: Path, seed: int, phases: list[str], *flags: str) -> list[str]:
    """One run, killed once for each phase and started again each time; where the kills fell."""
    dice = random.Random(seed)
    fell = []
    for phase in phases:
        fell.append(run_and_kill(out, dice, phase, *flags))
    go_on(out, *flags)
    names = sorted(path.name for path in (out / "checkpoints").iterdir())
    # The one that the last start went on from stays, too.
    assert names[-2:] == [name_of(STEPS - 1), name_of(STEPS)] and len(names) <= 3
    return fell


@pytest.mark.slow
def test_two_kills(tmp_path, undisturbed, read_metrics):
    survive(tmp_path / "run", 0, ["within", "before"])
    assert_same_curve(tmp_path / "run", undisturbed, read_metrics)


@pytest.mark.slow
def test_twenty_kills(tmp_path, undisturbed, read_metrics):
    fell = Counter()
    for seed in range(7):
        out = tmp_path / str(seed) / "run"
        out.parent.mkdir()
        phases = ["before", "within", "within"] if seed % 2 else ["within", "after", "before"]
        fell.update(
            survive(
                out, seed, phases[: 2 if seed == 6 else 3], "--checkpoint.async", str(seed % 3 > 0).lower()
            )
        )
        assert_same_curve(out, undisturbed, read_metrics)
    print(fell)
    assert fell.total() == 20 and min(fell[phase] for phase in ("before", "within", "after")) >= 3


def save_twice_and_die(folder: str, victim: int, point: str) -> None:
    """`victim` dies at a point of the second save, which replaces the first."""
    with launch.world(2, "cpu", 60):
        model, optimizer = build(MeshShape(1, 2, 1))
        store = CheckpointStore(Path(folder), Retention(last=1))
        for step in (1, 2):
            for parameter in model.parameters():
                parameter.detach().fill_(step)
            if step == 2 and dist.get_rank() == victim:
                POINTS[point]()
            store.save(step, model, optimizer, {})


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_after(act: Callable[..., Any], times: int = 1) -> Callable[..., Any]:
    calls = iter(range(times, -1, -1))

    def last_act(*arguments: Any, **options: Any) -> Any:
        act(*arguments, **options)
        return die() if next(calls) == 1 else None

    return last_act


def die_at_block(number: int) -> None:
    add, calls = files.DataFile.add, iter(range(number + 1))
    files.DataFile.add = lambda *a: die() if next(calls) == number else add(*a)  # type: ignore[method-assign]


# What is replaced in the process that dies, by the point at which it dies.
POINTS: dict[str, Callable[[], object]] = {
    "before the first block": lambda: die_at_block(0),
    "after some blocks": lambda: die_at_block(3),
    "before DCP's index": lambda: setattr(files, "_dcp_metadata", die),
    "before the manifest": lambda: setattr(files, "write_text", die),
    "after the manifest": lambda: setattr(files, "write_text", die_after(files.write_text)),
    "before the rename": lambda: setattr(Path, "rename", die),
    "after the rename": lambda: setattr(Path, "rename", die_after(Path.rename)),
    "before the deletion": lambda: setattr(stores, "delete", die),
    "within the deletion": lambda: setattr(shutil, "rmtree", die),
    "after the deletion": lambda: setattr(stores, "delete", die_after(find.delete)),
}


@pytest.mark.parametrize(
    ("victim", "point", "left"),
    [
        (0, "before the first block", [1]),
        (1, "after some blocks", [1]),
        pytest.param(0, "before DCP's index", [1], marks=pytest.mark.slow),
        (0, "before the manifest", [1]),
        pytest.param(0, "after the manifest", [1], marks=pytest.mark.slow),
        (0, "before the rename", [1]),
        (0, "after the rename", [1, 2]),
        pytest.param(0, "before the deletion", [1, 2], marks=pytest.mark.slow),
        (0, "within the deletion", [2]),
        pytest.param(0, "after the deletion", [2], marks=pytest.mark.slow),
    ],
)
def test_a_crash_leaves_the_old_set_or_the_new_one(tmp_path, victim, point, left):
    outcomes = try_ranks(2, save_twice_and_die, str(tmp_path), victim, point)
    assert outcomes[victim].exitcode == -signal.SIGKILL
    assert [c.step for c in checkpoints_in(tmp_path)[0]] == left
    # A whole folder has no such name: something is half done wherever the crash was within a save.
    between = ("after the rename", "before the deletion", "after the deletion")
    assert bool(list(tmp_path.glob("*.tmp"))) == (point not in between)
    find.remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [name_of(step) for step in left]
    for step in left:
        assert all((weight == step).all() for weight in weights_of(tmp_path / name_of(step)))


def weights_of(path: Path) -> list[torch.Tensor]:
    manifest = open_checkpoint(path).manifest
    with files.StoredBlocks(path, manifest) as stored:
        return [stored.read(name) for name in manifest.tensors]
