"""The real commands: four ways to start, and every way to end."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from parallel2d import UserError, launch
from parallel2d.checkpoint.find import checkpoints_in
from tests.ranks import RECIPE, ROOT, TEXT, _free_port, run_ranks, run_recipe, try_ranks

TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
SMALL = [*TEXT, "--data.seq_len", "32", "--data.global_batch", "8", "--steps", "2", "--log.val_batches", "1"]
SMALL += [
    "--log.every",
    "1",
    "--log.val_every",
    "0",
    "--log.sample_tokens",
    "4",
    "--precision.param",
    "float64",
]
ENDLESS = [*SMALL, "--steps", "1000000", "--checkpoint.every", "2"]


def start(command: list[str], variables: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """In a session of its own, as a terminal would start it."""
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment | (variables or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(*processes: subprocess.Popen[str], timeout_s: float = 180) -> list[tuple[int, str, str]]:
    results = []
    for process in processes:
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        results.append((process.returncode, stdout, stderr))
    return results


def losses(out: Path) -> list[float]:
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> list[float]:
    out = tmp_path_factory.mktemp("one") / "run"
    assert run_recipe(1, *SMALL, "--out", str(out))[0].exitcode == 0
    return losses(out)


def test_torchrun_alone_and_python_start_their_own_workers(tmp_path, expected):
    out = tmp_path / "run"
    command = [TORCHRUN, str(RECIPE), "--dp", "2", "--tp", "2", "--out", str(out), *SMALL]
    ((status, stdout, stderr),) = finish(start(command))
    assert status == 0, stderr
    assert "one process, and the mesh needs 4: starting 4 local workers" in stderr
    assert "mesh      dp×tp = 2×2; 4 ranks, gloo on cpu" in stdout
    assert "tensorboard --logdir" in stdout
    assert losses(out) == pytest.approx(expected, rel=1e-9)

    go_on = [
        sys.executable,
        str(RECIPE),
        "--config",
        f"{out}/config.yaml",
        "--dp",
        "1",
        "--tp",
        "2",
        "--steps",
        "3",
    ]
    ((status, stdout, stderr),) = finish(start(go_on))
    assert status == 0, stderr
    assert "starting 2 local workers" in stderr and "after step 2 of" in stdout
    assert len(losses(out)) == 3


@pytest.mark.slow
def test_where_a_fork_is_not_safe_torchrun_starts_the_command_again(tmp_path):
    (tmp_path / "script.py").write_text(
        "import os, sys\n"
        "from parallel2d import launch\n"
        "if 'RANK' not in os.environ:\n"
        "    launch._restart_under_torchrun(2)\n"
        "with launch.world(2, 'cpu', 60) as device:\n"
        "    launch.say(f'{sys.argv[1:]} {os.environ[\"WORLD_SIZE\"]} {device}')\n"
    )
    ((status, stdout, stderr),) = finish(start([sys.executable, str(tmp_path / "script.py"), "--dp", "2"]))
    assert status == 0, stderr
    assert stdout == "['--dp', '2'] 2 cpu\n"


@pytest.mark.parametrize("who", ["rank == 2", "True"])
def test_forked_workers_tell_a_failure_once_and_by_the_right_name(tmp_path, who):
    (tmp_path / "script.py").write_text(
        "import torch.distributed as dist\n"
        "from parallel2d import launch\n"
        "def main():\n"
        "    with launch.world(4, 'cpu', 60):\n"
        "        rank = dist.get_rank()\n"
        f"        if {who}:\n"
        "            raise RuntimeError('my bug')\n"
        "launch.run(main)\n"
    )
    environment = {"OMP_NUM_THREADS": "1"}
    ((status, _, stderr),) = finish(start([sys.executable, str(tmp_path / "script.py")], environment))
    assert status == 1
    assert stderr.count("Traceback") == stderr.count("RuntimeError: my bug") == 1, stderr
    assert f"rank {2 if who != 'True' else 0} of 4 failed" in stderr


@pytest.mark.slow
def test_torchrun_with_workers_is_used_as_given(tmp_path, expected):
    command = [
        TORCHRUN,
        "--nproc-per-node",
        "2",
        "--master-port",
        str(_free_port()),
        str(RECIPE),
        "--tp",
        "2",
    ]
    ((status, stdout, stderr),) = finish(start([*command, "--out", str(tmp_path / "run"), *SMALL]))
    assert status == 0, stderr
    assert "starting" not in stdout and "dp×tp = 1×2; 2 ranks" in stdout
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=1e-9)


@pytest.mark.slow
def test_two_torchrun_agents(tmp_path, expected):
    rendezvous = [
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"127.0.0.1:{_free_port()}",
        "--rdzv-id",
        "two",
    ]
    command = [
        TORCHRUN,
        "--nnodes",
        "2",
        "--nproc-per-node",
        "4",
        *rendezvous,
        str(RECIPE),
        "--dp",
        "4",
        "--tp",
        "2",
    ]
    command += ["--out", str(tmp_path / "run"), *SMALL]
    results = finish(start(command), start(command))
    assert [status for status, _, _ in results] == [0, 0], results
    assert sum("dp×tp = 4×2; 8 ranks" in stdout for _, stdout, _ in results) == 1
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=1e-9)


def test_a_mistake_under_torchrun_is_told_once_and_soon(tmp_path):
    began = time.monotonic()
    command = [TORCHRUN, str(RECIPE), "--dp", "4", "--tp", "3", "--out", str(tmp_path / "run")]
    ((status, stdout, stderr),) = finish(start(command))
    assert status != 0 and time.monotonic() - began < 30
    assert (stdout + stderr).count("num_heads 8 is not divisible by tp 3: use tp 1, 2, 4, 8") == 1
    assert not (tmp_path / "run").exists()


def workers_of(out: Path) -> list[int]:
    """Processes that were started with this run folder."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if str(out).encode() in (folder / "cmdline").read_bytes() and b"Z" not in state(folder):
                found.append(int(folder.name))
        except (FileNotFoundError, ProcessLookupError):
            pass
    return found


def state(folder: Path) -> bytes:
    return (folder / "stat").read_bytes().rsplit(b")", 1)[1].split()[0]


def wait_until(condition, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "took too long"
        time.sleep(0.1)


@pytest.mark.skipif(sys.platform != "linux", reason="looks for the workers in /proc")
@pytest.mark.parametrize(
    "how",
    [
        "kill -9 of one rank",
        pytest.param("kill -9 of the launcher", marks=pytest.mark.slow),
        pytest.param("ctrl-c", marks=pytest.mark.slow),
        pytest.param("sigterm to torchrun", marks=pytest.mark.slow),
    ],
)
def test_every_end_leaves_no_process_and_a_whole_checkpoint(tmp_path, how):
    out = tmp_path / "run"
    program = [TORCHRUN] if how == "sigterm to torchrun" else [sys.executable]
    process = start([*program, str(RECIPE), "--dp", "1", "--tp", "2", "--out", str(out), *ENDLESS])
    wait_until(lambda: (out / "checkpoints" / "step-00000004").exists(), 90)
    began = time.monotonic()
    if how == "ctrl-c":
        os.killpg(process.pid, signal.SIGINT)
    elif how == "sigterm to torchrun":
        process.terminate()
    elif how == "kill -9 of one rank":
        os.kill(max(workers_of(out)), signal.SIGKILL)
    else:
        process.kill()
    wait_until(lambda: not workers_of(out), 10)
    ((status, _, stderr),) = finish(process, timeout_s=10)
    assert status != 0 and time.monotonic() - began < 10, stderr
    last = checkpoints_in(out / "checkpoints")[0][-1].step
    (resumed,) = run_recipe(1, *SMALL, "--out", str(out), "--steps", str(last + 1))
    assert f"after step {last}" in resumed.stdout and resumed.exitcode == 0, resumed.stderr


def disagree() -> str:
    with launch.world(3, "cpu", 60):
        launch.require_agreement(data="same", resume_step=7)
        with pytest.raises(UserError) as caught:
            launch.require_agreement(data="same", resume_step=7 if dist.get_rank() < 2 else None)
        return str(caught.value)


def test_machines_that_see_other_files_are_found_out():
    message = (
        "resume_step is 7 on rank 0 and None on rank 2 (1 ranks differ): all machines must see the same files"
    )
    assert run_ranks(3, disagree) == [message] * 3


def wait_for_a_rank_that_sleeps() -> None:
    with launch.world(2, "cpu", timeout_s=2):
        if dist.get_rank() == 1:
            time.sleep(60)
        dist.barrier()


def test_a_collective_that_waits_longer_than_timeout_s_ends_the_run():
    began = time.monotonic()
    outcomes = try_ranks(2, wait_for_a_rank_that_sleeps)
    assert outcomes[0].exitcode not in (0, -signal.SIGKILL)
    assert time.monotonic() - began < 30
