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
class Weight:
    """A parameter, by where it lies: what is found there changes as FSDP gathers and frees.

    owners: (module, name), several if it is tied, so that the gradients of all are added up before they
    are sent. partial: each tp rank's gradient is a part of a sum.
    """

    owners: Sequence[tuple[nn.Module, str]]
    partial: bool

    @property
    def parameter(self) -> Tensor:
        module, name = self.owners[0]
        return module._parameters[name]  # type: ignore[return-value]  # None is no weight


def show_local(
    function: Callable[..., Any], weights: Sequence[Weight], tp_mesh: DeviceMesh
) -> Callable[..., Any]:
    """The function, during which the weights' modules see this rank's shares, as plain tensors.

    Forward: nothing; backward: one all-reduce over tp for the gradients of all that are partial, if any.
    """

    def shown(*args: Any, **kwargs: Any) -> Any:
        with _in_place_of_parameters(weights, tp_mesh.get_group()):
            return function(*args, **kwargs)

    return shown


@contextmanager
def _in_place_of_parameters(
    weights: Sequence[Weight], group: torch.distributed.ProcessGroup
) -> Iterator[None]:
    """An instance attribute shadows the entry in `_parameters`, which FSDP and the optimizer know."""
    shares = _local([weight.parameter for weight in weights])
    partial = [i for i, weight in enumerate(weights) if weight.partial and shares[i].requires_grad]
    if partial:
        summed = sum_gradients([shares[i] for i in partial], group)
        for i, share in zip(partial, summed, strict=True):
            shares[i] = share
    for weight, share in zip(weights, shares, strict=True):
        for module, name in weight.owners:
            module.__dict__[name] = share
    try:
        yield
    finally:
        for weight in weights:
            for module, name in weight.owners:
                del module.__dict__[name]


def _local(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Their shares on this rank. A share's gradient becomes a DTensor split as the parameter is."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return [to_local(p) for p in parameters]
    trained = [p for p in parameters if p.requires_grad]
    shares = iter(_LocalShares.apply(*trained)) if trained else iter(())
    return [next(shares) if p.requires_grad else to_local(p) for p in parameters]


def to_local(tensor: Tensor) -> Tensor:
    """This rank's share; a plain tensor is its own."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class _LocalShares(torch.autograd.Function):
    """DTensor.to_local of many at once, in one node of the autograd graph."""

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
