"""The planner against published runs: python benchmarks/planner.py --runs FILE.csv [--json FILE]

A row is a run: model, mesh, switches, and what it reached (docs/planner.md names the columns). Which rows
are compared is decided by `EXCLUDED`, rules on the columns; the constants are those of hardware.yaml.
"""

import argparse
import csv
import dataclasses
import json
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel2d.mesh_shape import MeshShape
from parallel2d.planner.calibrate import Measured, fit, predicted
from parallel2d.planner.hardware import GIB, Cluster, Gpu, Reached, find_gpu, load_gpus
from parallel2d.planner.memory import FRAGMENTATION, MARGIN, memory, verdict
from parallel2d.planner.model import ModelShape
from parallel2d.planner.predict import SPEED_INTERVAL, SPEED_INTERVAL_OF_A_GUESS
from parallel2d.planner.setup import Program, Setup

Row = dict[str, str]
GPUS = load_gpus()
# What these programs keep, where it is not what ours keeps: DTensor's loss_parallel has a fourth float32
# copy of the logits, and selective checkpointing keeps every second product. Over tp each of their
# operations passes DTensor's dispatch, about 0.1 ms of the host's time.
PUBLISHED = Program(
    logit_bytes=12, logit_bytes_tp=16, loss_chunk=0, keeps_all_products=False, dispatch_s=(2e-3, 14e-3)
)
# Runs whose notes say so have other kernels (a loss in place, for one): their speed is compared, their
# memory is not.
OTHER_KERNELS = "FSDP1"
# What fitted constants start from: round numbers, set before anything was fitted.
START = {"a100": Reached(0.6, 0.5, 0.55, 0.45, 0.8)}
START_OF_OTHERS = Reached(0.55, 0.22, 0.55, 0.45, 0.8)


NUMBERS = (
    *("params_b", "n_layers", "dim", "ffn_dim", "n_heads", "n_kv_heads", "vocab", "seq_len", "local_batch"),
    *("n_gpus", "dp_replicate", "dp_shard", "tp", "pp", "cp", "tps_per_gpu", "peak_mem_gib"),
)
TEXTS = ("source", "model", "gpu", "ac", "compile", "float8", "async_tp", "optimizer", "notes")
COLUMNS = (*TEXTS, *NUMBERS)


def number(row: Row, column: str, default: float = 0.0) -> float:
    """A column's value; the default where it is not stated."""
    return float(row[column]) if row.get(column) else default


def is_readable(row: Row) -> bool:
    try:
        return all(number(row, column) >= 0 for column in NUMBERS)
    except ValueError:
        return False


def is_set(row: Row, column: str) -> bool:
    return row.get(column, "").lower() in ("1", "true", "yes")


def ran_out_of_memory(row: Row) -> bool:
    return "OOM" in row["notes"] and not row["tps_per_gpu"] and not row["peak_mem_gib"]


def ranks(row: Row) -> float:
    return number(row, "dp_replicate", 1) * number(row, "dp_shard") * number(row, "tp")


# (why, the rule): the first that holds excludes the row.
EXCLUDED: list[tuple[str, Callable[[Row], bool]]] = [
    ("a column that is no number", lambda r: not is_readable(r)),
    ("pipeline or context parallel", lambda r: number(r, "pp", 1) != 1 or number(r, "cp", 1) != 1),
    ("model's shape not stated", lambda r: not all(r[c] for c in ("n_layers", "dim", "ffn_dim", "vocab"))),
    ("mesh not stated", lambda r: not (r["n_gpus"] and r["dp_shard"] and r["tp"])),
    ("mesh is not the number of GPUs", lambda r: ranks(r) != number(r, "n_gpus")),
    ("weights not sharded", lambda r: number(r, "dp_shard") == 1 and number(r, "dp_replicate", 1) > 1),
    ("a part of the weights is trained", lambda r: "LoRA" in r["optimizer"]),
    ("batch or checkpointing not stated", lambda r: not (r["local_batch"] and r["ac"] and r["seq_len"])),
    ("not FSDP's eager hooks", lambda r: "graph_trainer" in r["source"] + r["notes"]),
    ("GPU not known", lambda r: find_gpu(r["gpu"], GPUS) is None),
    (
        "nothing to compare",
        lambda r: not (r["tps_per_gpu"] or r["peak_mem_gib"] or ran_out_of_memory(r)),
    ),
]


def why_excluded(row: Row) -> str | None:
    return next((why for why, rule in EXCLUDED if rule(row)), None)


def shape_of(row: Row) -> ModelShape:
    """The columns leave open how large a head is, and whether feed-forward is gated and the head tied: what
    comes closest to the stated number of parameters."""
    width, heads = int(number(row, "dim")), int(number(row, "n_heads"))
    base = ModelShape(
        vocab_size=int(number(row, "vocab")),
        width=width,
        num_layers=int(number(row, "n_layers")),
        num_heads=heads,
        num_kv_heads=int(number(row, "n_kv_heads", heads)),
        head_dim=width // heads,
        ffn_width=int(number(row, "ffn_dim")),
    )
    stated = number(row, "params_b") * 1e9
    if not stated:
        return base
    choices = [
        dataclasses.replace(base, head_dim=size, gated=gated, tie_embeddings=tied)
        for size in dict.fromkeys((width // heads, 128))
        for gated in (True, False)
        for tied in (False, True)
    ]
    return min(choices, key=lambda shape: abs(shape.parameters - stated))


@dataclass(frozen=True)
class Case:
    """A row that is compared; `setups` are averaged (every second layer checkpointed is half of each)."""

    row: Row
    shape: ModelShape
    mesh: MeshShape
    setups: tuple[Setup, ...]
    cluster: Cluster

    @classmethod
    def of(cls, row: Row) -> "Case":
        modes = {"none": ("none",), "full": ("full",), "selective_layer": ("none", "full")}
        mode = row["ac"].lower()
        setup = Setup(
            int(number(row, "local_batch")),
            int(number(row, "seq_len")),
            compile=is_set(row, "compile"),
            float8=is_set(row, "float8"),
            async_tp=is_set(row, "async_tp"),
        )
        setups = [dataclasses.replace(setup, checkpoint=m) for m in modes.get(mode, ("selective",))]
        sizes = (int(number(row, axis, 1)) for axis in ("dp_replicate", "dp_shard", "tp"))
        gpu = find_gpu(row["gpu"], GPUS)
        assert gpu is not None  # a rule of EXCLUDED
        return cls(row, shape_of(row), MeshShape(*sizes), tuple(setups), Cluster.of(gpu))

    @property
    def measured_tps(self) -> float:
        return number(self.row, "tps_per_gpu")

    @property
    def measured_gib(self) -> float:
        return number(self.row, "peak_mem_gib")

    def memory_gib(self, fragmentation: float = FRAGMENTATION) -> float:
        """Reserved, as these programs' logs tell it."""
        found = [memory(self.shape, self.mesh, s, PUBLISHED) for s in self.setups]
        return statistics.mean(m.stays + (1 + fragmentation) * m.transient for m in found) / GIB

    def fragmentation(self) -> float:
        """With which this row's memory would be met."""
        found = [memory(self.shape, self.mesh, s, PUBLISHED) for s in self.setups]
        stays, transient = (statistics.mean(getattr(m, n) for m in found) for n in ("stays", "transient"))
        return (self.measured_gib * GIB - stays) / transient - 1

    def verdict(self) -> str:
        return verdict(self.memory_gib(), self.cluster.gpu.memory_gib)

    def verdict_is_wrong(self) -> bool:
        if OTHER_KERNELS in self.row["notes"]:
            return False
        return self.verdict() == ("fit" if ran_out_of_memory(self.row) else "no")

    def measured(self) -> list[Measured]:
        return [Measured(self.shape, self.mesh, s, self.measured_tps, PUBLISHED) for s in self.setups]

    def tokens_per_s(self, cluster: Cluster | None = None) -> float:
        rates = [predicted(run, cluster or self.cluster) for run in self.measured()]
        return len(rates) / sum(1 / rate for rate in rates)

    def memory_error(self, fragmentation: float = FRAGMENTATION) -> float | None:
        return self.memory_gib(fragmentation) / self.measured_gib - 1 if self.measured_gib else None

    def throughput_error(self, cluster: Cluster | None = None) -> float | None:
        return self.tokens_per_s(cluster) / self.measured_tps - 1 if self.measured_tps else None


# Why a prediction may be far off, by what the columns and the prediction itself say; first that holds.
REASONS: list[tuple[str, Callable[[Case], bool]]] = [
    ("float8: the columns do not say which recipe, and rowwise is slower", lambda c: is_set(c.row, "float8")),
    ("the GPU's constants are a guess: no run on it was fitted", lambda c: not c.cluster.gpu.fitted_on),
    (
        "memory nearly full: the allocator frees and asks again",
        lambda c: c.memory_gib() > 0.85 * c.cluster.gpu.memory_gib,
    ),
    ("one sequence per micro-batch: each operation is small", lambda c: number(c.row, "local_batch") == 1),
    ("not known", lambda c: True),
]


def known(errors: Iterable[float | None]) -> list[float]:
    return [e for e in errors if e is not None]


def mape(errors: Iterable[float | None]) -> float | None:
    sizes = [abs(e) for e in known(errors)]
    return statistics.mean(sizes) if sizes else None


def share(met: Iterable[bool]) -> float | None:
    found = list(met)
    return statistics.mean(found) if found else None


def interval_of(case: Case) -> float:
    return SPEED_INTERVAL if case.cluster.gpu.fitted_on else SPEED_INTERVAL_OF_A_GUESS


def fitted(cases: Sequence[Case], start: Cluster) -> Cluster:
    """Constants from the rows of one GPU without tensor parallelism."""
    runs = [run for c in cases if c.mesh.tp == 1 and c.measured_tps for run in c.measured()]
    return fit(runs, start) if runs else start


def guess(gpu: Gpu) -> Cluster:
    """What a GPU's constants start from."""
    return Cluster.of(dataclasses.replace(gpu, reached=START.get(gpu.name, START_OF_OTHERS), fitted_on=""))


def family(case: Case) -> str:
    """Of the model: its name up to the size."""
    return re.split(r"-[\d.]+[BM]", case.row["model"])[0]


def left_out(cases: Sequence[Case], key: Callable[[Case], object]) -> tuple[list[float], list[float]]:
    """Errors of memory and of throughput of each group of rows with everything fitted on the others."""
    memory_errors, throughput_errors = [], []
    for group in dict.fromkeys(map(key, cases)):
        others = [c for c in cases if key(c) != group]
        fragmentation = statistics.median([c.fragmentation() for c in others if c.measured_gib] or [0.16])
        clusters = {}
        for case in (c for c in cases if key(c) == group):
            gpu = case.cluster.gpu
            if gpu.name not in clusters:
                clusters[gpu.name] = fitted([c for c in others if c.cluster.gpu == gpu], guess(gpu))
            memory_errors.append(case.memory_error(fragmentation))
            throughput_errors.append(case.throughput_error(clusters[gpu.name]))
    return known(memory_errors), known(throughput_errors)


def orders(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Where a model ran on three meshes or more of as many GPUs: the best, and its place by prediction.

    Checkpointing that is not stated is taken to be selective here: it is the same for all of them.
    """
    groups: dict[tuple[str, ...], dict[MeshShape, tuple[float, float]]] = {}
    for row in rows:
        row = {**row, "ac": row["ac"] or "selective_op"}
        if why_excluded(row) or not row["tps_per_gpu"]:
            continue
        case = Case.of(row)
        best = groups.setdefault(tuple(row[c] for c in ("model", "gpu", "n_gpus", "compile", "float8")), {})
        pair = (case.measured_tps, case.tokens_per_s())
        best[case.mesh] = max(best.get(case.mesh, (0.0, 0.0)), pair)
    found = []
    for group, best in groups.items():
        if len(best) >= 3:
            by_prediction = sorted(best, key=lambda mesh: -best[mesh][1])
            winner = max(best, key=lambda mesh: best[mesh][0])
            place = by_prediction.index(winner) + 1
            found.append(
                {"group": " ".join(group[:3]), "meshes": len(best), "best": str(winner), "place": place}
            )
    return found


def report(rows: Sequence[Row]) -> dict[str, Any]:
    excluded = Counter(why for row in rows if (why := why_excluded(row)))
    cases = [Case.of(row) for row in rows if not why_excluded(row)]
    bf16 = [
        c for c in cases if not is_set(c.row, "float8") and c.cluster.gpu.name[:4] in ("a100", "h100", "h200")
    ]
    rest = [c for c in cases if c not in bf16]
    lines = [as_json(case) for case in cases]
    by_source, by_family = left_out(cases, lambda c: c.row["source"]), left_out(bf16, family)
    llama = [c for c in bf16 if family(c).startswith("Llama") and c.mesh.tp == 1]
    within = [left_out([c for c in llama if c.cluster.gpu == gpu], id)[1] for gpu in GPUS.values()]
    return {
        "memory_mape": mape(c.memory_error() for c in cases),
        "memory_worst": max(map(abs, known(c.memory_error() for c in cases)), default=None),
        "memory_mape_leave_source_out": mape(by_source[0]),
        "throughput_mape": mape(c.throughput_error() for c in cases),
        "throughput_mape_bf16": mape(c.throughput_error() for c in bf16),
        "throughput_mape_float8_and_newer": mape(c.throughput_error() for c in rest),
        "throughput_mape_2d": mape(c.throughput_error() for c in cases if c.mesh.tp > 1),
        "throughput_mape_leave_source_out": mape(by_source[1]),
        "throughput_mape_unseen_family": mape(by_family[1]),
        "throughput_mape_leave_one_out": mape(e for errors in within for e in errors),
        "memory_within_interval": share(abs(e) <= MARGIN for e in known(c.memory_error() for c in cases)),
        "throughput_within_interval": share(
            abs(e) <= interval_of(c) for c in cases if (e := c.throughput_error()) is not None
        ),
        "fit_wrong": sum(case.verdict_is_wrong() for case in cases),
        "orders": orders(rows),
        "excluded": dict(excluded),
        "rows": lines,
    }


def as_json(case: Case) -> dict[str, Any]:
    error = case.throughput_error()
    missed = max(abs(e) for e in (case.memory_error() or 0.0, error or 0.0)) > 0.25
    return {
        "source": case.row["source"],
        "model": case.row["model"],
        "gpu": case.cluster.gpu.name,
        "mesh": str(case.mesh),
        "run": _switches(case.row),
        "memory_gib": case.measured_gib or None,
        "memory_gib_predicted": round(case.memory_gib(), 2),
        "memory_error": case.memory_error(),
        "ran": not ran_out_of_memory(case.row),
        "verdict": case.verdict(),
        "verdict_wrong": case.verdict_is_wrong(),
        "tokens_per_s": case.measured_tps or None,
        "tokens_per_s_predicted": round(case.tokens_per_s()),
        "throughput_error": error,
        "reason": next(why for why, holds in REASONS if holds(case)) if missed else None,
    }


def _switches(row: Row) -> str:
    parts = [f"{row['local_batch']}×{row['seq_len']}", row["ac"]]
    return " ".join(parts + [name for name in ("compile", "float8", "async_tp") if is_set(row, name)])


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


def constants(rows: Sequence[Row]) -> str:
    """The fitted constants as hardware.yaml has them, from the rows without tensor parallelism."""
    cases = [Case.of(row) for row in rows if not why_excluded(row)]
    lines = []
    for gpu in GPUS.values():
        runs = [c for c in cases if c.cluster.gpu == gpu and c.mesh.tp == 1 and c.measured_tps]
        if runs:
            reached = dataclasses.asdict(fitted(runs, guess(gpu)).gpu.reached)
            lines.append(f"{gpu.name}: " + ", ".join(f"{k}: {v:.3f}" for k, v in reached.items()))
            lines.append(f"    of {len(runs)} runs")
    fragmentation = statistics.median([c.fragmentation() for c in cases if c.measured_gib])
    return "\n".join([*lines, f"fragmentation {fragmentation:.3f}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    default = Path(__file__).parents[2] / "shared" / "planner" / "published_runs.csv"
    parser.add_argument("--runs", type=Path, default=default, help="the published runs")
    parser.add_argument("--json", type=Path, help="also write everything as JSON")
    parser.add_argument("--fit", action="store_true", help="print constants fitted on the runs instead")
    arguments = parser.parse_args()
    if not arguments.runs.is_file():
        parser.error(f"--runs {arguments.runs} is not a file: give the CSV of published runs")
    with arguments.runs.open(newline="") as file:
        read = csv.DictReader(file)
        if missing := [column for column in COLUMNS if column not in (read.fieldnames or ())]:
            parser.error(f"--runs {arguments.runs} lacks the columns {', '.join(missing)}")
        rows = [{column: row[column] or "" for column in COLUMNS} for row in read]
    if arguments.fit:
        print(constants(rows))
        return
    found = report(rows)
    print(as_text(found))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
