"""The fitted constants of a cluster, from measured runs: at most three, four with float8."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from parallel2d.mesh_shape import MeshShape
from parallel2d.planner.hardware import Cluster, Reached
from parallel2d.planner.model import ModelShape
from parallel2d.planner.setup import OURS, Program, Setup
from parallel2d.planner.step_time import seconds, tokens_per_s_per_gpu

FITTED = ("arithmetic", "attention", "network", "float8")
# How far a constant may lie from where it starts (a factor of e^spread is one standard deviation), and a
# measurement from its prediction: a few runs move the constants that they tell something about.
_SPREAD = {"arithmetic": 0.3, "attention": 0.3, "network": 0.2, "float8": 0.3}
_NOISE = 0.05


@dataclass(frozen=True)
class Measured:
    """A run and what it reached, in tokens per second and GPU."""

    shape: ModelShape
    mesh: MeshShape
    setup: Setup
    tokens_per_s: float
    program: Program = OURS


def predicted(run: Measured, cluster: Cluster) -> float:
    step_s = seconds(run.shape, run.mesh, run.setup, cluster, run.program).step
    return tokens_per_s_per_gpu(run.mesh, run.setup, step_s)


def fit(runs: Sequence[Measured], cluster: Cluster) -> Cluster:
    """The cluster with its constants fitted to the runs, starting from its own.

    Least squares of log(predicted / measured), with what the constants start from as one more measurement
    of each; Levenberg and Marquardt's method with differences for derivatives. float8 only if a run has it.
    """
    names = [n for n in FITTED if n != "float8" or any(run.setup.float8 for run in runs)]
    start = [math.log(getattr(cluster.gpu.reached, name)) for name in names]

    def at(values: Sequence[float]) -> Cluster:
        parts = {name: math.exp(value) for name, value in zip(names, values, strict=True)}
        return with_reached(cluster, dataclasses.replace(cluster.gpu.reached, **parts))

    def residuals(values: Sequence[float]) -> list[float]:
        here = at(values)
        errors = [math.log(predicted(run, here) / run.tokens_per_s) / _NOISE for run in runs]
        moved = zip(names, values, start, strict=True)
        return errors + [(value - first) / _SPREAD[name] for name, value, first in moved]

    return at(_least_squares(residuals, start))


def with_reached(cluster: Cluster, reached: Reached) -> Cluster:
    return dataclasses.replace(cluster, gpu=dataclasses.replace(cluster.gpu, reached=reached))


def _least_squares(residuals: Callable[[Sequence[float]], list[float]], start: list[float]) -> list[float]:
    import numpy as np  # here: a tenth of a second that a plan does not need

    def cost(values: np.ndarray) -> tuple[float, np.ndarray]:
        found = np.array([math.copysign(min(abs(r), 2 * abs(r) ** 0.5), r) for r in residuals(list(values))])
        return float(found @ found), found

    at, damping, step = np.array(start), 1.0, 1e-4
    best, errors = cost(at)
    for _ in range(60):
        slopes = np.stack([(cost(at + step * axis)[1] - errors) / step for axis in np.eye(len(at))], axis=1)
        move = np.linalg.solve(slopes.T @ slopes + damping * np.eye(len(at)), -slopes.T @ errors)
        there, found = cost(at + move)
        if there < best:
            if best - there < 1e-9 * best:
                break
            at, best, errors, damping = at + move, there, found, damping / 3
        else:
            damping *= 4
    return [float(value) for value in at]
