"""fully_shard, block by block. Its only caller."""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


@dataclass(frozen=True)
class Precision:
    """dtypes of a run: weights at rest, arithmetic in forward and backward, gradient reduction over dp."""

    param: torch.dtype = torch.float32
    compute: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32


def apply_fsdp(model: nn.Module, mesh: DeviceMesh, units: Sequence[nn.Module], precision: Precision) -> None:
    """Shard every parameter over dp_shard (dim 0), in place; replicate over dp_replicate (HSDP).

    Each unit, then the root with what the units leave, is one all-gather in forward and one
    reduce-scatter (and with replicas one all-reduce) in backward. Units reshard after forward and
    gather again in backward, except the last one and the root, whose backward follows at once.
    The policy's dtypes hold on every mesh, dp 1 included. Gradients are means over dp.

    https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
    """
    replicas = mesh["dp_replicate"].size()
    dp_mesh = mesh["dp_shard"] if replicas == 1 else mesh["dp_replicate", "dp_shard"]
    compute = None if precision.compute == precision.param else precision.compute
    of_root = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=precision.reduce)
    # Only the root casts its inputs: what passes between units has the compute dtype already, and
    # what a model keeps in float32 on purpose (rotary tables) must arrive as it is.
    of_unit = dataclasses.replace(of_root, cast_forward_inputs=False)
    for unit in units:
        fully_shard(unit, mesh=dp_mesh, mp_policy=of_unit, reshard_after_forward=unit is not units[-1])
    fully_shard(model, mesh=dp_mesh, mp_policy=of_root, reshard_after_forward=False)


def reshard(model: nn.Module) -> None:
    """Free gathered weights, so that the model's parameters are its shards. No communication.

    Backward does this by itself; after a forward alone the last unit and the root are still whole.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards training mode is as before and the weights are shards."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
        reshard(model)
