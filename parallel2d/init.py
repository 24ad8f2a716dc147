"""A sharded model on meta -> weights, the same numbers on every mesh."""

import math

import torch
from torch import Tensor, nn

from parallel2d.errors import UserError
from parallel2d.seeds import seed_of
from parallel2d.shards import local_block
from parallel2d.ties import to_empty


def init_weights(model: nn.Module, device: torch.device, seed: int, *, offload: bool = False) -> None:
    """Materialise the model on `device` and fill each module's weights by its own reset_parameters().

    One module at a time gets its parameters in full, drawn from a generator seeded by (seed, module
    name), and each rank keeps its slice: bit-identical weights on every mesh, and never more than one
    module's own parameters beyond the shards. A tied parameter is filled by its first owner.
    Every module that owns parameters or buffers must define reset_parameters(), as torch's do.
    With offload, as in `FsdpPolicy`, they are drawn on the device all the same and kept in host memory.
    No communication.
    """
    _require_reset_parameters(model)
    to_empty(model, "cpu" if offload else device)
    done: set[nn.Parameter] = set()
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        for name, module in model.named_modules():
            if _owns_state(module):
                torch.manual_seed(seed_of(seed, name))
                _reset(name, module, device, done)


def _owns_state(module: nn.Module) -> bool:
    return any(value is not None for value in (*module._parameters.values(), *module._buffers.values()))


def _require_reset_parameters(model: nn.Module) -> None:
    lacking = [
        f"{name or 'the model itself'} ({type(module).__name__.removeprefix('FSDP')})"
        for name, module in model.named_modules()
        if _owns_state(module) and not hasattr(module, "reset_parameters")
    ]
    if lacking:
        raise UserError(
            "a model built on meta gets its values from reset_parameters() of each module that owns "
            f"parameters or buffers; define it in: {', '.join(lacking)}"
        )


def _reset(name_of_module: str, module: nn.Module, device: torch.device, done: set[nn.Parameter]) -> None:
    """Call reset_parameters() on full-size tensors on the device, then keep this rank's slices."""
    shards = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    for name, parameter in shards.items():
        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        module._parameters[name] = nn.Parameter(whole, parameter.requires_grad)
    for name, buffer in module._buffers.items():
        # Offload is for parameters; to_empty knows no difference.
        module._buffers[name] = None if buffer is None else buffer.to(device)
    state = {n: t for n, t in (*module._parameters.items(), *module._buffers.items()) if t is not None}
    for tensor in state.values():
        # Uninitialised memory would differ from rank to rank; NaN shows what is never filled.
        tensor.fill_(math.nan if tensor.is_floating_point() or tensor.is_complex() else 0)
    module.reset_parameters()  # type: ignore[operator]  # hasattr was checked; nn.Module's type is Tensor
    # The sum, because a mask of the whole tensor would be one more thing in memory.
    unfilled = [n for n in state if getattr(module, n).sum().isnan()]
    if unfilled:
        where = f"{name_of_module or 'the model itself'} ({type(module).__name__.removeprefix('FSDP')})"
        raise UserError(f"reset_parameters() of {where} leaves {', '.join(unfilled)} without values")
    for name, parameter in shards.items():
        whole = module.get_parameter(name)
        module._parameters[name] = parameter
        if parameter not in done:
            done.add(parameter)
            _copy_slice(parameter, whole)


def _copy_slice(parameter: nn.Parameter, whole: Tensor) -> None:
    local, box = local_block(parameter)
    local.copy_(box.cut(whole))
