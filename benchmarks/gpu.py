"""What one GPU tells: speed and memory of training, and of one rank of worlds far larger than it.

    python benchmarks/gpu.py                            # at most 8 minutes on one GPU of 80 GB
    python benchmarks/gpu.py --only eager 70B --json out.json
    python benchmarks/gpu.py --device cpu --tiny        # does it run? its numbers mean nothing

"1×1": a Llama of 1.1 B parameters on this GPU alone, beside the same by hand (gpu_by_hand.py), in turns.
"rank 0 of": what one rank of that mesh computes and holds. Its peers do not exist (torch's fake process
group), so this is a step without its network and without NCCL's own buffers; what they would send is a copy
of what this rank has, and the time to copy it counts.
Weights, moments and reduction are float32, arithmetic is bfloat16 (float32 on a CPU).

Each row is a process of its own, with a cold compiler cache; a row out of memory, or out of time, says so.
s/step is the median of the measured steps; tokens/s and MFU are per GPU, MFU of the dense bf16 peak with
the FLOPs of the model, recomputation not counted. Memory is the peak over all steps, as PyTorch's
allocator sees it (on a CPU: the process's resident set).
"""

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from gpu_row import OUT_OF_MEMORY, Row, send_result
from parallel2d.models.llama import PRESETS, LlamaConfig

from parallel2d import MeshShape, launch

ONE_BILLION = LlamaConfig(32_768, 2048, 16, 32, 8, 0, 8192, rope_theta=500_000.0)
# name -> (model, mesh)
WORLDS = {
    "8B": (PRESETS["llama3-8b"], MeshShape(1, 8, 8)),
    "70B": (PRESETS["llama3-70b"], MeshShape(1, 32, 8)),
}
OUT_OF_TIME = "left out: --minutes are over"
HEADER = """\
| | program | sequence | s/step | tokens/s | MFU | GiB allocated | GiB reserved | first step s | |
|---|---|---|---|---|---|---|---|---|---|"""


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
    parser.add_argument("--only", nargs="+", metavar="WORD", help="only rows whose name has one of these")
    parser.add_argument("--rounds", type=int, default=1, help="how often the 1×1 rows are run (default 1)")
    parser.add_argument("--warm_up", type=int, default=3, help="steps before the measured ones (default 3)")
    parser.add_argument("--steps", type=int, default=5, help="measured steps of a row (default 5)")
    parser.add_argument("--micro_batch", type=int, default=4, help="sequences of a step on 1×1 (default 4)")
    parser.add_argument("--tiny", action="store_true", help="debug-size models on the same meshes")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--json", type=Path, help="file for the rows, written after each")
    arguments = parser.parse_args()
    too_low = [name for name in ("rounds", "warm_up", "steps", "micro_batch") if getattr(arguments, name) < 1]
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
    eager = replace(by_itself, what="1×1 eager")
    compiled = replace(by_itself, what="1×1 compile", compile=True)
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
    words = [word.replace("x", "×") for word in arguments.only or [""]]
    return [row for row in rows if any(word in row.what for word in words)]


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
    # The compiler's workers may outlive a row that is killed by a moment.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as compiler_cache:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=send_result, args=(sender, row, device, compiler_cache))
        process.start()
        sender.close()
        try:
            if not receiver.poll(left_s):
                return {"note": OUT_OF_TIME}
            result = receiver.recv()
            process.join(10)  # time to end its compiler's workers
            return result
        except EOFError:
            process.join()
            return {"note": f"failed with status {process.exitcode}, see above"}
        finally:
            process.kill()
            process.join()


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
    launch.run(main)
