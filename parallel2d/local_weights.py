"""Weights: DTensors at rest, local tensors inside forward and backward."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

from parallel2d.collectives import sum_gradients


def distribute(module: nn.Module, mesh: DeviceMesh, **placements: Placement) -> None:
    """Turn the module's own parameters into DTensors on the tp mesh. No communication."""
    for name, placement in placements.items():
        parameter = module._parameters.get(name)
        if parameter is None:
            continue
        shared = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(shared, requires_grad=parameter.requires_grad))


@dataclass(frozen=True)
class Owned:
    """A parameter, by the module that owns it: what the name stands for changes as FSDP gathers and frees.

    partial: each tp rank's gradient is a part of a sum.
    """

    module: nn.Module
    name: str
    partial: bool

    @property
    def parameter(self) -> Tensor:
        return self.module._parameters[self.name]  # type: ignore[return-value]  # None is not listed

    @property
    def is_trained(self) -> bool:
        return self.parameter.requires_grad


def show_local(
    function: Callable[..., Any], owned: Sequence[Owned], tp_mesh: DeviceMesh
) -> Callable[..., Any]:
    """The function, during which these parameters' modules see this rank's shares, as plain tensors.

    Forward: nothing; backward: one all-reduce over tp for the gradients of all that are partial, if any.
    """

    def shown(*args: Any, **kwargs: Any) -> Any:
        with _in_place_of_parameters(owned, tp_mesh.get_group()):
            return function(*args, **kwargs)

    return shown


@contextmanager
def _in_place_of_parameters(owned: Sequence[Owned], group: torch.distributed.ProcessGroup) -> Iterator[None]:
    """An instance attribute shadows the entry in `_parameters`, which FSDP and the optimizer know."""
    # Tied parameters have one share, too, so that its gradients are added up before they are sent.
    shares = {id(one.parameter): one for one in owned}
    local = dict(zip(shares, _local([one.parameter for one in shares.values()]), strict=True))
    partial = [key for key, one in shares.items() if one.partial and local[key].requires_grad]
    if partial:
        local |= zip(partial, sum_gradients([local[key] for key in partial], group), strict=True)
    for one in owned:
        one.module.__dict__[one.name] = local[id(one.parameter)]
    try:
        yield
    finally:
        for one in owned:
            del one.module.__dict__[one.name]


def _local(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Their shares on this rank. A share's gradient becomes a DTensor split as the parameter is."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return [_to_local(p) for p in parameters]
    trained = [p for p in parameters if p.requires_grad]
    shares = iter(_LocalShares.apply(*trained)) if trained else iter(())
    return [next(shares) if p.requires_grad else _to_local(p) for p in parameters]


def _to_local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class _LocalShares(torch.autograd.Function):
    """DTensor.to_local of many at once, for a tenth of the time."""

    @staticmethod
    def forward(ctx: Any, *parameters: DTensor) -> tuple[Tensor, ...]:
        ctx.specs = [p._spec for p in parameters]
        ctx.set_materialize_grads(False)
        return tuple(p._local_tensor.view_as(p._local_tensor) for p in parameters)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[DTensor | None, ...]:
        # Not from_local, which would look for an autograd graph, a mesh and a shape that are known here.
        return tuple(
            None if grad is None else DTensor(grad, spec, requires_grad=False)
            for grad, spec in zip(grads, ctx.specs, strict=True)
        )
