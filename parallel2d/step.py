"""One optimizer update: micro-batches -> gradients -> update -> StepStats."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.collectives import all_reduce_
from parallel2d.fsdp import GradientSync, inference, set_gradient_sync
from parallel2d.loss import IGNORE_INDEX, VocabShard, cross_entropy_sum
from parallel2d.mesh import dp_size, sum_over_dp
from parallel2d.optim import clip_gradients, gradient_squares
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
    Besides what the model issues: one all-reduce of three numbers over the world, for the token count, the
    loss and the gradient norm.

    Raises FloatingPointError, on all ranks and before the weights change, if loss or gradient norm
    is not finite.
    """
    loss_sum = torch.zeros((), dtype=torch.float64, device=micro_batches[0][0].device)
    for number, (ids, targets) in enumerate(micro_batches, start=1):
        set_gradient_sync(model, gradient_sync, is_last=number == len(micro_batches))
        loss = cross_entropy_sum(model(ids), targets, vocab)
        loss.backward()
        loss_sum += loss.detach()
    tokens, total_loss, squares = _sum_over_world(
        count_tokens(micro_batches), loss_sum, gradient_squares(model.parameters()), mesh
    )
    # FSDP has taken the mean over dp of what is a sum over the global batch.
    scale = dp_size(mesh) / max(tokens, 1)
    loss_mean, norm = total_loss / max(tokens, 1), scale * math.sqrt(squares)
    if not (math.isfinite(norm) and math.isfinite(loss_mean)):
        raise FloatingPointError(f"loss {loss_mean}, gradient norm {norm}")
    clip_gradients(model.parameters(), norm, max_norm, scale=scale)
    optimizer.step()
    optimizer.zero_grad()
    return StepStats(loss_mean, norm, int(tokens))


def _sum_over_world(tokens: Tensor, loss: Tensor, squares: Tensor, mesh: DeviceMesh) -> list[float]:
    """The only numbers of a step that the host waits for, together. One all-reduce."""
    # tp peers see the same tokens and compute the same loss: the first speaks for them.
    counts = torch.stack([tokens.double(), loss]) * (mesh["tp"].get_local_rank() == 0)
    totals = torch.cat([counts, squares.unsqueeze(0)])
    if mesh.size() > 1:
        all_reduce_(totals)
    return totals.tolist()


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
