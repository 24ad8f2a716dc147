"""What `verify` runs twice: the model alone and on a mesh, from the same values."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.batchnorm import _BatchNorm

from parallel2d.errors import UserError
from parallel2d.fsdp import GradientSync, Precision
from parallel2d.init import init_weights
from parallel2d.loss import IGNORE_INDEX
from parallel2d.parallelize import parallelize
from parallel2d.seeds import seed_of
from parallel2d.shards import local_block
from parallel2d.tensor_parallel import Plan

_FLOAT64 = Precision(torch.float64, torch.float64, torch.float64)

Batch = tuple[Tensor, Tensor]
Model = tuple[nn.Module, Plan, Sequence[nn.Module]]


@dataclass(frozen=True)
class Trial:
    """What is run twice.

    Args:
        template: from `make_template`; copies of it run. A model on meta is initialised from seed, one
            with values keeps rank 0's; either is slightly perturbed.
        batches: (inputs, targets) of each step, whole. Targets are classes of the output's last dim;
            -100 counts nothing.
        options: what else `parallelize` is given.
        micro_batch: sequences per forward on the mesh; 0: a rank's whole share.
        gradient_sync: when their gradients are reduced.
        optimizer: lr, betas and weight_decay of AdamW.
        max_norm: gradients are clipped to it.
        seed: of initial weights and perturbation.
    """

    template: Model
    batches: Sequence[Batch]
    options: Mapping[str, Any]
    micro_batch: int = 0
    gradient_sync: GradientSync = "every"
    optimizer: tuple[float, tuple[float, float], float] = (1e-3, (0.9, 0.95), 0.1)
    max_norm: float = 1.0
    seed: int = 0


def make_template(make: Callable[[], Model]) -> Model:
    """Model, plan and units in float64, checked; made once, because another call may draw other values."""
    model, plan, units = require_model(make())
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            raise UserError(
                f"{name}: {type(module).__name__} takes its statistics from one rank's rows, so that no mesh "
                f"computes what one process does: use a norm that looks at each sample alone"
            )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError("the model has no parameter that is trained: there are no gradients to compare")
    model.double().eval()  # dropout off: its masks depend on the mesh
    return model, plan, list(units)


def require_model(made: Any) -> Model:
    """What a user's callable returned, if it is what parallelize takes."""
    if not (isinstance(made, tuple) and len(made) == 3 and isinstance(made[0], nn.Module)):
        raise UserError(f"the callable returns {type(made).__name__}, not (model, plan, units)")
    return made


def on_mesh(trial: Trial, mesh: DeviceMesh) -> tuple[nn.Module, Plan]:
    model, plan, units = copy.deepcopy(trial.template)
    on_meta = _is_on_meta(model)
    parallelize(model, mesh, plan=plan, units=units, precision=_FLOAT64, **trial.options)
    if on_meta:
        init_weights(model, torch.device("cpu"), trial.seed)
    _perturb(model, trial.seed)
    return model, plan


def alone_on_this_process(trial: Trial) -> nn.Module:
    model, _, _ = copy.deepcopy(trial.template)
    if _is_on_meta(model):
        init_weights(model, torch.device("cpu"), trial.seed)
    _perturb(model, trial.seed)
    return model


def _is_on_meta(model: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in model.parameters())


@torch.no_grad()
def _perturb(model: nn.Module, seed: int) -> None:
    """Add the same small noise on any mesh, because weights of zero and norms of one hide mistakes."""
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(seed_of(seed, "noise", name))
        noise = 0.02 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        local, box = local_block(parameter)
        local.add_(box.cut(noise))


@torch.no_grad()
def random_targets(model: nn.Module, inputs: Tensor, seed: int) -> Tensor:
    """For a batch without targets: random classes of the output's last dim show a wrong plan as well."""
    output = model(inputs.to(next(model.parameters()).device))
    if not isinstance(output, Tensor) or output.ndim < 2 or output.shape[-1] < 2:
        told = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise UserError(
            f"the model returns {told}, not one tensor (batch, …, classes) with two classes or more"
        )
    *positions, classes = output.shape
    return torch.randint(classes, positions, generator=torch.Generator().manual_seed(seed))


def require_classes(targets: Tensor, classes: int) -> None:
    counted = targets[targets != IGNORE_INDEX]
    if counted.numel() and not (counted.min() >= 0 and counted.max() < classes):
        raise UserError(
            f"targets from {counted.min()} to {counted.max()} are not classes of an output of {classes}"
        )
