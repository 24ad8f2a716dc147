"""What a checkpoint costs, beside torch's own ways and the disk itself.

    python benchmarks/checkpoint.py            # 207 M parameters, 2.5 GB, 8 ranks; about 10 minutes
    python benchmarks/checkpoint.py --layers 1 --repeats 1 --dir /mnt/disk --json out.json

Every program saves and loads the same state in the same run, in turns; medians are printed. Files are
dropped from the page cache before each load (posix_fadvise), and every write ends with an fsync. Wants
Linux: memory is the peak of a rank's resident set during the call, above what it held before it.
"""

import argparse
import dataclasses
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from parallel2d.models.llama import Llama, LlamaConfig
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.tensor import DTensor

from parallel2d import MeshShape, build_mesh, launch, parallelize
from parallel2d.checkpoint.files import StoredBlocks
from parallel2d.checkpoint.find import open_checkpoint
from parallel2d.checkpoint.load import load_checkpoint
from parallel2d.checkpoint.state import state_tensors
from parallel2d.checkpoint.store import CheckpointStore
from parallel2d.collectives import gather_whole

HOME = MeshShape(1, 4, 2)
OTHERS = {"8×1": MeshShape(1, 8, 1), "1×8": MeshShape(1, 1, 8), "2×4": MeshShape(1, 2, 4)}
GROWING = {"1×1 → 8×1": (MeshShape(), MeshShape(1, 8, 1)), "2×1 → 4×2": (MeshShape(1, 2, 1), HOME)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=11, help="12.8 M parameters each (default 11)")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--dir", type=Path, default=Path("runs/benchmark_checkpoint"), help="on the disk to measure"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    shutil.rmtree(arguments.dir, ignore_errors=True)
    arguments.dir.mkdir(parents=True)
    print("| | program | s | GB/s | read / stored | extra MiB a rank |\n|---|---|---|---|---|---|")
    rows = []
    for row in measure(arguments):
        print(line_of(row), flush=True)
        rows.append(row)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    shutil.rmtree(arguments.dir)


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    folder = arguments.dir
    in_world(HOME, save_all, arguments)
    yield from read_rows(folder)
    for name, shape in {"4×2": HOME, **OTHERS}.items():
        in_world(shape, load_all, arguments, folder, f"4×2 → {name}")
        yield from read_rows(folder)
    for name, (source, target) in GROWING.items():
        of_source = folder / name.replace(" ", "")
        in_world(source, save_once, arguments, of_source)
        in_world(target, load_all, arguments, of_source, name)
        yield from read_rows(folder)
        shutil.rmtree(of_source)
    yield reshard_offline(folder)


def in_world(shape: MeshShape, work: Callable[..., None], *rest: Any) -> None:
    """Run `work` on fresh ranks."""
    print(f"{work.__name__} on {shape}", file=sys.stderr, flush=True)
    child = os.fork()
    if child == 0:
        with launch.world(shape.world, "cpu", 600) as device:
            work(shape, device, *rest)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        raise SystemExit(f"{work.__name__} on {shape} failed")


def read_rows(folder: Path) -> list[dict[str, Any]]:
    path = folder / "rows.json"
    rows = json.loads(path.read_text())
    path.unlink()
    return rows


# --- in the ranks


def build(shape: MeshShape, device: torch.device, arguments: argparse.Namespace) -> tuple[Any, Any]:
    """A model and its AdamW with numbers in them; which ones does not matter."""
    config = LlamaConfig(
        vocab_size=32000,
        width=arguments.width,
        num_layers=arguments.layers,
        num_heads=16,
        num_kv_heads=16,
        ffn_width=arguments.width * 11 // 4,
    )
    with torch.device("meta"):
        model = Llama(config)
    mesh = build_mesh(shape, device.type)
    parallelize(model, mesh, plan=model.tp_plan(), units=list(model.blocks))
    model.to_empty(device=device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.5)
        parameter.to_local().detach().uniform_()
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


class Meter:
    """Seconds, bytes read and extra memory of calls, by program; medians go to rank 0's rows."""

    def __init__(self, what: str, state: dict[str, torch.Tensor]) -> None:
        self.what = what
        self.bytes = sum(t.numel() * t.element_size() for t in state.values())
        self.runs: dict[str, list[tuple[float, int, float]]] = {}

    def run(self, program: str, call: Callable[[], Any]) -> None:
        dist.barrier()
        before = resident_mib()
        reset_peak()
        Counter.bytes = 0
        began = time.perf_counter()
        result = call()
        dist.barrier()
        seconds = result if isinstance(result, float) else time.perf_counter() - began
        mine = torch.tensor([Counter.bytes, peak_mib() - before], dtype=torch.float64)
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        read, peak = torch.stack(everyone).T
        self.runs.setdefault(program, []).append((seconds, int(read.sum()), peak.max().item()))

    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "what": self.what,
                "program": program,
                "seconds": statistics.median(r[0] for r in runs),
                "gb_per_s": self.bytes / 1e9 / statistics.median(r[0] for r in runs),
                "read_ratio": statistics.median(r[1] for r in runs) / self.bytes,
                "extra_mib_per_rank": statistics.median(r[2] for r in runs),
                "all_seconds": [r[0] for r in runs],
            }
            for program, runs in self.runs.items()
        ]


def write_rows(folder: Path, *meters: Meter) -> None:
    if dist.get_rank() == 0:
        rows = [row for meter in meters for row in meter.rows()]
        (folder / "rows.json").write_text(json.dumps(rows))


def save_all(shape: MeshShape, device: torch.device, arguments: argparse.Namespace) -> None:
    model, optimizer = build(shape, device, arguments)
    state, folder = state_tensors(model, optimizer), arguments.dir
    meter, stall = Meter("save, 4×2", state), Meter("save, 4×2", state)
    with CheckpointStore(folder / "async", background=True, tell=lambda line: None) as in_background:
        in_background.reserve(model, optimizer)
        for turn in range(arguments.repeats):
            fresh(folder / "raw", folder / "ours", folder / "dcp", folder / "whole.pt")
            meter.run("disk", lambda: write_raw(folder / "raw", state))
            meter.run("parallel2d", lambda: save_ours(folder / "ours", model, optimizer))
            meter.run("torch DCP", lambda: dcp.save(dict(state), checkpoint_id=folder / "dcp"))
            meter.run("gather + torch.save", lambda: save_gathered(folder / "whole.pt", state))
            stall.run("parallel2d, async stall", lambda t=turn: in_background.save(t, model, optimizer, {}))
            in_background._finish()
    fresh(folder / "async", folder / "whole.pt")
    write_rows(folder, meter, stall)


def save_once(shape: MeshShape, device: torch.device, arguments: argparse.Namespace, folder: Path) -> None:
    model, optimizer = build(shape, device, arguments)
    save_ours(folder / "ours", model, optimizer)
    dcp.save(dict(state_tensors(model, optimizer)), checkpoint_id=folder / "dcp")


def load_all(
    shape: MeshShape, device: torch.device, arguments: argparse.Namespace, folder: Path, what: str
) -> None:
    model, optimizer = build(shape, device, arguments)
    state = state_tensors(model, optimizer)
    meter = Meter(f"load, {what}", state)
    checkpoint = open_checkpoint(next((folder / "ours").glob("step-*")))
    with counted_reads():
        for _ in range(arguments.repeats):
            if (folder / "raw").is_dir() and what.endswith("→ 4×2"):
                drop_cache(folder / "raw")
                meter.run("disk", lambda: read_raw(folder / "raw"))
            drop_cache(checkpoint.path)
            meter.run("parallel2d", lambda: load_checkpoint(checkpoint, model, optimizer))
            drop_cache(folder / "dcp")
            meter.run("torch DCP", lambda: dcp.load(dict(state), checkpoint_id=folder / "dcp"))
    write_rows(arguments.dir, meter)


def save_ours(folder: Path, model: Any, optimizer: Any) -> None:
    with CheckpointStore(folder, tell=lambda line: None) as store:
        store.save(1, model, optimizer, {"model": dataclasses.asdict(model.config)})


def save_gathered(path: Path, state: dict[str, torch.Tensor]) -> None:
    whole = {}
    for name, tensor in state.items():
        gathered = gather_whole(tensor)
        if dist.get_rank() == 0:
            whole[name] = gathered
    if dist.get_rank() == 0:
        with path.open("wb") as file:
            torch.save(whole, file)
            file.flush()
            os.fsync(file.fileno())


def write_raw(folder: Path, state: dict[str, torch.Tensor]) -> None:
    """Each rank's numbers, by plain write and fsync."""
    folder.mkdir(exist_ok=True)
    with (folder / str(dist.get_rank())).open("wb", buffering=0) as file:
        for tensor in state.values():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            file.write(local.detach().reshape(-1).numpy())
        os.fsync(file.fileno())


def read_raw(folder: Path) -> None:
    """Each rank its own file."""
    buffer = bytearray(4 * 2**20)
    with (folder / str(dist.get_rank())).open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            Counter.bytes += count


def fresh(*paths: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        for path in paths:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    dist.barrier()


# --- counting


class Counter(io.FileIO):
    """A file that adds what is read from it to a sum over all files."""

    bytes = 0

    def readinto(self, buffer: Any) -> int | None:
        count = super().readinto(buffer)
        Counter.bytes += count or 0
        return count


@contextmanager
def counted_reads() -> Iterator[None]:
    """Count what both programs read from data files."""
    of_torch, ours = FileSystem.create_stream, StoredBlocks._read

    @contextmanager
    def create_stream(self: FileSystem, path: Any, mode: str) -> Iterator[Any]:
        with io.BufferedReader(Counter(path)) as file:
            yield file

    def read(self: StoredBlocks, name: str, start: int, into: memoryview) -> int:
        count = ours(self, name, start, into)
        Counter.bytes += count
        return count

    FileSystem.create_stream, StoredBlocks._read = create_stream, read  # type: ignore[method-assign]
    yield
    FileSystem.create_stream, StoredBlocks._read = of_torch, ours  # type: ignore[method-assign]


def drop_cache(folder: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        for path in folder.iterdir():
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)
    dist.barrier()


def resident_mib() -> float:
    return _status("VmRSS")


def peak_mib() -> float:
    return _status("VmHWM")


def _status(key: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) / 1024


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


# --- in the parent


def reshard_offline(folder: Path) -> dict[str, Any]:
    """The real command, on the checkpoint of 4×2."""
    source = next((folder / "ours").glob("step-*"))
    size = sum(path.stat().st_size for path in source.iterdir())
    command = [str(Path(sys.executable).with_name("parallel2d")), "checkpoint", "reshard", str(source)]
    script = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True); "
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024)"
    )
    began = time.perf_counter()
    arguments = [sys.executable, "-c", script, *command, str(folder / "resharded"), "--dp", "2", "--tp", "4"]
    done = subprocess.run(arguments, check=True, stdout=subprocess.PIPE, text=True)
    seconds = time.perf_counter() - began
    return {
        "what": "offline reshard, 4×2 → 2×4",
        "program": "parallel2d checkpoint reshard (peak of the whole process)",
        "seconds": seconds,
        "gb_per_s": size / 1e9 / seconds,
        "read_ratio": None,
        "extra_mib_per_rank": float(done.stdout.split()[-1]),
        "all_seconds": [seconds],
    }


def line_of(row: dict[str, Any]) -> str:
    ratio = f"{row['read_ratio']:.2f}" if row["read_ratio"] else "–"
    return (
        f"| {row['what']} | {row['program']} | {row['seconds']:.2f} | {row['gb_per_s']:.2f} | {ratio} "
        f"| {row['extra_mib_per_rank']:.0f} |"
    )


if __name__ == "__main__":
    main()
