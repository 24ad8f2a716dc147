"""A plan for people, and as JSON."""

from collections.abc import Sequence
from typing import Any

from parallel2d.mesh_shape import AXES
from parallel2d.planner.hardware import GIB
from parallel2d.planner.memory import FRAGMENTATION, MARGIN
from parallel2d.planner.model import flops_per_token
from parallel2d.planner.moments import PARTS
from parallel2d.planner.predict import (
    SPEED_INTERVAL,
    SPEED_INTERVAL_OF_A_GUESS,
    SPEED_INTERVAL_OVER_TP,
    Prediction,
)
from parallel2d.planner.search import Plan
from parallel2d.traffic import Ledger

_GB = 1e9


def as_text(plan: Plan, top: int = 10, reasons: int = 12) -> str:
    """The best meshes, their memory by part, and what is left out."""
    request, shown = plan.request, plan.predictions[:top]
    gpu = request.cluster.gpu
    lines = [
        f"{request.name}: {request.shape.parameters:,} parameters; {request.gpus} × {gpu.name}, "
        f"{gpu.memory_gib:g} GiB each, {request.cluster.gpus_per_node} per node",
        f"{request.global_batch} sequences of {request.seq_len} per step; "
        f"weights {request.setup.formats.param.name}, compute {request.setup.formats.compute.name}",
        f"speed {_fitted(plan)}; memory ± {MARGIN:.0%}",
        "",
        *_aligned([_SPEED_HEAD, *(_speed_row(p) for p in shown)]),
        "",
        "memory per rank at its peak, GiB (gathered: parameters, and reduce buffers)",
        *_aligned([_MEMORY_HEAD, *(_memory_row(p) for p in shown)]),
    ]
    if len(plan.predictions) > top:
        lines.append(f"… and {len(plan.predictions) - top} slower or tighter meshes (--top, --json)")
    if plan.left_out:
        lines += ["", "left out"]
        lines += [f"  {name}: {why}" for name, why in list(plan.left_out.items())[:reasons]]
        if len(plan.left_out) > reasons:
            lines.append(f"  … and {len(plan.left_out) - reasons} more (--json has all)")
    return "\n".join(lines)


def _fitted(plan: Plan) -> str:
    gpu = plan.request.cluster.gpu
    if not gpu.fitted_on:
        return f"± {SPEED_INTERVAL_OF_A_GUESS:.0%} (constants are a guess: --calibrate)"
    return f"± {SPEED_INTERVAL:.0%}, over tp ± {SPEED_INTERVAL_OVER_TP:.0%} (constants of {gpu.fitted_on})"


_SPEED_HEAD = (
    "mesh",
    "micro-batch",
    "checkpoint",
    "reshard",
    "tokens/s/GPU",
    "MFU",
    "GB/step: shard",
    "replicate",
    "tp",
    "limit",
    "memory",
)


def _speed_row(p: Prediction) -> tuple[str, ...]:
    rate = "" if p.speed is None else _between(p.speed.tokens_per_s_per_gpu, p.speed.interval, 0)
    return (
        str(p.mesh),
        f"{p.setup.micro_batch} × {p.setup.accumulation}",
        p.setup.checkpoint,
        str(p.setup.reshard),
        rate,
        "" if p.speed is None else f"{p.speed.mfu:.0%}",
        *(f"{bytes_per_axis(p)[axis] / _GB:.3g}" for axis in ("dp_shard", "dp_replicate", "tp")),
        "" if p.speed is None else p.speed.seconds.limit,
        str(p.verdict),
    )


_MEMORY_HEAD = ("mesh", "reserved", "allocated", *(part.split()[0] for part in PARTS), "at")


def _memory_row(p: Prediction) -> tuple[str, ...]:
    peak = p.memory.peak
    return (
        str(p.mesh),
        _between(p.memory.reserved / GIB, MARGIN, 1),
        f"{p.memory.allocated / GIB:.1f}",
        *(f"{size / GIB:.1f}" for size in peak.by_part().values()),
        peak.name,
    )


def _between(value: float, interval: float, digits: int) -> str:
    return f"{value:,.{digits}f} ({value * (1 - interval):,.{digits}f}-{value * (1 + interval):,.{digits}f})"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def bytes_per_axis(p: Prediction) -> dict[str, int]:
    """Of all collectives of a step, as the ledger counts them."""
    sums = dict.fromkeys((*AXES, "world"), 0)
    for (axis, _), traffic in p.ledger.items():
        sums[axis.split("/")[0]] += traffic.bytes
    return sums


def described(p: Prediction) -> str:
    """What was predicted."""
    return (
        f"mesh {p.mesh}, micro-batch {p.setup.micro_batch} × {p.setup.accumulation}, checkpointing "
        f"{p.setup.checkpoint}, reshard_after_forward {p.setup.reshard}"
    )


_VERDICTS = {"fit": "it fits", "borderline": "borderline", "no": "it does not fit"}


def explained(p: Prediction) -> str:
    """Everything about one mesh, each number with its formula; docs/planner.md has the symbols."""
    lines = [described(p) + (f": {_VERDICTS[p.verdict]}" if p.verdict else "")]
    lines += ["", "memory of a rank, bytes allocated at each moment that may be the peak"]
    for phase in p.memory.phases:
        mark = "   <- the peak" if phase is p.memory.peak else ""
        lines.append(f"  {phase.name}: {phase.total:,} = {phase.total / GIB:.2f} GiB{mark}")
        lines += [
            f"    {line.bytes:>18,}  {line.part.split()[0]:12}{line.formula}"
            for line in phase.lines
            if line.bytes
        ]
    lines += [
        f"  reserved by the allocator: {p.memory.reserved:,} = {p.memory.reserved / GIB:.2f} GiB "
        f"= parameters + gradients + optimizer + {1 + FRAGMENTATION:g} × the most of the rest",
        "",
        "collectives of a step: axis, kind, count, bytes of the whole tensors (traffic.py)",
    ]
    lines += [f"  {a:14}{k:16}{t.count:>8}{t.bytes:>22,}" for (a, k), t in sorted(p.ledger.items())]
    flops = p.flops
    lines += ["", "FLOPs of a rank per micro-batch, computing again included"]
    lines += [f"  {name:12}{getattr(flops, name):>24,}" for name in ("matmul", "attention", "head", "total")]
    lines.append(f"  of the model per token, for MFU: {flops_per_token(p.shape, p.setup.seq_len):,}")
    return "\n".join(lines + (_seconds_explained(p) if p.speed else []))


def _seconds_explained(p: Prediction) -> list[str]:
    assert p.speed is not None
    s = p.speed.seconds
    terms = [
        ("matmul", s.matmul, "(matmul + head FLOPs) / (arithmetic · flops)"),
        (
            "attention",
            s.attention,
            "attention FLOPs / 2 / (attention · flops): half is masked",
        ),
        ("elementwise", s.elementwise, "bytes moved by norms, activations, copies / (bandwidth · bandwidth)"),
        ("tp traffic", s.tp_traffic, "bytes of gathers and scatters · (t-1)/t / (network · node_bandwidth)"),
        ("dp traffic", s.dp_traffic, "what the rest does not hide of weights gathered and gradients reduced"),
        ("update", s.update, "40 · N/(D·t) / (bandwidth · bandwidth)"),
        ("host", s.host, "L · time to issue a block: the step takes at least this"),
    ]
    lines = ["", "seconds: per micro-batch, the update's per step"]
    lines += [f"  {name:12}{value:>12.4f}  {formula}" for name, value, formula in terms]
    lines.append(
        f"  step        {s.step:>12.4f}  {_between(p.speed.tokens_per_s_per_gpu, p.speed.interval, 0)} "
        f"tokens/s per GPU, MFU {p.speed.mfu:.1%}, limited by {s.limit}"
    )
    return lines


def as_json(plan: Plan) -> dict[str, Any]:
    request = plan.request
    return {
        "model": request.name,
        "parameters": request.shape.parameters,
        "gpu": request.cluster.gpu.name,
        "gpus": request.gpus,
        "gpus_per_node": request.cluster.gpus_per_node,
        "memory_gib": request.cluster.gpu.memory_gib,
        "seq_len": request.seq_len,
        "global_batch": request.global_batch,
        "meshes": [prediction_as_json(p) for p in plan.predictions],
        "left_out": plan.left_out,
    }


def prediction_as_json(p: Prediction) -> dict[str, Any]:
    found: dict[str, Any] = {axis: getattr(p.mesh, axis) for axis in AXES}
    found |= {
        "micro_batch": p.setup.micro_batch,
        "accumulation": p.setup.accumulation,
        "activation_checkpoint": p.setup.checkpoint,
        "reshard_after_forward": p.setup.reshard,
        "verdict": p.verdict,
        "allocated_bytes": p.memory.allocated,
        "reserved_bytes": p.memory.reserved,
        "reserved_interval": MARGIN,
        "peak": p.memory.peak.name,
        "memory": p.memory.peak.by_part(),
        "parameter_bytes": p.memory.parameters,
        "gradient_bytes": p.memory.gradients,
        "optimizer_bytes": p.memory.optimizer,
        "collectives": as_collectives(p.ledger),
        "flops_per_micro_batch": p.flops.total,
    }
    if p.speed:
        found |= {
            "tokens_per_s_per_gpu": p.speed.tokens_per_s_per_gpu,
            "tokens_per_s_interval": p.speed.interval,
            "mfu": p.speed.mfu,
            "step_s": p.speed.seconds.step,
            "limit": p.speed.seconds.limit,
        }
    return found


def as_collectives(ledger: Ledger) -> list[dict[str, Any]]:
    return [
        {"axis": axis, "kind": kind, "count": t.count, "bytes": t.bytes}
        for (axis, kind), t in sorted(ledger.items())
    ]
