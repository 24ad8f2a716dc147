"""One optimizer update: micro-batches -> gradients -> update -> StepStats."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.fsdp import GradientSync, inference, set_gradient_sync
from parallel2d.loss import IGNORE_INDEX, VocabShard, cross_entropy_sum
from parallel2d.mesh import dp_size, sum_over_dp
from parallel2d.optim import clip_gradients, gradient_norm
from parallel2d.seeds import seed_of

Batch = tuple[Tensor, Tensor]  # ids (b, s), targets (b, s)


@dataclass(frozen=True)
class StepStats:
    """What one update saw, the same on every rank and every mesh.

    loss is nats per real token of the global batch; grad_norm is before clipping.
    """

    loss: float
    grad_norm: float
    tokens: int


def count_tokens(batches: Sequence[Batch]) -> Tensor:
    """Real tokens (targets that count) of this rank's batches, 0-d."""
    return torch.stack([(targets != IGNORE_INDEX).sum() for _, targets in batches]).sum()


def seed_step(seed: int, step: int, dp_rank: int) -> None:
    """Set torch's random state for one update: a function of these three, so a resume needs none saved.

    Data-parallel ranks differ (dropout must not repeat over the batch), tp peers agree.
    """
    torch.manual_seed(seed_of(seed, step, dp_rank))


def train_step(
    model: nn.Module,
    micro_batches: Sequence[Batch],
    optimizer: torch.optim.Optimizer,
    vocab: VocabShard,
    mesh: DeviceMesh,
    max_norm: float,
    gradient_sync: GradientSync = "every",
) -> StepStats:
    """One update from this rank's micro-batches, on their device.

    The loss is normalised by the real tokens of the whole global batch, so it does not matter how
    tokens and padding fall on ranks and micro-batches. `gradient_sync` says when gradients are reduced
    (`set_gradient_sync`), which changes traffic and memory, not numbers.
    Besides what the model issues: one all-reduce per data axis for the token count and one for the
    loss, one over the world for the gradient norm; each of one number, none on an axis of size 1.

    Raises FloatingPointError, on all ranks and before the weights change, if loss or gradient norm
    is not finite.
    """
    tokens = sum_over_dp(count_tokens(micro_batches), mesh)
    # FSDP takes the mean over dp; the loss here is a sum over the global batch.
    scale = dp_size(mesh) / tokens.clamp(min=1).double()
    loss_sum = torch.zeros((), dtype=torch.float64, device=tokens.device)
    for number, (ids, targets) in enumerate(micro_batches, start=1):
        set_gradient_sync(model, gradient_sync, is_last=number == len(micro_batches))
        loss = cross_entropy_sum(model(ids), targets, vocab)
        (loss * scale).backward()
        loss_sum += loss.detach()
    mean_loss = float(sum_over_dp(loss_sum, mesh) / tokens.clamp(min=1))
    norm = gradient_norm(model.parameters())
    if not (math.isfinite(norm) and math.isfinite(mean_loss)):
        raise FloatingPointError(f"loss {mean_loss}, gradient norm {norm.item()}")
    clip_gradients(model.parameters(), norm, max_norm)
    optimizer.step()
    optimizer.zero_grad()
    return StepStats(mean_loss, float(norm), int(tokens))


def evaluate(model: nn.Module, batches: Sequence[Batch], vocab: VocabShard, mesh: DeviceMesh) -> float:
    """Mean loss in nats per token over all ranks' batches; leaves mode and gradients as they were.

    Besides what the model issues: one all-reduce of two numbers per data axis.
    """
    total = torch.zeros(2, dtype=torch.float64, device=batches[0][0].device)
    with inference(model):
        for ids, targets in batches:
            total[0] += cross_entropy_sum(model(ids), targets, vocab)
    total[1] = count_tokens(batches)
    loss_sum, tokens = sum_over_dp(total, mesh).tolist()
    return loss_sum / max(tokens, 1)
