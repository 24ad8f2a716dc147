"""Run a function on n gloo ranks.

A fork server imports torch and the project once per test session; each rank is a fork of it, so a
world starts in milliseconds and every test has fresh processes.
"""

import faulthandler
import multiprocessing
import os
import pickle
import runpy
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "llama_2d.py"
# A text that is read sooner than the standard library's.
TEXT = ("--data.path", str(ROOT / "README.md"))
# A run whose steps take no time, for what happens between them.
_TINY = """--precision.param float64 --model.width 32 --model.num_layers 1 --model.num_heads 2
    --model.num_kv_heads 2 --model.ffn_width 48 --data.seq_len 16 --data.global_batch 4
    --log.every 1 --log.val_every 0 --log.val_batches 1 --log.sample_tokens 0"""
TINY_RUN = (*TEXT, *_TINY.split())

_context = multiprocessing.get_context("forkserver")
_ROOMS = (
    "hf.weights",
    "checkpoint.store",
    "cli.checkpoint",
    "cli.main",
    "cli.verify",
    "data",
    "flags",
    "forecast",
    "generate",
    "launch",
    "metrics",
    "models.hf",
    "step",
)
_context.set_forkserver_preload(
    [
        "pytest",
        "torch._dynamo",
        "torch.utils.tensorboard",
        "torchao.float8",
        *(f"parallel2d.{room}" for room in _ROOMS),
    ]
)


@dataclass(frozen=True)
class Outcome:
    """What one rank left: its result, its exit code, and what it printed."""

    result: Any
    exitcode: int
    stdout: str
    stderr: str


def run_ranks(world: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 120) -> list[Any]:
    """function(*arguments) on every rank of a world, RANK and the like set; the results in rank order."""
    outcomes = try_ranks(world, function, *arguments, timeout_s=timeout_s)
    for rank, outcome in enumerate(outcomes):
        assert outcome.exitcode == 0, f"rank {rank} of {world}: exit {outcome.exitcode}\n{outcome.stderr}"
    return [outcome.result for outcome in outcomes]


def try_ranks(
    world: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 120
) -> list[Outcome]:
    """Like run_ranks, for functions that may fail; like torchrun, the first failure ends all ranks."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        port = _free_port()
        workers = [
            _context.Process(target=_work, args=(folder, rank, world, port, function, arguments))
            for rank in range(world)
        ]
        for worker in workers:
            worker.start()
        _watch(workers, time.monotonic() + timeout_s)
        return [_outcome(folder, rank, worker.exitcode) for rank, worker in enumerate(workers)]


def run_recipe(world: int, *flags: str, recipe: Path = RECIPE, timeout_s: float = 120) -> list[Outcome]:
    """A recipe's real main on every rank, as torchrun would start it; its outcomes may be failures."""
    return try_ranks(world, _recipe_main, recipe, flags, timeout_s=timeout_s)


def _recipe_main(recipe: Path, flags: Sequence[str]) -> None:
    sys.argv = [str(recipe), *flags]
    runpy.run_path(str(recipe), run_name="__main__")


def _work(
    folder: Path, rank: int, world: int, port: int, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    for stream, suffix in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{rank}.{suffix}", os.O_CREAT | os.O_WRONLY), stream)
    faulthandler.enable()
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    import torch

    torch.set_num_threads(1)
    # Warnings are errors here as they are in pytest itself; the list of those let through is short.
    warnings.simplefilter("error")
    for message, category in LET_THROUGH:
        warnings.filterwarnings("ignore", message=message, category=category)
    result = function(*arguments)
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps(result))


# (beginning of the message, category): each with the reason why we cannot avoid it.
LET_THROUGH: list[tuple[str, type[Warning]]] = [
    # torch.compile looks whether its inputs, FSDP's gathered weights among them, have a .grad.
    ("The .grad attribute of a Tensor that is not a leaf", UserWarning),
    # torch's compiler imports a part of torch that uses it.
    ("`torch.jit.script_method` is deprecated", DeprecationWarning),
    # torch.compile makes one to trace it, wherever a unit has an autograd function of its own.
    ("<class 'torch.autograd.function.Function'> should not be instantiated", DeprecationWarning),
]


def _watch(workers: list[Any], deadline: float) -> None:
    """Wait for all; at the first failure, or at the deadline, kill the rest."""
    while any(worker.is_alive() for worker in workers):
        failed = any(worker.exitcode not in (0, None) for worker in workers)
        if failed or time.monotonic() > deadline:
            time.sleep(0.1)
            for worker in workers:
                worker.kill()
        time.sleep(0.02)
    for worker in workers:
        worker.join()


def _outcome(folder: Path, rank: int, exitcode: int | None) -> Outcome:
    stdout, stderr = ((folder / f"{rank}.{s}") for s in ("out", "err"))
    result = folder / f"{rank}.pickle"
    return Outcome(
        pickle.loads(result.read_bytes()) if result.exists() else None,
        -1 if exitcode is None else exitcode,
        stdout.read_text(errors="replace") if stdout.exists() else "",
        stderr.read_text(errors="replace") if stderr.exists() else "",
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
