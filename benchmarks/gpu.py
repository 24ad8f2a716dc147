"""What one GPU tells: speed and memory of training, and of one rank of worlds far larger than it.

    python benchmarks/gpu.py                            # at most 8 minutes on one GPU of 80 GB
    python benchmarks/gpu.py --only eager 70B --json out.json
    python benchmarks/gpu.py --device cpu --tiny        # does it run? its numbers mean nothing

"1×1": a Llama of 1.1 B parameters on this GPU alone, beside the same by hand (gpu_by_hand.py), in turns.
"rank 0 of": what one rank of that mesh computes and holds. Its peers do not exist (torch's fake process
group), so this is a step without its network; what they would send is a copy of what this rank has.
Weights, moments and reduction are float32, arithmetic is bfloat16 (float32 on a CPU).

Each row is a process of its own, with a cold compiler cache; a row out of memory, or out of time, says so.
s/step is the median of the measured steps; tokens/s and MFU are per GPU, MFU of the dense bf16 peak with
the FLOPs of the model, recomputation not counted. Memory is the peak over all steps, as PyTorch's
allocator sees it (on a CPU: the process's resident set).
"""

import argparse
import itertools
import json
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import gpu_by_hand
import torch
from parallel2d.models.llama import PRESETS, Llama, LlamaConfig
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parallel2d import MeshShape, Precision, build_mesh, init_weights, launch, parallelize
from parallel2d.config import PrecisionConfig
from parallel2d.loss import VocabShard, cross_entropy_sum
from parallel2d.metrics import memory_gib, peak_flops
from parallel2d.optim import build_optimizer, clip_gradients, gradient_norm
from parallel2d.parallelize import ActivationCheckpoint
from parallel2d.step import train_step

ONE_BILLION = LlamaConfig(32_768, 2048, 16, 32, 8, 0, 8192, rope_theta=500_000.0)
# name -> (model, mesh)
WORLDS = {
    "8B": (PRESETS["llama3-8b"], MeshShape(1, 8, 8)),
    "70B": (PRESETS["llama3-70b"], MeshShape(1, 32, 8)),
}
MAX_NORM = 1.0
OUT_OF_MEMORY, OUT_OF_TIME = "out of memory", "left out: --minutes are over"
HEADER = """\
| | program | sequence | s/step | tokens/s | MFU | GiB allocated | GiB reserved | first step s | |
|---|---|---|---|---|---|---|---|---|---|"""

Step = Callable[[Tensor, Tensor], object]


@dataclass(frozen=True)
class Row:
    """One line of the table before it is measured; `steps`: before the measured ones, and those."""

    what: str
    program: str
    model: LlamaConfig
    mesh: MeshShape
    seq_len: int
    micro_batch: int
    steps: tuple[int, int]
    checkpointing: ActivationCheckpoint = "none"
    compile: bool = False


def main() -> None:
    arguments = parse()
    print(HEADER)
    results = []
    for row, result in measure_all(plan(arguments), arguments.device, arguments.minutes * 60):
        results.append(asdict(row) | result)
        print(line_of(row, result), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=1))
    print("\n" + "; ".join(sorted({result["on"] for result in results if "on" in result})))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=8, help="what does not fit is left out (default 8)")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="rows whose name has one of these words")
    parser.add_argument("--rounds", type=int, default=1, help="how often the 1×1 rows are run (default 1)")
    parser.add_argument("--warm_up", type=int, default=3, help="steps before the measured ones (default 3)")
    parser.add_argument("--steps", type=int, default=5, help="measured steps of a row (default 5)")
    parser.add_argument("--micro_batch", type=int, default=4, help="sequences of a step on 1×1 (default 4)")
    parser.add_argument("--tiny", action="store_true", help="debug-size models on the same meshes")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--json", type=Path, help="file for the rows, written after each")
    arguments = parser.parse_args()
    too_low = [name for name in ("warm_up", "steps", "micro_batch") if getattr(arguments, name) < 1]
    if too_low:
        parser.error(f"{', '.join(f'--{name}' for name in too_low)} must be at least 1")
    arguments.device = launch.device_type(arguments.device)
    if arguments.device == "cpu" and not arguments.tiny:
        parser.error("no GPU here, and these models are too large for a CPU: --tiny tries the program out")
    return arguments


def plan(arguments: argparse.Namespace) -> list[Row]:
    """All rows, those that take long (the compiler) last."""
    steps = (arguments.warm_up, arguments.steps)
    alone, worlds = ONE_BILLION, WORLDS
    if arguments.tiny:
        alone = PRESETS["debug"]
        worlds = {name: (alone, mesh) for name, (_, mesh) in WORLDS.items()}
    lengths = (64, 128) if arguments.tiny else (4096, 8192)
    by_itself = Row("", "", alone, MeshShape(), lengths[0], arguments.micro_batch, steps)
    eager, compiled = (
        replace(by_itself, what="1×1 eager"),
        replace(by_itself, what="1×1 compile", compile=True),
    )
    selective = replace(by_itself, what="1×1 selective", checkpointing="selective")
    full = replace(by_itself, what="1×1 full", checkpointing="full")
    both = replace(selective, what="1×1 compile+selective", compile=True)
    of_worlds = [
        Row(f"rank 0 of {name} on {mesh}, {mode}", "parallel2d", model, mesh, lengths[1], 1, steps, mode)
        for name, (model, mesh) in worlds.items()
        for mode in ("full", "selective")
    ]
    in_turns = [
        [replace(row, program=program) for row in rows for program in ("parallel2d", "by hand")]
        for rows in ([eager, selective, full], [compiled, both])
    ]
    rows = in_turns[0] * arguments.rounds + of_worlds + in_turns[1] * arguments.rounds
    return [row for row in rows if not arguments.only or any(word in row.what for word in arguments.only)]


def measure_all(rows: list[Row], device: str, limit_s: float) -> Iterator[tuple[Row, dict[str, Any]]]:
    # Rows are forks of a server that has imported torch but not touched the GPU: fresh, and at once there.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "parallel2d.metrics", "parallel2d.parallelize"])
    deadline = time.monotonic() + limit_s
    for row in rows:
        result = measure_apart(context, row, device, deadline)
        yield row, result
        if result.get("note") == OUT_OF_MEMORY and row.mesh.world > 1:
            shorter = replace(row, seq_len=row.seq_len // 2)
            yield shorter, measure_apart(context, shorter, device, deadline)


def measure_apart(context: Any, row: Row, device: str, deadline: float) -> dict[str, Any]:
    """A row's result by a process of its own: whatever becomes of it, the next row finds a fresh GPU."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        return {"note": OUT_OF_TIME}
    print(f"{row.what}, {row.program}", file=sys.stderr, flush=True)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=send_result, args=(sender, row, device))
    process.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(left_s) else {"note": OUT_OF_TIME}
    except EOFError:
        process.join()
        return {"note": f"failed with status {process.exitcode}, see above"}
    finally:
        process.kill()
        process.join()


# --- in the process of a row


def send_result(sender: Connection, row: Row, device_type: str) -> None:
    with tempfile.TemporaryDirectory() as compiler_cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = compiler_cache
        sender.send(outcome(lambda: measure(row, device_type)))


def outcome(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return work()
    except torch.OutOfMemoryError:
        return {"note": OUT_OF_MEMORY}


def measure(row: Row, device_type: str) -> dict[str, Any]:
    if row.mesh.world == 1:
        with launch.world(1, device_type, 600) as device:
            step = build_by_hand(row, device) if row.program == "by hand" else build(row, device, real_step)
            return run_steps(row, step, device)
    device = torch.device(device_type, 0)
    if device_type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.init()
    with launch.imagined_world(row.mesh.world):
        return run_steps(row, build(row, device, imagined_step), device)


def build(row: Row, device: torch.device, do_step: Callable[..., object]) -> Step:
    """The composition of recipes/llama_2d.py."""
    with torch.device("meta"):
        model = Llama(row.model)
    mesh = build_mesh(row.mesh, device.type)
    parallelize(
        model,
        mesh,
        plan=model.tp_plan(),
        units=list(model.blocks),
        precision=Precision(*PrecisionConfig().dtypes(device.type)),
        activation_checkpoint=row.checkpointing,
        compile=row.compile,
    )
    init_weights(model, device, seed=0)
    optimizer = build_optimizer(model, 1e-4, (0.9, 0.95), 0.1)
    vocab = VocabShard.of(row.model.vocab_size, mesh["tp"])
    return lambda ids, targets: do_step(model, ids, targets, optimizer, vocab, mesh)


def build_by_hand(row: Row, device: torch.device) -> Step:
    _, compute, _ = PrecisionConfig().dtypes(device.type)
    return gpu_by_hand.build(row.model, device, compute, row.checkpointing, row.compile)


def real_step(
    model: nn.Module,
    ids: Tensor,
    targets: Tensor,
    optimizer: torch.optim.Optimizer,
    vocab: VocabShard,
    mesh: DeviceMesh,
) -> float:
    return train_step(model, [(ids, targets)], optimizer, vocab, mesh, MAX_NORM).loss


def imagined_step(
    model: nn.Module,
    ids: Tensor,
    targets: Tensor,
    optimizer: torch.optim.Optimizer,
    vocab: VocabShard,
    mesh: DeviceMesh,
) -> float:
    """What train_step computes, without its refusal of numbers that are not finite.

    Before 2.13, torch's fake group leaves a reduce-scatter's result as it was allocated.
    """
    loss = cross_entropy_sum(model(ids), targets, vocab) / ids.numel()
    loss.backward()
    clip_gradients(model.parameters(), gradient_norm(model.parameters()), MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def run_steps(row: Row, step: Step, device: torch.device) -> dict[str, Any]:
    torch.manual_seed(0)
    shape = (row.micro_batch, row.seq_len)
    ids, targets = (torch.randint(row.model.vocab_size, shape, device=device) for _ in range(2))
    before, measured = row.steps
    on_cuda = device.type == "cuda"
    if on_cuda:
        # What initialisation needed is no part of a step.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    loss = step(ids, targets)
    synchronize(device)
    first_step_s = time.perf_counter() - began
    for _ in range(before - 1):
        step(ids, targets)
    marks = [mark(device)]
    for _ in range(measured):
        loss = step(ids, targets)
        marks.append(mark(device))
    synchronize(device)
    seconds = [seconds_between(*pair) for pair in itertools.pairwise(marks)]
    finite = not isinstance(loss, float) or math.isfinite(loss)
    return {
        "seconds": seconds,
        **rates(row, statistics.median(seconds), device),
        "first_step_s": first_step_s,
        "allocated_gib": memory_gib(device),
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30 if on_cuda else None,
        "note": "" if finite else "numbers not finite: clocks may be higher than in training",
        "on": f"{torch.cuda.get_device_name() if on_cuda else 'CPU'}, torch {torch.__version__}",
    }


def rates(row: Row, seconds: float, device: torch.device) -> dict[str, Any]:
    with torch.device("meta"):
        flops_per_token = Llama(row.model).flops_per_token(row.seq_len)
    tokens_per_s = row.micro_batch * row.seq_len / row.mesh.tp / seconds
    peak = peak_flops(device)
    return {
        "step_s": seconds,
        "tokens_per_s": tokens_per_s,
        "mfu": peak and tokens_per_s * flops_per_token / peak,
    }


def mark(device: torch.device) -> Any:
    """A moment: on a GPU in its own queue, so that a program may run ahead of it as it does in training."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(first: Any, second: Any) -> float:
    return second - first if isinstance(first, float) else first.elapsed_time(second) / 1000


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


# --- in the parent


def line_of(row: Row, result: dict[str, Any]) -> str:
    formats = {
        "step_s": "{:.3f}",
        "tokens_per_s": "{:,.0f}",
        "mfu": "{:.1%}",
        "allocated_gib": "{:.2f}",
        "reserved_gib": "{:.2f}",
        "first_step_s": "{:.1f}",
    }
    values = [
        text.format(result[key]) if result.get(key) is not None else "–" for key, text in formats.items()
    ]
    return f"| {' | '.join([row.what, row.program, str(row.seq_len), *values, result['note']])} |"


if __name__ == "__main__":
    main()
