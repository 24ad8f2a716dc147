"""What the planner says of a run: the mesh it would take, its prediction beside what is measured."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from parallel2d import launch
from parallel2d.config import RunConfig
from parallel2d.errors import UserError
from parallel2d.mesh_shape import MeshShape
from parallel2d.metrics import memory_gib
from parallel2d.planner.hardware import GIB, Cluster, find_gpu, load_gpus
from parallel2d.planner.model import ModelShape
from parallel2d.planner.predict import Prediction, predict
from parallel2d.planner.search import divisors
from parallel2d.planner.setup import ON_CPU, OURS, Formats, NumberFormat, Setup
from parallel2d.traffic import Step

AnyConfig = TypeVar("AnyConfig", bound=RunConfig)


def with_planned_mesh(
    config: AnyConfig, shape: ModelShape, problems: Callable[[AnyConfig, MeshShape], list[str]]
) -> AnyConfig:
    """The configuration with numbers where dp or tp is auto: the planner's best mesh of the GPUs here.

    On a device that hardware.yaml does not know, the first mesh that works, with the least tp.
    """
    if "auto" not in (config.dp, config.tp):
        return config
    given = {"dp": config.dp, "tp": config.tp, "dp_replicate": config.dp_replicate}
    if small := [f"{name} {size}" for name, size in given.items() if isinstance(size, int) and size < 1]:
        raise UserError(f"{', '.join(small)}: beside auto a size is a positive number")
    dp, tp = (size if isinstance(size, int) else -1 for size in (config.dp, config.tp))
    world = launch.planned_world(dp, max(tp, 1), config.dp_replicate, config.device)
    possible = meshes(world, dp, tp, config.dp_replicate)
    if not possible:
        raise UserError(
            f"dp {config.dp}, tp {config.tp}, dp_replicate {config.dp_replicate}: {world} processes have "
            f"no such mesh: start more of them, or give dp and tp as numbers"
        )
    allowed = [m for m in possible if not problems(config, m)]
    # Where no mesh is allowed, `choose_mesh` says why the plainest is not.
    best = best_mesh(config, shape, allowed, *here(config)) if allowed else possible[0]
    sizes = f"dp {best.dp}, tp {best.tp}, dp_replicate {best.dp_replicate}"
    if allowed:
        launch.say(f"plan      {sizes}: the best of {len(allowed)} meshes that work")
    return dataclasses.replace(config, dp=best.dp, tp=best.tp, dp_replicate=best.dp_replicate)


def meshes(world: int, dp: int, tp: int, replicas: int) -> list[MeshShape]:
    """Of so many ranks, in the order of preference among equals. dp, tp: as given, or -1; replicas: as given,
    where that is more than its default."""
    return [
        MeshShape(r, world // t // r, t)
        for t in ([tp] if tp > 0 else divisors(world))
        for r in ([replicas] if replicas > 1 else divisors(world // t))
        if world % (t * r) == 0 and (r == 1 or world // t > r) and dp in (-1, world // t)
    ]


def best_mesh(
    config: RunConfig,
    shape: ModelShape,
    allowed: list[MeshShape],
    device_type: str,
    cluster: Cluster | None,
) -> MeshShape:
    """What fits before what is borderline, the faster first; a UserError where by prediction nothing fits."""

    def merit(found: Prediction) -> tuple[int, float]:
        if found.verdict == "no":
            return 0, -found.memory.reserved
        rate = found.speed.tokens_per_s_per_gpu if found.speed else 0.0
        return 1 + (found.verdict != "borderline"), rate

    best = max((forecast(config, shape, mesh, device_type, cluster) for mesh in allowed), key=merit)
    if best.verdict == "no" and cluster:
        raise UserError(
            f"no mesh of these {best.mesh.world} GPUs fits: {best.mesh} needs the least, "
            f"{best.memory.reserved / GIB:.1f} GiB of {cluster.gpu.memory_gib:g} by prediction: use a "
            f"data.micro_batch below {best.setup.micro_batch}, activation_checkpoint full or more GPUs "
            f"(dp and tp given as numbers are not held against the prediction)"
        )
    return best.mesh


def here(config: RunConfig) -> tuple[str, Cluster | None]:
    """The type of the device that the run will use, and what hardware.yaml knows of it."""
    device_type = launch.device_type(config.device)
    if device_type == "cpu":
        return device_type, None
    gpu = find_gpu(torch.cuda.get_device_name(0), load_gpus())
    return device_type, Cluster.of(gpu, torch.cuda.device_count()) if gpu else None


def forecast(
    config: RunConfig, shape: ModelShape, mesh: MeshShape, device_type: str, cluster: Cluster | None
) -> Prediction:
    """By formula, for such a device."""
    setup = setup_of(config, mesh.dp, device_type)
    return predict(shape, mesh, setup, cluster, ON_CPU if device_type == "cpu" else OURS)


def setup_of(config: RunConfig, dp: int, device_type: str) -> Setup:
    """A run's configuration in the planner's words."""
    formats = (_format(dtype) for dtype in config.precision.dtypes(device_type))
    micro_batch = config.data.micro_batch_of(dp)
    return Setup(
        micro_batch,
        config.data.seq_len,
        config.data.global_batch // micro_batch // dp,
        config.activation_checkpoint,
        config.fsdp.policy().resharding,
        config.compile,
        Formats(*formats),
        config.precision.float8 != "none",
        config.async_tp,
    )


def step_of(config: RunConfig, width: int, dp: int, device_type: str) -> Step:
    """A run's configuration in the ledger's words. width: of the residual stream."""
    _, compute, reduce = config.precision.dtypes(device_type)
    micro_batch = config.data.micro_batch_of(dp)
    return Step(
        micro_batch,
        config.data.seq_len,
        width,
        config.data.global_batch // micro_batch // dp,
        compute,
        reduce,
        config.activation_checkpoint,
        resharding=config.fsdp.policy().resharding,
        gradient_sync=config.fsdp.gradient_sync,
        output=config.precision.output_dtype(),
        compile=config.compile,
    )


def before(config: RunConfig, prediction: Prediction) -> str:
    """A line for the start of a run."""
    if reason := _out_of_reach(config):
        return f"forecast  none: the formulas do not cover {reason}"
    needed, parts = prediction.memory, prediction.memory.peak.by_part()
    told = ", ".join(f"{part.split()[0]} {size / GIB:.3g}" for part, size in parts.items() if size)
    line = f"forecast  {needed.allocated / GIB:.3g} GiB of tensors on rank 0 at its peak ({told})"
    if prediction.speed is None:
        return line
    fits = {"fit": "which fits", "borderline": "which may or may not fit", "no": "which does not fit"}
    line += f", {needed.reserved / GIB:.3g} reserved, {fits[prediction.verdict or 'fit']}"
    rate, interval = prediction.speed.tokens_per_s_per_gpu * prediction.mesh.world, prediction.speed.interval
    return f"{line}; {rate * (1 - interval):,.0f} to {rate * (1 + interval):,.0f} tokens/s"


def after(config: RunConfig, prediction: Prediction, device: torch.device) -> str:
    """A line for the end of a run: predicted, and measured."""
    measured = f"measured {memory_gib(device):.3g} GiB"
    if device.type == "cpu":
        measured += " resident, Python and torch included"
    if _out_of_reach(config):
        return f"memory    {measured}"
    return f"memory    predicted {prediction.memory.allocated / GIB:.3g} GiB of tensors, {measured}"


def _out_of_reach(config: RunConfig) -> str | None:
    reasons: list[tuple[Any, str]] = [
        (config.freeze, "frozen weights"),
        (config.fsdp.offload, "offload"),
        (config.fsdp.forward_prefetch or config.fsdp.backward_prefetch, "explicit prefetch"),
        (config.precision.output, "precision.output"),
        (config.precision.float8 != "none", "float8"),
        (config.fsdp.gradient_sync != "every", f"gradient_sync {config.fsdp.gradient_sync}"),
    ]
    return next((reason for holds, reason in reasons if holds), None)


def _format(dtype: torch.dtype) -> NumberFormat:
    return NumberFormat(str(dtype).removeprefix("torch."), dtype.itemsize)
