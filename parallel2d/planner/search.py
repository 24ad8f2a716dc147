"""All meshes of so many GPUs, the best way to run on each, and why the others are left out."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from parallel2d.errors import UserError
from parallel2d.mesh_shape import MeshShape
from parallel2d.planner.hardware import GIB, Cluster
from parallel2d.planner.memory import MARGIN, memory
from parallel2d.planner.model import ModelShape
from parallel2d.planner.predict import Prediction, predict
from parallel2d.planner.setup import Setup

CHECKPOINTS = ("none", "selective", "full")
RESHARDS = ("auto", "but_last", "always", "never")
FLOAT8S = ("none", "tensorwise", "rowwise", "rowwise_with_gw_hp")
MOST_GPUS = 2**20


@dataclass(frozen=True)
class Request:
    """What is to be planned.

    Args:
        shape: the model.
        name: what to call it.
        problems: what the model has against a size of tp.
        gpus: how many.
        cluster: what they are and how they are joined.
        seq_len: tokens per sequence.
        global_batch: sequences per update, over all ranks.
        setup: number formats and compilation; batch, checkpointing and FSDP's policy are chosen here.
        checkpoints: which of them are tried.
        reshards: likewise.
        micro_batch: sequences per forward; None: what suits.
    """

    shape: ModelShape
    name: str
    problems: Callable[[int], list[str]]
    gpus: int
    cluster: Cluster
    seq_len: int
    global_batch: int
    setup: Setup
    checkpoints: tuple[str, ...] = CHECKPOINTS
    reshards: tuple[str | int, ...] = ("auto", "never")
    micro_batch: int | None = None


@dataclass(frozen=True)
class Plan:
    """Predictions, best first (what fits before what is borderline); and {mesh or sizes: why not}."""

    request: Request
    predictions: tuple[Prediction, ...]
    left_out: dict[str, str]


def plan(request: Request) -> Plan:
    """The best setup on every mesh; one UserError if nothing fits or the batch divides by no mesh."""
    found: list[Prediction] = []
    why = {tp: _why_not_tp(request, tp) for tp in divisors(request.gpus)}
    left_out: dict[str, str] = {}
    for mesh in (m for tp in why if not why[tp] for m in _meshes(request.gpus, tp)):
        if problems := problems_of(request, mesh):
            left_out[str(mesh)] = problems[0]
            continue
        best = best_setup(request, mesh)
        if best.verdict == "no":
            left_out[str(mesh)] = _too_large(request, best)
        else:
            found.append(best)
    for reason in dict.fromkeys(filter(None, why.values())):
        left_out[f"tp {', '.join(str(tp) for tp in why if why[tp] == reason)}"] = reason
    if not found:
        raise UserError(_nothing_fits(request, left_out))
    order = sorted(found, key=lambda p: (p.verdict != "fit", *(-merit for merit in _merit(p))))
    return Plan(request, tuple(order), left_out)


def problems_of(request: Request, mesh: MeshShape) -> list[str]:
    """What model, batch and FSDP have against a mesh."""
    found = request.problems(mesh.tp) + _problems_of_length(request, mesh.tp)
    if request.global_batch % mesh.dp:
        found.append(f"global_batch {request.global_batch} is not divisible by dp {mesh.dp}")
    elif request.micro_batch and request.global_batch // mesh.dp % request.micro_batch:
        per_rank = request.global_batch // mesh.dp
        found.append(f"micro_batch {request.micro_batch} does not divide the {per_rank} sequences of a rank")
    if mesh.dp_shard == 1 and mesh.dp_replicate > 1:
        found.append(f"dp_replicate {mesh.dp_replicate} of dp {mesh.dp}: replicas of whole weights, not FSDP")
    for size in request.reshards:
        if isinstance(size, int) and (mesh.tp > 1 or mesh.dp_shard % size or size == mesh.dp_shard):
            found.append(f"reshard_after_forward {size} needs tp 1 and a multiple of {size} as dp_shard")
    return found


def _problems_of_length(request: Request, tp: int) -> list[str]:
    return [f"seq_len {request.seq_len} is not divisible by tp {tp}"] if request.seq_len % tp else []


def best_setup(request: Request, mesh: MeshShape) -> Prediction:
    """The fastest of what fits; if nothing does, of what is borderline; else what needs the least memory."""
    tried = [predict(request.shape, mesh, s, request.cluster) for s in _setups(request, mesh)]
    for verdict in ("fit", "borderline"):
        fits = [p for p in tried if p.verdict == verdict]
        if fits:
            return max(fits, key=_merit)
    return min(tried, key=lambda p: p.memory.reserved)


def divisors(number: int) -> list[int]:
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _meshes(gpus: int, tp: int) -> Iterator[MeshShape]:
    """Every dp_replicate × dp_shard beside a tp; replicas of one shard are no FSDP."""
    dp = gpus // tp
    for shards in reversed(divisors(dp)):
        if shards > 1 or dp == 1:
            yield MeshShape(dp // shards, shards, tp)


def _setups(request: Request, mesh: MeshShape) -> Iterator[Setup]:
    """Micro-batches from small to large, up to the first that does not fit, for each policy."""
    per_rank = request.global_batch // mesh.dp
    for checkpoint in request.checkpoints:
        for reshard in request.reshards:
            for micro_batch in [request.micro_batch] if request.micro_batch else divisors(per_rank):
                setup = dataclasses.replace(
                    request.setup,
                    micro_batch=micro_batch,
                    seq_len=request.seq_len,
                    accumulation=per_rank // micro_batch,
                    checkpoint=checkpoint,
                    reshard=reshard,
                )
                yield setup
                held = memory(request.shape, mesh, setup)
                if held.verdict(request.cluster.gpu.memory_bytes) == "no":
                    break


def _why_not_tp(request: Request, tp: int) -> str:
    node = request.cluster.gpus_per_node
    if tp > node or (request.gpus > node and node % tp):
        return f"would span nodes of {node} GPUs, and tp needs the links within one"
    return next(iter(request.problems(tp) + _problems_of_length(request, tp)), "")


def _too_large(request: Request, best: Prediction) -> str:
    return (
        f"needs {best.memory.reserved / GIB:.1f} GiB per rank at the least "
        f"({best.setup.checkpoint} checkpointing, micro-batch {best.setup.micro_batch}) of "
        f"{request.cluster.gpu.memory_gib:g}"
    )


def _merit(prediction: Prediction) -> tuple[int, int]:
    """Speed, in steps of a hundredth, far less than it is known to; of equals what needs the least memory."""
    rate = prediction.speed.tokens_per_s_per_gpu if prediction.speed else 1.0
    return round(100 * math.log(rate)), -prediction.memory.reserved


def _nothing_fits(request: Request, left_out: dict[str, str]) -> str:
    """Whose fault it is: the model's rules, the batch, or memory."""
    gpu, name, gpus = request.cluster.gpu, request.name, request.gpus
    lines = [f"{mesh}: {why}" for mesh, why in left_out.items()]
    if any("GiB per rank" in why for why in left_out.values()):
        enough = smallest_world(request)
        remedy = f"{enough} of them would do" if enough else f"nor on {MOST_GPUS}: use a shorter seq_len"
        first = f"{name} fits on no mesh of {gpus} {gpu.name} ({gpu.memory_gib:g} GiB each): {remedy}"
        return "\n".join([first, *_some(lines)])
    allowed = [tp for tp in divisors(gpus) if not _why_not_tp(request, tp)]
    dps = [gpus // tp for tp in allowed]
    if dps and all(request.global_batch % dp for dp in dps):
        near = -(-request.global_batch // dps[-1]) * dps[-1]
        first = f"global_batch {request.global_batch} is divisible by no dp that {gpus} GPUs allow "
        return f"{first}({', '.join(map(str, dps))}): use --global_batch {near}"
    return "\n".join([f"{name} runs on no mesh of {gpus} GPUs", *_some(lines)])


def _some(lines: list[str]) -> list[str]:
    return lines if len(lines) <= 12 else [*lines[:12], f"… and {len(lines) - 12} more"]


def smallest_world(request: Request) -> int | None:
    """The least number of GPUs, whole nodes from one node on, on which a sequence per rank fits."""
    node = request.cluster.gpus_per_node
    within = [n for n in divisors(node) if n < node and _fits(request, n)]
    if within:
        return within[0]
    low, high = 0, 1
    while not _fits(request, high * node):
        low, high = high, 2 * high
        if high * node > MOST_GPUS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits(request, middle * node) else (middle, high)
    return high * node


def _fits(request: Request, gpus: int) -> bool:
    """Micro-batch 1, as much as there is of checkpointing and sharding."""
    setup = dataclasses.replace(
        request.setup, micro_batch=1, seq_len=request.seq_len, checkpoint=request.checkpoints[-1]
    )
    most = request.cluster.gpu.memory_bytes / (1 + MARGIN)
    request = dataclasses.replace(request, gpus=gpus)
    return any(
        memory(request.shape, MeshShape(1, gpus // tp, tp), setup).reserved <= most
        for tp in divisors(gpus)
        if not _why_not_tp(request, tp)
    )
