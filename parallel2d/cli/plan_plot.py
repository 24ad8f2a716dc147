"""A plan as a picture: memory and speed of each mesh."""

from pathlib import Path

from matplotlib.figure import Figure

from parallel2d.errors import UserError
from parallel2d.planner.hardware import GIB
from parallel2d.planner.memory import MARGIN
from parallel2d.planner.moments import PARTS
from parallel2d.planner.search import Plan


def draw(plan: Plan, file: Path, top: int) -> None:
    """Bars of memory by part, and of tokens/s with their intervals, best mesh first."""
    shown = plan.predictions[:top]
    names = [str(p.mesh) for p in shown]
    figure = Figure(figsize=(max(6.0, 1.2 * len(shown)), 7.0), layout="constrained")
    memory, speed = figure.subplots(2, 1, sharex=True)
    bottom = [0.0] * len(shown)
    for part in PARTS:
        heights = [p.memory.peak.by_part()[part] / GIB for p in shown]
        memory.bar(names, heights, bottom=bottom, label=part)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    reserved = [p.memory.reserved / GIB for p in shown]
    memory.errorbar(names, reserved, [MARGIN * r for r in reserved], fmt="k_", capsize=3, label="reserved")
    memory.axhline(plan.request.cluster.gpu.memory_gib, color="red", linestyle="--", label="the GPU has")
    memory.set_ylabel("GiB per rank")
    memory.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    speeds = [p.speed for p in shown if p.speed]
    rates = [s.tokens_per_s_per_gpu for s in speeds]
    speed.bar(names, rates, yerr=[s.interval * s.tokens_per_s_per_gpu for s in speeds], capsize=3)
    speed.set_ylabel("tokens/s per GPU")
    speed.tick_params(axis="x", rotation=45)
    figure.suptitle(f"{plan.request.name} on {plan.request.gpus} × {plan.request.cluster.gpu.name}")
    try:
        figure.savefig(file)
    except (OSError, ValueError) as error:
        raise UserError(f"--plot {file} cannot be written: {error}") from None
