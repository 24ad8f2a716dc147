"""One row of benchmarks/gpu.py, measured in this process."""

import itertools
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import gpu_by_hand
import torch
from parallel2d.models.llama import Llama, LlamaConfig
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parallel2d import MeshShape, Precision, build_mesh, init_weights, launch, parallelize
from parallel2d.config import PrecisionConfig
from parallel2d.loss import VocabShard, cross_entropy_sum
from parallel2d.metrics import memory_gib, peak_flops
from parallel2d.optim import build_optimizer, clip_gradients, gradient_norm
from parallel2d.parallelize import ActivationCheckpoint
from parallel2d.step import train_step

MAX_NORM = 1.0
OUT_OF_MEMORY = "out of memory"

Step = Callable[[Tensor, Tensor], object]


@dataclass(frozen=True)
class Row:
    """One line of the table before it is measured; `steps`: before the measured ones, and those."""

    what: str
    program: str
    model: LlamaConfig
    mesh: MeshShape
    seq_len: int
    micro_batch: int
    steps: tuple[int, int]
    checkpointing: ActivationCheckpoint = "none"
    compile: bool = False


def send_result(sender: Connection, row: Row, device_type: str, compiler_cache: str) -> None:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = compiler_cache
    sender.send(outcome(lambda: measure(row, device_type)))


def outcome(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return work()
    except torch.OutOfMemoryError:
        return {"note": OUT_OF_MEMORY}


def measure(row: Row, device_type: str) -> dict[str, Any]:
    if row.mesh.world == 1:
        with launch.world(1, device_type, 600) as device:
            step = build_by_hand(row, device) if row.program == "by hand" else build(row, device, real_step)
            return run_steps(row, step, device)
    device = torch.device(device_type, 0)
    if device_type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.init()
    with launch.imagined_world(row.mesh.world):
        return run_steps(row, build(row, device, imagined_step), device)


def build(row: Row, device: torch.device, do_step: Callable[..., object]) -> Step:
    """The composition of recipes/llama_2d.py."""
    with torch.device("meta"):
        model = Llama(row.model)
    mesh = build_mesh(row.mesh, device.type)
    parallelize(
        model,
        mesh,
        plan=model.tp_plan(),
        units=list(model.blocks),
        precision=Precision(*PrecisionConfig().dtypes(device.type)),
        activation_checkpoint=row.checkpointing,
        compile=row.compile,
    )
    init_weights(model, device, seed=0)
    optimizer = build_optimizer(model, 1e-4, (0.9, 0.95), 0.1)
    vocab = VocabShard.of(row.model.vocab_size, mesh["tp"])
    return lambda ids, targets: do_step(model, ids, targets, optimizer, vocab, mesh)


def build_by_hand(row: Row, device: torch.device) -> Step:
    _, compute, _ = PrecisionConfig().dtypes(device.type)
    return gpu_by_hand.build(row.model, device, compute, row.checkpointing, row.compile)


def real_step(
    model: nn.Module,
    ids: Tensor,
    targets: Tensor,
    optimizer: torch.optim.Optimizer,
    vocab: VocabShard,
    mesh: DeviceMesh,
) -> float:
    return train_step(model, [(ids, targets)], optimizer, vocab, mesh, MAX_NORM).loss


def imagined_step(
    model: nn.Module,
    ids: Tensor,
    targets: Tensor,
    optimizer: torch.optim.Optimizer,
    vocab: VocabShard,
    mesh: DeviceMesh,
) -> float:
    """What train_step computes, without its refusal of numbers that are not finite.

    Before 2.13, torch's fake group leaves a reduce-scatter's result as it was allocated.
    """
    loss = cross_entropy_sum(model(ids), targets, vocab) / ids.numel()
    loss.backward()
    clip_gradients(model.parameters(), gradient_norm(model.parameters()), MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def run_steps(row: Row, step: Step, device: torch.device) -> dict[str, Any]:
    torch.manual_seed(0)
    shape = (row.micro_batch, row.seq_len)
    ids, targets = (torch.randint(row.model.vocab_size, shape, device=device) for _ in range(2))
    before, measured = row.steps
    on_cuda = device.type == "cuda"
    if on_cuda:
        # What initialisation needed is no part of a step.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    loss = step(ids, targets)
    synchronize(device)
    first_step_s = time.perf_counter() - began
    for _ in range(before - 1):
        step(ids, targets)
    marks = [mark(device)]
    for _ in range(measured):
        loss = step(ids, targets)
        marks.append(mark(device))
    synchronize(device)
    seconds = [seconds_between(*pair) for pair in itertools.pairwise(marks)]
    finite = not isinstance(loss, float) or math.isfinite(loss)
    return {
        "seconds": seconds,
        **rates(row, statistics.median(seconds), device),
        "first_step_s": first_step_s,
        "allocated_gib": memory_gib(device),
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30 if on_cuda else None,
        "note": "" if finite else "numbers not finite: clocks may be higher than in training",
        "on": f"{torch.cuda.get_device_name() if on_cuda else 'CPU'}, torch {torch.__version__}",
    }


def rates(row: Row, seconds: float, device: torch.device) -> dict[str, Any]:
    with torch.device("meta"):
        flops_per_token = Llama(row.model).flops_per_token(row.seq_len)
    tokens_per_s = row.micro_batch * row.seq_len / row.mesh.tp / seconds
    peak = peak_flops(device)
    return {
        "step_s": seconds,
        "tokens_per_s": tokens_per_s,
        "mfu": peak and tokens_per_s * flops_per_token / peak,
    }


def mark(device: torch.device) -> Any:
    """A moment: on a GPU in its own queue, so that a program may run ahead of it as it does in training."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(first: Any, second: Any) -> float:
    return second - first if isinstance(first, float) else first.elapsed_time(second) / 1000


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
