"""The composition: tensor parallel -> activation checkpointing, compilation -> FSDP, on any nn.Module."""

import functools
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from parallel2d.compile import apply_compile
from parallel2d.errors import UserError
from parallel2d.float8 import apply_float8, require_float8_shapes
from parallel2d.fsdp import FsdpPolicy, Precision, apply_fsdp
from parallel2d.tensor_parallel import Plan, apply_tensor_parallel

ActivationCheckpoint = Literal["none", "selective", "full"]

# What selective checkpointing keeps: the results of matrix products and attention. The cheap rest
# (norms, activations, reshapes) is computed again in backward.
_KEPT_OPS = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten._scaled_mm.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    }
)


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    plan: Plan,
    units: Sequence[nn.Module],
    precision: Precision | None = None,
    fsdp: FsdpPolicy | None = None,
    activation_checkpoint: ActivationCheckpoint = "none",
    compile: bool = False,
    async_tp: bool = False,
) -> nn.Module:
    """Make a one-device model run on the mesh, in place; returns the model.

    Build the model on meta, `freeze` what is not to be trained, call this, and `init_weights`
    afterwards, so that no rank ever holds all of it.
    A model that has values already keeps those of rank 0. Build the optimizer after this call. Call
    the model as `model(x)`, never `model.forward(x)`: FSDP gathers weights in the call's hooks.

    Args:
        mesh: from `build_mesh`.
        plan: {glob over module names: tensor-parallel style}, see `apply_tensor_parallel`.
        units: the blocks that are gathered one at a time, in the order in which they run.
        precision: dtypes; default float32 throughout.
        fsdp: when weights are gathered and freed, and where they rest.
        activation_checkpoint: what of a unit's forward is computed again in backward: nothing, all
            but matrix products and attention, or everything.
        compile: give each unit's forward and backward to torch.compile, see `apply_compile`.
        async_tp: with compile, on CUDA: gathers and scatters over tp overlap with the products beside them.
    """
    precision, fsdp = precision or Precision(), fsdp or FsdpPolicy()
    found = fsdp.problems(type(model), mesh["dp_shard"].size(), mesh["tp"].size(), mesh.device_type)
    scalars = [name for name, parameter in model.named_parameters() if parameter.ndim == 0]
    if scalars:
        found.append(
            f"parameters without dims cannot be sharded: give shape (1,) to {', '.join(scalars[:10])}"
        )
    if found:
        raise UserError("\n".join(found))
    _share_values(model)
    _cast(model, precision.param)
    # Tensor parallel first: it splits the whole weights that the plan speaks of; FSDP then splits the shares.
    apply_float8(units, precision.float8, mesh.device_type)
    apply_tensor_parallel(model, mesh["tp"], plan, units, fsdp.forward_methods)
    require_float8_shapes(units, precision.float8)
    # Checkpointing before FSDP: the recomputed forward must lie inside FSDP's hooks, which gather weights.
    # Compilation too: the compiler cannot follow the hooks. It must see selective checkpointing, which
    # decides op by op; full checkpointing only calls the compiled forward a second time.
    overlapped = _overlapped(mesh, compile, async_tp)
    if compile and activation_checkpoint == "full":
        apply_compile(units, overlapped)
    _apply_activation_checkpoint(units, activation_checkpoint)
    if compile and activation_checkpoint != "full":
        apply_compile(units, overlapped)
    apply_fsdp(model, mesh, units, precision, fsdp)
    return model


def _overlapped(mesh: DeviceMesh, compile: bool, async_tp: bool) -> dist.ProcessGroup | None:
    if async_tp and not compile:
        raise UserError("async_tp=True is a pass of the compiler: give compile=True too")
    return mesh["tp"].get_group() if async_tp else None


def _share_values(model: nn.Module) -> None:
    """Rank 0's values for a model that is not on meta; nothing else would make the ranks agree."""
    if dist.get_world_size() == 1:
        return
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta:
            dist.broadcast(tensor.detach(), src=0)


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Parameters to dtype; buffers (a rotary table for one) to it only where that widens them."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and (buffer.is_floating_point() or buffer.is_complex()):
                module._buffers[name] = buffer.to(torch.promote_types(buffer.dtype, dtype))


def _apply_activation_checkpoint(units: Sequence[nn.Module], mode: ActivationCheckpoint) -> None:
    """Replaces each unit's forward, not the unit, so that parameter names stay as they are."""
    if mode == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _keep_or_recompute)
    for unit in units:
        unit.forward = functools.partial(checkpoint, unit.forward, **options)


def _keep_or_recompute(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _KEPT_OPS else CheckpointPolicy.PREFER_RECOMPUTE
