"""What of a run is stored: weights, buffers and optimizer state by name, as DCP sees them."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel2d.checkpoint.chunks import Chunk
from parallel2d.checkpoint.manifest import OPTIMIZER, WEIGHTS, StoredTensor
from parallel2d.errors import UserError
from parallel2d.fsdp import reshard
from parallel2d.mesh import AXES
from parallel2d.shards import splits_of


def state_tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """{name: tensor} of all weights and buffers (`model.…`) and optimizer state (`optimizer.….exp_avg`).

    Tensors only, under the parameters' own names: hyperparameters come from the recipe, and the
    schedule is a function of the step. A tied parameter appears once.
    """
    reshard(model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    state: dict[str, Tensor] = {f"{WEIGHTS}{name}": p for p, name in names.items()}
    if buffers := dict(model.named_buffers()):
        persistent = model.state_dict(keep_vars=True)
        state |= {f"{WEIGHTS}{name}": b for name, b in buffers.items() if name in persistent}
    for parameter, name in names.items() if optimizer else ():
        values = optimizer.state.get(parameter, {}) if optimizer else {}
        state |= {f"{OPTIMIZER}{name}.{key}": value for key, value in values.items()}
    if odd := [
        f"{n} ({type(value).__name__})" for n, value in state.items() if not isinstance(value, Tensor)
    ]:
        raise UserError(f"optimizer state that is no tensor cannot be saved: {', '.join(odd[:10])}")
    return state


@torch.no_grad()
def create_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, stored: Mapping[str, StoredTensor]
) -> None:
    """Tensors to load into, for every entry of optimizer state that the checkpoint has for a parameter.

    An entry of the parameter's shape is sharded like it; others (step counts) are the same everywhere.
    What the optimizer has already is left as it is.
    """
    reshard(model)
    trained = {p for group in optimizer.param_groups for p in group["params"]}
    names = {name: p for name, p in model.named_parameters() if p in trained}
    for entry, tensor in stored.items():
        name, _, key = entry.removeprefix(OPTIMIZER).rpartition(".")
        if not entry.startswith(OPTIMIZER) or name not in names or key in optimizer.state[names[name]]:
            continue
        optimizer.state[names[name]][key] = (
            torch.zeros_like(names[name])
            if tensor.shape == tuple(names[name].shape)
            else torch.zeros(tensor.shape, dtype=tensor.torch_dtype, device=names[name].device)
        )


@torch.no_grad()
def shares_of(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What this rank holds of each tensor; of a plain one all. Not copies."""
    # Without gradients to_local is a look-up, which matters while training waits.
    return {n: t.to_local() if isinstance(t, DTensor) else t.detach() for n, t in state.items()}


def as_chunks(state: Mapping[str, Tensor], shares: Mapping[str, Tensor]) -> dict[str, Any]:
    """A state dict for DCP, of the tensors' shares or copies of them."""
    return {n: Chunk(t, shares[n]) if isinstance(t, DTensor) else shares[n] for n, t in state.items()}


def split_of(tensor: Tensor) -> dict[str, int]:
    """{mesh axis: dim of the tensor that it splits}."""
    if not isinstance(tensor, DTensor):
        return {}
    names = tensor.device_mesh.mesh_dim_names or ()
    return {names[split.axis]: split.dim for split in splits_of(tensor)}


def mesh_of(model: nn.Module) -> dict[str, int]:
    """{axis: size} of the mesh that the parameters live on; an axis that they do not know has size 1."""
    sizes = dict.fromkeys(AXES, 1)
    sharded = next((p for p in model.parameters() if isinstance(p, DTensor)), None)
    if sharded is not None:
        mesh = sharded.device_mesh
        sizes |= dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
    return sizes


class HostCopies:
    """Copies of a rank's shares in host memory, which is kept and used again for the next ones."""

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self, shares: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies that the next call overwrites."""
        if not self._fit(shares):
            self.reserve(shares)
        copies = {name: self._copies[name] for name in shares}
        on_cuda = any(share.is_cuda for share in shares.values())
        # Many at once, where they lie on the same device.
        torch._foreach_copy_(list(copies.values()), list(shares.values()), non_blocking=on_cuda)
        if on_cuda:
            torch.cuda.synchronize()
        return copies

    def _fit(self, shares: Mapping[str, Tensor]) -> bool:
        held = ((self._copies.get(name), share) for name, share in shares.items())
        return all(c is not None and c.shape == s.shape and c.dtype == s.dtype for c, s in held)

    def reserve(self, like: Mapping[str, Tensor]) -> None:
        """Get the memory for copies of such tensors, and have the system give it: that is what takes time."""
        starts, total = [], 0
        for share in like.values():
            starts.append(total)
            total += -(-share.nbytes // 64) * 64
        memory = _memory(total, pinned=any(share.is_cuda for share in like.values())).zero_()
        named = zip(like.items(), starts, strict=True)
        self._copies = {name: _part(memory, start, share) for (name, share), start in named}


def _part(memory: Tensor, start: int, like: Tensor) -> Tensor:
    """A tensor whose storage is its part of the memory alone, as torch.save wants it."""
    if not like.nbytes:
        return torch.empty_like(like, device="cpu")
    data = memory.numpy()[start : start + like.nbytes]
    return torch.frombuffer(data, dtype=like.dtype).view(like.shape)


def _memory(size: int, pinned: bool) -> Tensor:
    if pinned:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    # numpy asks the kernel for huge pages.
    return torch.from_numpy(np.empty(size, dtype=np.uint8))
