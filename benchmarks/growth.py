"""How a step's time and memory grow with the model, the sequence and the ranks; and how long a start takes.

    python benchmarks/growth.py            # about 10 minutes on 2 cores
    python benchmarks/growth.py --only ranks start

One size changes at a time. Beside what is measured stands what arithmetic alone would make of the first
row: CPU seconds in proportion to the step's floating-point operations (`flops_per_token`). Ranks take turns
on the machine's cores, so that more ranks than cores can only cost; the global batch stays the same.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meter import ffn_width
from train import Row, run

BASE = {"dp": 1, "tp": 1, "width": 256, "layers": 2, "heads": 16, "vocab_size": 2048, "seq_len": 256}
BASE |= {"global_batch": 16, "warm_up": 2, "steps": 4}
SERIES: dict[str, list[dict[str, int]]] = {
    "layers": [{"layers": n} for n in (2, 6, 12, 24)],
    "width": [{"width": n} for n in (128, 256, 512, 1024)],
    "sequence": [{"seq_len": n, "global_batch": 2} for n in (256, 512, 1024, 2048)],
    "ranks": [{"dp": dp, "tp": tp} for tp in (1, 2) for dp in (1, 2, 4, 8, 16) if dp * tp <= 16],
}


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    names = [*SERIES, "start"]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="default: all")
    only = parser.parse_args().only
    print("| | CPU s a step | in proportion | step, s | peak MiB a rank |\n|---|---|---|---|---|", flush=True)
    for name in SERIES:
        if name in only:
            for line in lines_of(SERIES[name]):
                print(line, flush=True)
    if "start" in only:
        print_start()


def lines_of(series: list[dict[str, int]]) -> Iterator[str]:
    first: tuple[Row, float] | None = None
    for changes in series:
        sizes = BASE | changes
        row, flops = run("parallel2d", sizes), flops_of_step(sizes)
        first = first or (row, flops)
        expected = first[0]["cpu_s_per_step"] * flops / first[1]
        name = ", ".join(f"{key} {value}" for key, value in changes.items())
        yield (
            f"| {name} | {row['cpu_s_per_step']:.2f} | {expected:.2f} | {row['step_s']:.2f} "
            f"| {row['max_rss_mib']:.0f} |"
        )


def flops_of_step(sizes: dict[str, int]) -> float:
    """6 per weight of a matrix product and token, and attention's 12 × layers × width × sequence."""
    width = sizes["width"]
    weights = sizes["layers"] * (4 * width**2 + 3 * width * ffn_width(width)) + width * sizes["vocab_size"]
    per_token = 6 * weights + 12 * sizes["layers"] * width * sizes["seq_len"]
    return float(per_token * sizes["seq_len"] * sizes["global_batch"])


# --- from the command to the first step


IMPORT_AND_GROUP = """
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
import torch._dynamo  # which fully_shard imports when it is first called
dist.init_process_group("gloo")
dist.barrier()
"""


def print_start() -> None:
    """8 ranks that do nothing, started by torchrun, beside the recipe until the line of its first step."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "8"]
    flags = "--dp 4 --tp 2 --steps 2 --checkpoint.every 0 --log.val_every 0 --log.sample_tokens 0"
    recipe = [str(Path(__file__).parents[1] / "recipes" / "llama_2d.py"), *flags.split(), "--out"]
    print("\n| from the command to | s |\n|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        nothing = Path(folder) / "nothing.py"
        nothing.write_text(IMPORT_AND_GROUP)
        for text, mark, command in (
            ("torch imported and a process group, torchrun with 8 ranks", "", [*torchrun, str(nothing)]),
            ("the first step, torchrun with 8 ranks", "step 1/", [*torchrun, *recipe, f"{folder}/1"]),
            ("the first step, python …", "step 1/", [sys.executable, *recipe, f"{folder}/2"]),
        ):
            print(f"| {text} | {seconds_until(mark, command):.1f} |", flush=True)


def seconds_until(mark: str, command: list[str]) -> float:
    """Until a line begins with the mark; without one until the end."""
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    began = time.perf_counter()
    with subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, **options) as process:
        lines = process.stdout or ()
        marked = [time.perf_counter() - began for line in lines if mark and line.startswith(mark)]
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed with status {process.returncode}")
    return marked[0] if mark else time.perf_counter() - began


if __name__ == "__main__":
    main()
