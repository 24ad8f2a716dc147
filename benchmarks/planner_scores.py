"""How well the planner meets published runs: errors, what is fitted on other rows, the order of meshes."""

import dataclasses
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from planner_cases import Case
from planner_rows import GPUS, Row, is_set, number, ran_out_of_memory, size, why_excluded

from parallel2d.mesh_shape import MeshShape
from parallel2d.planner.calibrate import fit
from parallel2d.planner.hardware import Cluster, Gpu, Reached
from parallel2d.planner.memory import FRAGMENTATION, MARGIN
from parallel2d.planner.predict import speed_interval

# What fitted constants start from: round numbers, set before anything was fitted.
_START = {"a100": Reached(0.6, 0.5, 0.55, 0.45, 0.8)}
_START_OF_OTHERS = Reached(0.55, 0.22, 0.55, 0.45, 0.8)

# Why a prediction may be far off, by what the columns and the prediction itself say; first that holds.
_REASONS: list[tuple[str, Callable[[Case], bool]]] = [
    ("float8: the columns do not say which recipe, and rowwise is slower", lambda c: is_set(c.row, "float8")),
    ("the GPU's constants are a guess: no run on it was fitted", lambda c: not c.cluster.gpu.fitted_on),
    (
        "memory nearly full: the allocator frees and asks again",
        lambda c: c.memory_gib() > 0.85 * c.cluster.gpu.memory_gib,
    ),
    ("one sequence per micro-batch: each operation is small", lambda c: size(c.row, "local_batch") == 1),
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


def fitted(cases: Sequence[Case], start: Cluster) -> Cluster:
    """Constants from the rows of one GPU without tensor parallelism."""
    runs = [run for c in cases if c.mesh.tp == 1 and c.measured_tps for run in c.measured()]
    return fit(runs, start) if runs else start


def guess(gpu: Gpu) -> Cluster:
    """What a GPU's constants start from."""
    return Cluster.of(
        dataclasses.replace(gpu, reached=_START.get(gpu.name.split("-")[0], _START_OF_OTHERS), fitted_on="")
    )


def family(case: Case) -> str:
    """Of the model: its name up to the size."""
    return re.split(r"-[\d.]+[BM]", case.row["model"])[0]


def median_fragmentation(cases: Sequence[Case]) -> float:
    """Over the rows that state their memory."""
    return statistics.median([c.fragmentation() for c in cases if c.measured_gib] or [FRAGMENTATION])


def left_out(cases: Sequence[Case], key: Callable[[Case], object]) -> tuple[list[float], list[float]]:
    """Errors of memory and of throughput of each group of rows with everything fitted on the others."""
    memory_errors, throughput_errors = [], []
    for group in dict.fromkeys(map(key, cases)):
        others = [c for c in cases if key(c) != group]
        fragmentation = median_fragmentation(others)
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
        if why_excluded(row) or not number(row, "tps_per_gpu"):
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
            abs(e) <= speed_interval(c.cluster, c.mesh)
            for c in cases
            if (e := c.throughput_error()) is not None
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
        "reason": next(why for why, holds in _REASONS if holds(case)) if missed else None,
    }


def _switches(row: Row) -> str:
    parts = [f"{row['local_batch']}×{row['seq_len']}", row["ac"]]
    return " ".join(parts + [name for name in ("compile", "float8", "async_tp") if is_set(row, name)])


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
    return "\n".join([*lines, f"fragmentation {median_fragmentation(cases):.3f}"])
