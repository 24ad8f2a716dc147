"""A step of this project beside the same step written by hand (baseline_2d.py), on this machine's CPU.

    python benchmarks/train.py                                     # about 20 minutes on 2 cores
    python benchmarks/train.py --meshes 1x1,4x2 --repeats 3 --json train.json
    python benchmarks/train.py --meshes 4x2 --width 128 --seq_len 64

The two take turns, each time in fresh processes under torchrun with one thread a rank. Medians over the
repeats are printed, for ratios of the pairs of runs that follow each other. CPU seconds are those of all
ranks together: other load on the machine blurs them less than wall time, and what waits for a peer does not
count. Ratios are this project's numbers by the baseline's: more tokens and less memory are better.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from meter import SIZES, with_arguments

PROGRAMS = {"baseline": "baseline_2d.py", "parallel2d": "parallel2d_2d.py"}
RATIOS = {
    "ratio_tokens_per_cpu_s": "tokens_per_cpu_s",
    "ratio_tokens_per_s": "tokens_per_s",
    "ratio_max_rss": "max_rss_mib",
}

Row = dict[str, float]


def main() -> None:
    parser = with_arguments(__doc__, SIZES)
    parser.add_argument("--meshes", default="1x1,2x1,1x2,2x2,4x2", help="dp x tp (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="of each program on each mesh (default 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all numbers to FILE")
    arguments = parser.parse_args()
    print("| mesh | program | tokens/CPU s | tokens/s | step, s | CPU s a step | peak MiB a rank |")
    print("|---|---|---|---|---|---|---|", flush=True)
    meshes = {}
    for name in arguments.meshes.split(","):
        dp, tp = (int(size) for size in name.split("x"))
        meshes[name] = compare(dp, tp, arguments)
        print_mesh(name, meshes[name])
    if arguments.json:
        arguments.json.write_text(json.dumps({"meshes": meshes, "sizes": sizes_of(arguments)}, indent=1))


def sizes_of(arguments: argparse.Namespace) -> dict[str, int]:
    return {name: getattr(arguments, name) for name in SIZES}


def compare(dp: int, tp: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """{program: medians, ratio: number, runs: {program: every run}} of one mesh."""
    runs: dict[str, list[Row]] = {program: [] for program in PROGRAMS}
    for _ in range(arguments.repeats):
        for program in PROGRAMS:
            runs[program].append(run(program, {"dp": dp, "tp": tp, **sizes_of(arguments)}))
    medians = {p: {k: statistics.median(row[k] for row in rows) for k in rows[0]} for p, rows in runs.items()}
    ratios = {name: statistics.median(ratios_of(key, runs)) for name, key in RATIOS.items()}
    return {**medians, **ratios, "runs": runs}


def ratios_of(key: str, runs: dict[str, list[Row]]) -> list[float]:
    """Of each pair of runs, which stand next to each other in time: the machine's speed drifts."""
    pairs = zip(runs["parallel2d"], runs["baseline"], strict=True)
    return [ours[key] / theirs[key] for ours, theirs in pairs]


def run(program: str, sizes: dict[str, int]) -> Row:
    """One run of a program: the line of JSON that it prints."""
    ranks = str(sizes["dp"] * sizes["tp"])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    command.append(str(Path(__file__).with_name(PROGRAMS[program])))
    command += [text for name, size in sizes.items() for text in (f"--{name}", str(size))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(lines[-1])


def print_mesh(name: str, mesh: dict[str, Any]) -> None:
    for program in PROGRAMS:
        row = mesh[program]
        print(
            f"| {name.replace('x', '×')} | {program} | {row['tokens_per_cpu_s']:,.0f} | "
            f"{row['tokens_per_s']:,.0f} | {row['step_s']:.2f} | {row['cpu_s_per_step']:.2f} | "
            f"{row['max_rss_mib']:.0f} |"
        )
    print(
        f"| | ratio | {mesh['ratio_tokens_per_cpu_s']:.2f} | {mesh['ratio_tokens_per_s']:.2f} | | | "
        f"{mesh['ratio_max_rss']:.2f} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
