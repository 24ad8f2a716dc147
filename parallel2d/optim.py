"""AdamW groups, learning-rate schedules, gradient norm and clipping."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

Schedule = Literal["constant", "cosine", "linear", "wsd"]


def build_optimizer(
    model: nn.Module, lr: float, betas: tuple[float, float], weight_decay: float
) -> torch.optim.AdamW:
    """AdamW over the sharded parameters. Matrices decay; vectors (norms, biases) do not.

    ndim is that of the whole parameter, so the groups are the same on every mesh. lr is the first
    value only; `LearningRate` gives each step's.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=betas, fused=True)


@dataclass(frozen=True)
class LearningRate:
    """Learning rate as a pure function of the update's number, so that a resume needs no state.

    Linear warmup to the peak, then constant; or down to final × peak at the last update, along a
    cosine, along a line, or (wsd) constant until the last fifth and then along a line.
    """

    peak: float
    schedule: Schedule
    warmup_steps: int
    total_steps: int
    final: float

    def __call__(self, step: int) -> float:
        """Rate of update number `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.peak
        plateau_end = int(0.8 * self.total_steps) if self.schedule == "wsd" else 0
        decay_from = max(self.warmup_steps, plateau_end)
        progress = (step + 1 - decay_from) / max(1, self.total_steps - decay_from)
        progress = min(1.0, max(0.0, progress))
        left = 0.5 * (1 + math.cos(math.pi * progress)) if self.schedule == "cosine" else 1 - progress
        return self.peak * (self.final + (1 - self.final) * left)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


@torch.no_grad()
def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """2-norm of all gradients, of the whole model, the same on every rank: 0-d float64 (float32 on CUDA).

    From local shards: each rank squares and sums what it holds, a replica counting once in the
    world. One all-reduce of one number over the world, none in a world of one.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    counted = [_local(g) for g in gradients if _counts_here(g)]
    if not gradients:
        raise ValueError("no parameter has a gradient")
    device = _local(gradients[0]).device
    dtype = torch.float32 if device.type == "cuda" else torch.float64
    total = torch.zeros((), dtype=dtype, device=device)
    if counted:
        norms = torch._foreach_norm(counted, 2, dtype=dtype)
        total = torch.stack(norms).square().sum()
    if dist.get_world_size() > 1:
        dist.all_reduce(total)
    return total.sqrt()


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scale all gradients so that their norm, given, is at most max_norm. No communication."""
    gradients = [_local(p.grad) for p in parameters if p.grad is not None]
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(gradients, scale.to(gradients[0].dtype))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _counts_here(gradient: Tensor) -> bool:
    """Whether this rank's copy is the one that counts: the first along every axis that replicates it."""
    if not isinstance(gradient, DTensor):
        return dist.get_rank() == 0
    coordinate = gradient.device_mesh.get_coordinate() or ()
    return all(
        place == 0
        for place, placement in zip(coordinate, gradient.placements, strict=True)
        if isinstance(placement, Replicate)
    )
