"""The same steps on one process and on a mesh, compared; where they differ, the place.

The process alone is plain PyTorch: the model's own forward, torch's cross-entropy, norm and clipping.
Everything is float64, where sums in another order differ by 1e-15 and a wrong plan by far more.
"""

import copy
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from parallel2d.data import rows_of_rank
from parallel2d.errors import UserError
from parallel2d.fsdp import GradientSync, Precision, inference
from parallel2d.init import init_weights
from parallel2d.loss import IGNORE_INDEX, VocabShard
from parallel2d.mesh import dp_rank, dp_size
from parallel2d.optim import build_optimizer
from parallel2d.parallelize import parallelize
from parallel2d.seeds import seed_of
from parallel2d.shards import local_box
from parallel2d.step import train_step
from parallel2d.tensor_parallel import Plan, entry_of
from parallel2d.verify.locate import Recorder, first_wrong_gradient, first_wrong_output
from parallel2d.verify.report import TOLERANCE, Difference, Report

_FLOAT64 = Precision(torch.float64, torch.float64, torch.float64)

Batch = tuple[Tensor, Tensor]
Model = tuple[nn.Module, Plan, Sequence[nn.Module]]


@dataclass(frozen=True)
class Trial:
    """What is run twice.

    Args:
        make: () -> (model, plan, units). A model on meta is initialised from seed; one with values
            keeps rank 0's, slightly perturbed, because biases of zero and norms of one hide mistakes.
        batches: (inputs, targets) of each step, whole. Targets are classes of the output's last dim;
            -100 counts nothing.
        options: what else `parallelize` is given.
        micro_batch: sequences per forward on the mesh; 0: a rank's whole share.
        gradient_sync: when their gradients are reduced.
        optimizer: lr, betas and weight_decay of AdamW.
        max_norm: gradients are clipped to it.
        seed: of initial weights and perturbation.
    """

    make: Callable[[], Model]
    batches: Sequence[Batch]
    options: Mapping[str, Any]
    micro_batch: int = 0
    gradient_sync: GradientSync = "every"
    optimizer: tuple[float, tuple[float, float], float] = (1e-3, (0.9, 0.95), 0.1)
    max_norm: float = 1.0
    seed: int = 0


@dataclass
class _Numbers:
    """What the run alone saw: per step, and the tensors to compare."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    classes: int


def verify(trial: Trial, mesh: DeviceMesh, name: str) -> Report:
    """Run the trial on rank 0 alone, then on the mesh; the same report on every rank.

    Every rank holds the whole model in float64 besides its share; rank 0 also gradients and optimizer
    state. Its tensors are broadcast one at a time, and every rank compares the block that it holds.
    """
    # torch warns of outputs that are views, which somebody might change in place: here nobody does.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    template = _make(trial.make, trial.seed)
    alone = _run_alone(trial, template) if dist.get_rank() == 0 else None
    model, plan = _on_mesh(trial, template, mesh)
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
    return replace(report, place=_place(trial, template, report, mesh))


def _require_that_all_failed(error: Exception) -> None:
    """A rank that fails alone leaves its peers in a collective: then it speaks for itself, and ends them."""
    try:
        dist.monitored_barrier(timeout=timedelta(seconds=10))
    except RuntimeError:
        raise error from None


def _place(trial: Trial, template: Model, report: Report, mesh: DeviceMesh) -> str:
    """Which module or gradient is wrong first, as far as the runs can tell."""
    reference = _alone(trial, template)
    for tensor in (*reference.parameters(), *reference.buffers()):
        dist.broadcast(tensor.detach(), src=0)
    model, plan = _on_mesh(trial, template, mesh)
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


@torch.no_grad()
def random_targets(make: Callable[[], Model], inputs: Tensor, seed: int) -> Tensor:
    """For a batch without targets: random classes of the output's last dim show a wrong plan as well."""
    model, _, _ = _make(make, seed)
    *positions, classes = model(inputs.to(next(model.parameters()).device)).shape
    if classes < 2:
        raise UserError(f"the output's last dim has size {classes}: there is nothing to compare classes of")
    return torch.randint(classes, positions, generator=torch.Generator().manual_seed(seed))


def _make(make: Callable[[], Model], seed: int) -> Model:
    """Model, plan and units, in float64; values, if it has any, perturbed alike on all ranks."""
    model, plan, units = make()
    model.double().eval()  # dropout off: its masks depend on the mesh
    if not _is_on_meta(model):
        generator = torch.Generator()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                generator.manual_seed(seed_of(seed, name))
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model, plan, units


def _on_mesh(trial: Trial, template: Model, mesh: DeviceMesh) -> tuple[nn.Module, Plan]:
    model, plan, units = copy.deepcopy(template)
    on_meta = _is_on_meta(model)
    parallelize(model, mesh, plan=plan, units=units, precision=_FLOAT64, **trial.options)
    if on_meta:
        init_weights(model, torch.device("cpu"), trial.seed)
    return model, plan


def _alone(trial: Trial, template: Model) -> nn.Module:
    model, _, _ = copy.deepcopy(template)
    if _is_on_meta(model):
        init_weights(model, torch.device("cpu"), trial.seed)
    return model


def _is_on_meta(model: nn.Module) -> bool:
    return any(p.is_meta for p in model.parameters())


def _run_alone(trial: Trial, template: Model) -> _Numbers:
    model = _alone(trial, template)
    optimizer = build_optimizer(model, *trial.optimizer)
    numbers = _Numbers([], [], {}, {}, classes=0)
    for inputs, targets in trial.batches:
        logits = model(inputs)
        numbers.classes = logits.shape[-1]
        loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORE_INDEX)
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
    expected = _from_rank_0(alone and (alone.losses, alone.norms, alone.classes, list(alone.gradients)))
    losses, norms, classes, trained = expected
    vocab = _vocab_of_output(model, trial.batches[0][0], classes, mesh)
    optimizer = build_optimizer(model, *trial.optimizer)
    shapes = {n: p.shape for n, p in model.named_parameters()}
    gradients: dict[str, float] = {}

    def compare_first_gradients(*_: object) -> None:
        if not gradients:
            ours = {n: p.grad for n, p in model.named_parameters() if n in trained}
            gradients.update(_errors(ours, shapes, alone.gradients if alone else None, floor=1e-6))

    optimizer.register_step_pre_hook(compare_first_gradients)
    loss_error = norm_error = 0.0
    for batch, loss, norm in zip(trial.batches, losses, norms, strict=True):
        parts = _parts(batch, trial.micro_batch, mesh)
        stats = train_step(model, parts, optimizer, vocab, mesh, trial.max_norm, trial.gradient_sync)
        loss_error = max(loss_error, abs(stats.loss - loss) / max(abs(loss), 1e-30))
        norm_error = max(norm_error, abs(stats.grad_norm - norm) / max(norm, 1e-30))
    # AdamW turns the rounding error of a gradient that is zero in mathematics into a visible update:
    # weights are compared at the scale of the model's largest.
    ours = {n: p.detach() for n, p in model.named_parameters()}
    weights = _errors(ours, shapes, alone.weights if alone else None, floor=1e-2)
    found = [Difference(n, entry_of(plan, _owner(n)), gradients.get(n, 0.0), weights[n]) for n in weights]
    return Report(name, len(losses), loss_error, norm_error, found, place="")


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
        if tensor is None:
            mine, block = torch.zeros_like(whole), whole
        elif isinstance(tensor, DTensor):
            mine, block = tensor.to_local(), local_box(tensor).cut(whole)
        else:
            mine, block = tensor, whole
        if block.numel():
            errors[i] = (mine - block).abs().max().nan_to_num(nan=math.inf)
        scales[i] = whole.abs().max()
    dist.all_reduce(errors, op=dist.ReduceOp.MAX)
    relative = errors / scales.clamp(min=max(floor * scales.max().item(), 1e-30))
    return dict(zip(ours, relative.tolist(), strict=True))
