"""Start and stop a world: processes, process group, device, signals, and how a failure is told.

The only reader of RANK, WORLD_SIZE and LOCAL_RANK.
"""

import gc
import io
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import _prctl_pr_set_pdeathsig

from parallel2d.errors import UserError

# What torchrun sets for its workers. A worker that becomes a torchrun itself must not hand them on.
_TORCHRUN_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TORCHRUN_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_")

# torchrun looks after its workers ten times a second and ends them all when one has failed.
_HEAD_START_OF_RANK_0_S = 1
_SECONDS_UNTIL_TORCHRUN_STOPS_US = 5


@dataclass(frozen=True)
class Place:
    """Where torchrun put this process; a process started without it is alone."""

    rank: int
    world: int
    local_rank: int

    @classmethod
    def of_this_process(cls) -> "Place":
        read = os.environ.get
        return cls(int(read("RANK", 0)), int(read("WORLD_SIZE", 1)), int(read("LOCAL_RANK", 0)))


def planned_world(dp: int, tp: int, dp_replicate: int, device: str) -> int:
    """How many processes the run will have: torchrun's, or, for a process alone, what the mesh needs.

    With dp -1 a process alone takes every GPU of the machine that tp × dp_replicate can use.
    """
    world = Place.of_this_process().world
    if world > 1:
        return world
    if dp > 0:
        return dp * max(tp, 1)
    group = max(tp, 1) * max(dp_replicate, 1)
    gpus = torch.cuda.device_count() if device_type(device) == "cuda" else 0
    return max(gpus // group, 1) * group


@contextmanager
def world(size: int, device: str, timeout_s: float) -> Iterator[torch.device]:
    """A process group of `size` ranks (NCCL on CUDA, gloo on CPU); yields this rank's device.

    A process alone that needs more becomes the launcher of that many local workers, and ends with
    their status; the workers go on from here.
    """
    # Default actions end a rank at once even when it waits inside a collective, where Python's own
    # handlers would not run. A checkpoint is whole at any moment, so there is nothing to tidy up.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if Place.of_this_process().world == 1 and size > 1:
        _start_local_workers(size, device)
    place = Place.of_this_process()
    chosen = _choose_device(device, place)
    _init_process_group(chosen, place, timedelta(seconds=timeout_s))
    yield chosen
    # Only after success: a rank that failed must not wait here for the others.
    dist.barrier()
    dist.destroy_process_group()


def settle() -> None:
    """Tell the garbage collector that what there is now will stay; to be called before the first step.

    Otherwise it goes through every object that the imports, the model and its DTensors made, again and
    again, at a moment of its own on each rank, while the others wait.
    """
    gc.collect()
    gc.freeze()


@contextmanager
def imagined_world(size: int) -> Iterator[None]:
    """This process as rank 0 of `size` ranks that do not exist: what one would hold or compute on a mesh.

    Collectives return at once, with copies of what this rank gave (a reduction: with that itself) or,
    before torch 2.13, a reduce-scatter with whatever was in memory: no number here means anything.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    # Its import is what makes the backend known.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        # DTensor would find results of this world for an equal mesh of the next, with groups that are gone.
        _clear_sharding_prop_cache()


def require_agreement(**facts: object) -> None:
    """One UserError on all ranks if a fact differs between them. One all-gather of small objects.

    Ranks on several machines read files for themselves: other data, or another newest checkpoint,
    would otherwise train without a word.
    """
    everyone: list[dict[str, object]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, facts)
    for name, fact in everyone[0].items():
        odd = [rank for rank, theirs in enumerate(everyone) if theirs[name] != fact]
        if odd:
            raise UserError(
                f"{name} is {fact} on rank 0 and {everyone[odd[0]][name]} on rank {odd[0]} "
                f"({len(odd)} ranks differ): all machines must see the same files"
            )


def device_type(device: str) -> str:
    """cpu or cuda; auto takes CUDA where there is one."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device cuda: this machine has no usable GPU: use --device cpu")
    return device


def _choose_device(device: str, place: Place) -> torch.device:
    if device_type(device) == "cpu":
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if place.local_rank >= gpus:
        raise UserError(
            f"process {place.local_rank} of this machine has no GPU of its own (GPUs: {gpus}): "
            f"start at most {gpus} processes here, or use --device cpu"
        )
    torch.cuda.set_device(place.local_rank)
    return torch.device("cuda", place.local_rank)


def _init_process_group(device: torch.device, place: Place, timeout: timedelta) -> None:
    # On CUDA a gloo group stands beside NCCL, for what lives in host memory (checkpoint metadata).
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        store = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)


def _start_local_workers(size: int, device: str) -> None:
    """What `torchrun --standalone --nproc-per-node size` does; returns in the workers only.

    Where Linux's CPU has a core or less for each, the workers are forks: they have torch imported and
    the data read, which eight times over would take longer than a short run. CUDA, macOS and OpenMP's
    pool of threads do not survive a fork: there torchrun itself starts the command again.
    """
    # Not to stdout, which may be somebody's JSON.
    notice = f"one process, and the mesh needs {size}: starting {size} local workers, as torchrun would"
    print(notice, file=sys.stderr, flush=True)
    for name in [n for n in os.environ if n in _TORCHRUN_NAMES or n.startswith(_TORCHRUN_PREFIXES)]:
        del os.environ[name]
    os.environ["OMP_NUM_THREADS"] = str(_threads_per_worker(size))
    if sys.platform == "linux" and device_type(device) == "cpu" and _threads_per_worker(size) == 1:
        _fork_workers(size)
    else:
        _restart_under_torchrun(size)


def _threads_per_worker(size: int) -> int:
    given = os.environ.get("OMP_NUM_THREADS", "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return int(given) if given.isdigit() and int(given) else max(1, cores // size)


def _restart_under_torchrun(size: int) -> NoReturn:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    os.execv(sys.executable, [sys.executable, *torchrun, *sys.argv])


def _fork_workers(size: int) -> None:
    # torch imports its compiler on FSDP's first use, which takes seconds: once, before the forks.
    import torch._dynamo

    port = _free_port()
    workers = set()
    for rank in range(size):
        worker = os.fork()
        if worker == 0:
            # Whatever ends the launcher, a kill -9 included, ends its workers.
            _prctl_pr_set_pdeathsig(signal.SIGTERM)
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            torch.set_num_threads(1)
            return
        workers.add(worker)
    os._exit(_wait_for(workers))


def _wait_for(workers: set[int]) -> int:
    """The first status ≠ 0, after which the other workers are ended, or 0."""
    status = 0
    while workers:
        worker, how = os.wait()
        workers.discard(worker)
        ended_with = os.waitstatus_to_exitcode(how)
        if ended_with != 0 and status == 0:
            status = ended_with if ended_with > 0 else 128 - ended_with
            for other in workers:
                os.kill(other, signal.SIGTERM)
    return status


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def say(text: str) -> None:
    """One line for people, from rank 0; works before the process group is there."""
    if Place.of_this_process().rank == 0:
        print(text, flush=True)


def run(main: Callable[[], None]) -> None:
    """Call main; tell a failure once for the whole world and end this process with a status ≠ 0.

    A UserError has status 2 and no traceback, a bug status 1 and a traceback. torchrun stops the
    other ranks a moment after the first has ended, so who ends first is who speaks: rank 0
    if all failed alike, the rank that failed alone before those that only lost it as a peer.
    """
    for stream in (sys.stdout, sys.stderr):
        # A terminal that has no × must not end a run.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        main()
    except UserError as error:
        _exit_in_turn(f"error: {error}", status=2)
    except BrokenPipeError:
        # Who read our output, `head` for one, has gone.
        os._exit(128 + signal.SIGPIPE)
    # DCP's CheckpointException derives from BaseException, so that `except Exception` would miss it.
    except BaseException as error:
        if isinstance(error, SystemExit | KeyboardInterrupt):
            raise
        if _is_about_a_lost_peer(error):
            time.sleep(_SECONDS_UNTIL_TORCHRUN_STOPS_US)
        # Asked only now: main may have become one of the workers that it started.
        place = Place.of_this_process()
        _exit_in_turn(f"rank {place.rank} of {place.world} failed:\n{traceback.format_exc()}", status=1)


def _is_about_a_lost_peer(error: BaseException) -> bool:
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)


def _exit_in_turn(message: str, status: int) -> NoReturn:
    if Place.of_this_process().rank != 0:
        time.sleep(_HEAD_START_OF_RANK_0_S)
    sys.stdout.flush()
    print(message, file=sys.stderr, flush=True)
    # Not sys.exit: the interpreter's shutdown may wait for peers that no longer answer.
    os._exit(status)
