"""AdamW groups, learning-rate schedules, gradient norm and clipping."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from parallel2d.collectives import all_reduce_
from parallel2d.local_weights import to_local

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
    return AdamW([g for g in groups if g["params"]], lr=lr, betas=betas, fused=True)


class AdamW(torch.optim.AdamW):
    """torch's AdamW, computing on this rank's shards; parameters and state stay DTensors.

    Element by element there is nothing that shards need of each other, and asking DTensor how to split an
    operation on all parameters at once costs each rank more than the operation.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        """Fills the lists (parameters, gradients, moments, step counts) that the update works on."""
        has_complex = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = [to_local(tensor) for tensor in tensors]
        return has_complex


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
    """2-norm of all gradients, of the whole model, the same on every rank: 0-d float64.

    One all-reduce of one number over the world, none in a world of one.
    """
    total = gradient_squares(parameters)
    if dist.get_world_size() > 1:
        all_reduce_(total)
    return total.sqrt()


@torch.no_grad()
def gradient_squares(parameters: Iterable[nn.Parameter]) -> Tensor:
    """What this rank adds to the squared norm of all gradients: 0-d float64. No communication.

    From local shards, a replica counting once in the world.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    counted = [to_local(g) for g in gradients if _counts_here(g)]
    if not gradients:
        raise ValueError("no parameter has a gradient")
    device = to_local(gradients[0]).device
    if not counted:
        return torch.zeros((), dtype=torch.float64, device=device)
    # GPUs have few units for float64; a tensor's norm in float32 is sums of sums there.
    norms = torch._foreach_norm(counted, 2, dtype=torch.float32 if device.type == "cuda" else torch.float64)
    return torch.stack(norms).double().square().sum()


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[nn.Parameter], norm: Tensor | float, max_norm: float, *, scale: float = 1.0
) -> None:
    """Multiply all gradients by `scale`, and so that their norm is at most max_norm. No communication.

    norm: of the gradients multiplied by `scale`.
    """
    gradients = [to_local(p.grad) for p in parameters if p.grad is not None]
    ratio = max_norm / (norm + 1e-6)
    if isinstance(ratio, Tensor):
        torch._foreach_mul_(gradients, (scale * ratio.clamp(max=1.0)).to(gradients[0].dtype))
    else:
        torch._foreach_mul_(gradients, scale * min(ratio, 1.0))


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
