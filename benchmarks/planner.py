"""The planner against published runs: python benchmarks/planner.py --runs FILE.csv [--json FILE]

A row is a run: model, mesh, switches, and what it reached (docs/planner.md names the columns). Which rows
are compared is decided by rules on the columns (planner_rows.py); the constants are those of hardware.yaml.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from planner_rows import COLUMNS, read_rows
from planner_scores import constants, report


def as_text(found: dict[str, Any]) -> str:
    lines = [f"{'model':14}{'gpu':11}{'mesh':11}{'run':38}{'GiB':>6}{'pred.':>7}{'':>7}  {'verdict':11}"]
    lines[0] += f"{'tok/s':>7}{'pred.':>7}"
    for row in found["rows"]:
        gib = f"{row['memory_gib']:.1f}" if row["memory_gib"] else "" if row["ran"] else "OOM"
        tps = f"{row['tokens_per_s']:.0f}" if row["tokens_per_s"] else ""
        mesh = row["mesh"].replace(" (dp_replicate", " (r")
        line = f"{row['model']:14}{row['gpu']:11}{mesh:11}{row['run']:38}"
        line += f"{gib:>6}{row['memory_gib_predicted']:7.1f}{_percent(row['memory_error']):>7}  "
        line += f"{row['verdict']:11}{tps:>7}{row['tokens_per_s_predicted']:7}"
        line += f"{_percent(row['throughput_error']):>7}  {row['reason'] or ''}"
        lines.append(line.rstrip())
    lines += ["", *summary(found)]
    lines += ["", "not compared, by rules on the columns:"]
    lines += [f"{count:5}  {why}" for why, count in found["excluded"].items()]
    return "\n".join(lines)


def summary(found: dict[str, Any]) -> list[str]:
    lines = [
        f"{name.replace('_', ' '):42}{'none' if found[name] is None else format(found[name], '.1%'):>7}"
        for name in found
        if name.startswith(("memory_", "throughput_"))
    ]
    lines.append(f"{'verdicts that are wrong':42}{found['fit_wrong']:>7}")
    for order in found["orders"]:
        said = f"best of {order['meshes']} meshes, {order['group']}: {order['best']}"
        lines.append(f"{said:60} by prediction number {order['place']}")
    if not found["orders"]:
        lines.append("no model ran on three meshes of as many GPUs: the rows show no order of meshes")
    return lines


def _percent(error: float | None) -> str:
    return "" if error is None else f"{error:+.0%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    default = Path(__file__).parents[2] / "shared" / "planner" / "published_runs.csv"
    parser.add_argument("--runs", type=Path, default=default, help="the published runs")
    parser.add_argument("--json", type=Path, help="also write everything as JSON")
    parser.add_argument("--fit", action="store_true", help="print constants fitted on the runs instead")
    arguments = parser.parse_args()
    if not arguments.runs.is_file():
        parser.error(f"--runs {arguments.runs} is not a file: give the CSV of published runs")
    rows, lacks = read_rows(arguments.runs)
    if len(lacks) == len(COLUMNS):
        parser.error(f"--runs {arguments.runs} has none of the columns {', '.join(COLUMNS)}")
    if lacks:
        print(f"note: {arguments.runs} lacks the columns {', '.join(lacks)}: not stated", file=sys.stderr)
    if arguments.fit:
        print(constants(rows))
        return
    found = report(rows)
    print(as_text(found))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
