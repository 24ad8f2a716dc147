"""Weights: DTensors at rest, local tensors inside forward and backward."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor


def distribute(module: nn.Module, mesh: DeviceMesh, **placements: Placement) -> None:
    """Turn the module's own parameters into DTensors on the tp mesh. No communication."""
    for name, placement in placements.items():
        parameter = module._parameters.get(name)
        if parameter is None:
            continue
        shared = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(shared, requires_grad=parameter.requires_grad))


def local(parameter: Tensor, gradient: Placement | None = None) -> Tensor:
    """This rank's share of a weight; `gradient`: what its gradient is over tp (default: the same layout)."""
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.to_local(grad_placements=None if gradient is None else [gradient])


def local_bias(module: nn.Linear, gradient: Placement | None = None) -> Tensor | None:
    return None if module.bias is None else local(module.bias, gradient)


@contextmanager
def local_parameters(module: nn.Module, gradient: Placement) -> Iterator[None]:
    """Let the module's own code see local tensors where its parameters are.

    An instance attribute shadows the entry in `_parameters`, which stays as FSDP and the optimizer know it.
    """
    shown = {name: local(p, gradient) for name, p in module._parameters.items() if p is not None}
    module.__dict__.update(shown)
    try:
        yield
    finally:
        for name in shown:
            del module.__dict__[name]
