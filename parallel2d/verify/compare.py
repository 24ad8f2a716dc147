"""The same steps on one process and on a mesh, compared; where they differ, the place.

The process alone is plain PyTorch: the model's own forward, torch's cross-entropy, norm and clipping.
Everything is float64, where sums in another order differ by 1e-15 and a wrong plan by far more.
"""

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.data import rows_of_rank
from parallel2d.errors import UserError
from parallel2d.fsdp import inference
from parallel2d.loss import IGNORE_INDEX, VocabShard
from parallel2d.mesh import dp_rank, dp_size
from parallel2d.optim import build_optimizer
from parallel2d.shards import local_block
from parallel2d.step import train_step
from parallel2d.tensor_parallel import Plan, entry_of
from parallel2d.verify.locate import Recorder, first_wrong_gradient, first_wrong_output
from parallel2d.verify.report import TOLERANCE, Difference, Report, relative_error
from parallel2d.verify.trial import (
    Batch,
    Trial,
    alone_on_this_process,
    on_mesh,
    require_classes,
)


@dataclass
class _Numbers:
    """What the run alone saw: per step, and the tensors to compare."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    classes: int

    def rounding(self) -> set[str]:
        """Parameters whose gradient is zero but for rounding, as a key's bias before softmax."""
        sizes = {name: gradient.abs().max().item() for name, gradient in self.gradients.items()}
        largest = max(sizes.values(), default=0.0)
        return {name for name, size in sizes.items() if 0 < size < 1e-10 * largest}


def verify(trial: Trial, mesh: DeviceMesh, name: str) -> Report:
    """Run the trial on rank 0 alone, then on the mesh; the same report on every rank.

    Every rank holds the whole model in float64 besides its share; rank 0 also gradients and optimizer
    state. Its tensors are broadcast one at a time, and every rank compares the block that it holds.
    """
    # torch warns of outputs that are views, which somebody might change in place: here nobody does.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    alone = _run_alone(trial) if dist.get_rank() == 0 else None
    model, plan = on_mesh(trial, mesh)
    with Recorder(model) as recorder:
        try:
            report = _compare(trial, model, plan, mesh, alone, name)
        except (RuntimeError, ValueError, FloatingPointError) as error:
            if isinstance(error, dist.DistError):
                raise
            _require_that_all_failed(error)
            where = f"forward fails in {_named(recorder.running, plan)}: {error}"
            return Report(name, 0, math.inf, math.inf, [], where)
    if report.same:
        return report
    return replace(report, place=_place(trial, report, mesh))


def _require_that_all_failed(error: Exception) -> None:
    """A rank that fails alone leaves its peers in a collective: then it speaks for itself, and ends them."""
    try:
        dist.monitored_barrier(timeout=timedelta(seconds=10))
    except RuntimeError:
        raise error from None


def _place(trial: Trial, report: Report, mesh: DeviceMesh) -> str:
    """Which module or gradient is wrong first, as far as the runs can tell."""
    reference = alone_on_this_process(trial)
    for tensor in (*reference.parameters(), *reference.buffers()):
        dist.broadcast(tensor.detach(), src=0)
    model, plan = on_mesh(trial, mesh)
    wrong_output = first_wrong_output(model, reference, _rows(trial.batches[0][0], mesh), mesh["tp"])
    if wrong_output is not None:
        right, wrong = wrong_output
        before = "" if right is None else f"agree up to {_named(right, plan)}; "
        return (
            f"forward: outputs {before}the first that differs is that of {_named(wrong, plan)}; "
            f"the fault is there, or in what the model does between the two (a split of heads, a chunk)"
        )
    errors = [(p.parameter, p.gradient) for p in report.parameters]
    wrong_gradient = first_wrong_gradient(errors, TOLERANCE)
    if wrong_gradient is None:
        return "forward and gradients of step 1 agree: what differs comes later"
    right, wrong = wrong_gradient
    back = "" if right is None else f"agree from the loss back to {_named(_owner(right), plan)}; "
    return f"forward agrees; gradients {back}the first that differs is in {_named(_owner(wrong), plan)}"


def _owner(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _named(module: str, plan: Plan) -> str:
    return f"{module or 'the model itself'} ({entry_of(plan, module)})"


def _run_alone(trial: Trial) -> _Numbers:
    model = alone_on_this_process(trial)
    optimizer = build_optimizer(model, *trial.optimizer)
    numbers = _Numbers([], [], {}, {}, classes=0)
    for inputs, targets in trial.batches:
        logits = model(inputs)
        numbers.classes = logits.shape[-1]
        require_classes(targets, numbers.classes)
        counted = (targets != IGNORE_INDEX).sum().clamp(min=1)
        loss_sum = F.cross_entropy(
            logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
        )
        loss = loss_sum / counted
        loss.backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        norm = torch.nn.utils.get_total_norm(gradients.values())
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), trial.max_norm, norm)
        if not numbers.losses:
            numbers.gradients = {n: g.clone() for n, g in gradients.items()}
        optimizer.step()
        optimizer.zero_grad()
        numbers.losses.append(loss.item())
        numbers.norms.append(norm.item())
    numbers.weights = {n: p.detach() for n, p in model.named_parameters()}
    return numbers


def _compare(
    trial: Trial, model: nn.Module, plan: Plan, mesh: DeviceMesh, alone: _Numbers | None, name: str
) -> Report:
    expected = _from_rank_0(
        alone and (alone.losses, alone.norms, alone.classes, list(alone.gradients), alone.rounding())
    )
    losses, norms, classes, trained, rounding = expected
    vocab = _vocab_of_output(model, trial.batches[0][0], classes, mesh)
    optimizer = build_optimizer(model, *trial.optimizer)
    shapes = {n: p.shape for n, p in model.named_parameters()}
    gradients: dict[str, float] = {}

    def compare_first_gradients(*_: object) -> None:
        if not gradients:
            ours = {n: p.grad for n, p in model.named_parameters() if n in trained}
            gradients.update(_errors(ours, shapes, alone.gradients if alone else None, floor=1e-3))

    optimizer.register_step_pre_hook(compare_first_gradients)
    loss_error = norm_error = 0.0
    for batch, loss, norm in zip(trial.batches, losses, norms, strict=True):
        parts = _parts(batch, trial.micro_batch, mesh)
        stats = train_step(model, parts, optimizer, vocab, mesh, trial.max_norm, trial.gradient_sync)
        loss_error = max(loss_error, relative_error(stats.loss, loss))
        norm_error = max(norm_error, relative_error(stats.grad_norm, norm))
    # AdamW makes whole updates of a gradient that is nothing but rounding, zero in mathematics.
    ours = {n: p.detach() for n, p in model.named_parameters() if n not in rounding}
    weights = _errors(ours, shapes, alone.weights if alone else None, floor=1e-2)
    found = [
        Difference(n, entry_of(plan, _owner(n)), gradients.get(n, 0.0), weights.get(n, 0.0)) for n in shapes
    ]
    return Report(name, len(losses), loss_error, norm_error, found)


def _vocab_of_output(model: nn.Module, inputs: Tensor, classes: int, mesh: DeviceMesh) -> VocabShard:
    """Whether the model's output is whole or a tp share of the classes."""
    with inference(model):
        width = model(_rows(inputs, mesh)).shape[-1]
    shard = VocabShard.of(classes, mesh["tp"])
    if width == classes:
        return VocabShard.whole(classes)
    if width == shard.stop - shard.start:
        return shard
    raise UserError(f"the output's last dim is {width} on the mesh and {classes} on one process")


def _rows(whole: Tensor, mesh: DeviceMesh, fill: int = 0) -> Tensor:
    return rows_of_rank(whole, dp_rank(mesh), dp_size(mesh), fill)


def _parts(batch: Batch, micro_batch: int, mesh: DeviceMesh) -> list[Batch]:
    inputs, targets = _rows(batch[0], mesh), _rows(batch[1], mesh, IGNORE_INDEX)
    size = micro_batch or len(inputs)
    return list(zip(inputs.split(size), targets.split(size), strict=True))


def _from_rank_0(value: Any) -> Any:
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _errors(
    ours: Mapping[str, Tensor | None],
    shapes: Mapping[str, torch.Size],
    reference: Mapping[str, Tensor] | None,
    floor: float,
) -> dict[str, float]:
    """{name: error of this rank's block, largest over ranks, relative to the tensor's largest value}.

    Args:
        ours: None stands for zeros.
        shapes: of the whole tensors.
        reference: whole tensors, on rank 0; None elsewhere.
        floor: no tensor counts as smaller than this share of the largest of all.
    """
    errors, scales = torch.zeros(len(ours), dtype=torch.float64), torch.zeros(len(ours), dtype=torch.float64)
    for i, (name, tensor) in enumerate(ours.items()):
        whole = reference[name].contiguous() if reference else torch.empty(shapes[name], dtype=torch.float64)
        dist.broadcast(whole, src=0)
        mine, box = local_block(torch.zeros_like(whole) if tensor is None else tensor)
        if mine.numel():
            errors[i] = (mine - box.cut(whole)).abs().max().nan_to_num(nan=math.inf, posinf=math.inf)
        scales[i] = whole.abs().max()
    dist.all_reduce(errors, op=dist.ReduceOp.MAX)
    relative = errors / scales.clamp(min=max(floor * scales.max().item(), 1e-30))
    # A NaN would compare as smaller than anything.
    relative = relative.nan_to_num(nan=math.inf, posinf=math.inf)
    return dict(zip(ours, relative.tolist(), strict=True))
