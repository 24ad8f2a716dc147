"""kill -9 at any moment of a run: what is left is whole, and the run that goes on is the undisturbed one."""

import os
import random
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from parallel2d.checkpoint.find import checkpoints_in, name_of
from tests.ranks import RECIPE, TINY_RUN, Outcome, _recipe_main, run_recipe, try_ranks

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
