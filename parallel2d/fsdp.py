"""fully_shard, block by block, and the policies it takes. Its only caller."""

import dataclasses
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard

from parallel2d.fsdp_on_cpu import AllGatherOnCpu, ReduceScatterOnCpu
from parallel2d.shared_memory import is_gloo
from parallel2d.traffic import Weight, gathered_bytes, resharding

Reshard = Literal["auto", "but_last", "always", "never"] | int
GradientSync = Literal["every", "last", "replicas_last"]


@dataclass(frozen=True)
class Precision:
    """dtypes of a run.

    Args:
        param: weights at rest.
        compute: arithmetic in forward and backward.
        reduce: gradient reduction over dp.
        output: what the model returns is cast to it; None leaves it as computed.
        cast_inputs: cast the floating-point inputs of the model to `compute`.
        float8: matrix products of the units: none, or a recipe of `apply_float8`.
    """

    param: torch.dtype = torch.float32
    compute: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32
    output: torch.dtype | None = None
    cast_inputs: bool = True
    float8: str = "none"


@dataclass(frozen=True)
class FsdpPolicy:
    """When weights are gathered and freed, and where they rest.

    Args:
        reshard_after_forward: which units free their weights after forward and gather them again in
            backward. but_last: all but the last one, whose backward follows at once. always: all, and
            the root. never: none. A number N: as but_last, but to shards over groups of N ranks. auto:
            never if all units' weights take at most 64 MiB of a rank, in the dtype of compute; else, or
            with backward_prefetch, but_last.
        offload: weights, gradients and optimizer state rest in pinned host memory.
        forward_prefetch: so many units are gathered before the forward that precedes theirs; 0: none.
        backward_prefetch: likewise in backward; 0 is FSDP's own, one unit.
        forward_methods: methods of the model besides forward that may be called on sharded weights.
    """

    reshard_after_forward: Reshard = "auto"
    offload: bool = False
    forward_prefetch: int = 0
    backward_prefetch: int = 0
    forward_methods: tuple[str, ...] = ()

    @property
    def resharding(self) -> Reshard:
        """What is asked for: backward_prefetch asks for gathers in backward."""
        of_auto: Reshard = "but_last" if self.backward_prefetch else "auto"
        return of_auto if self.reshard_after_forward == "auto" else self.reshard_after_forward

    def problems(self, model: type[nn.Module], dp_shard: int, tp: int, device_type: str) -> list[str]:
        """Every rule that the policy breaks, for this class of model on this mesh."""
        found = [
            f"{name} {depth} is below 0"
            for name in ("forward_prefetch", "backward_prefetch")
            if (depth := getattr(self, name)) < 0
        ]
        found += self._problems_of_reshard(dp_shard, tp)
        if self.offload and device_type == "cpu":
            found.append("offload true: on a CPU the weights rest in host memory already: use offload false")
        known = _public_methods(model)
        found += [
            f"forward_methods: {model.__name__} has no public method {name!r} "
            f"(it has: {', '.join(known) or 'none besides forward'})"
            for name in self.forward_methods
            if name not in known
        ]
        return found

    def _problems_of_reshard(self, dp_shard: int, tp: int) -> list[str]:
        size = self.reshard_after_forward
        if size == "never" and self.backward_prefetch > 0:
            return [
                f"backward_prefetch {self.backward_prefetch}: with reshard_after_forward never, backward "
                f"gathers nothing: use backward_prefetch 0"
            ]
        if isinstance(size, str):
            known = ("auto", "but_last", "always", "never")
            return [] if size in known else [f"reshard_after_forward {size!r} is unknown"]
        if tp > 1:
            return [
                f"reshard_after_forward {size}: torch's FSDP cannot reshard tensor-parallel weights to a "
                f"smaller group: with tp {tp} use auto, but_last, always or never"
            ]
        fits = [str(n) for n in range(2, dp_shard) if dp_shard % n == 0]
        if str(size) in fits:
            return []
        return [
            f"reshard_after_forward {size} is no group within dp_shard {dp_shard}: "
            f"use {', '.join(['auto, but_last, always, never', *fits])}"
        ]


def _public_methods(model: type[nn.Module]) -> list[str]:
    """Those that the class adds to nn.Module's."""
    added = (name for name in dir(model) if not name.startswith("_") and not hasattr(nn.Module, name))
    return [name for name in added if inspect.isroutine(getattr(model, name))]


def apply_fsdp(
    model: nn.Module,
    mesh: DeviceMesh,
    units: Sequence[nn.Module],
    precision: Precision,
    policy: FsdpPolicy,
) -> None:
    """Shard every parameter over dp_shard (dim 0), in place; replicate over dp_replicate (HSDP).

    Each unit, then the root with what the units leave, is one all-gather in forward and one
    reduce-scatter (and with replicas one all-reduce) in backward; a group without trained parameters
    reduces nothing. The dtypes hold on every mesh, dp 1 included. Gradients are means over dp.

    https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
    """
    replicas = mesh["dp_replicate"].size()
    dp_mesh = mesh["dp_shard"] if replicas == 1 else mesh["dp_replicate", "dp_shard"]
    of_root = MixedPrecisionPolicy(
        param_dtype=None if precision.compute == precision.param else precision.compute,
        reduce_dtype=precision.reduce,
        output_dtype=precision.output,
        cast_forward_inputs=precision.cast_inputs,
    )
    # Only the root casts: what passes between units has the compute dtype already, and what a model
    # keeps in float32 on purpose (rotary tables) must arrive as it is.
    of_unit = dataclasses.replace(of_root, cast_forward_inputs=False, output_dtype=None)
    rest: dict[str, Any] = {
        "mesh": dp_mesh,
        "offload_policy": CPUOffloadPolicy() if policy.offload else OffloadPolicy(),
    }
    blocks = weights_of(model, units)[:-1]
    whole = gathered_bytes(blocks, mesh["tp"].size(), precision.compute.itemsize)
    choice = resharding(policy.resharding, whole)
    shards = [
        fully_shard(unit, mp_policy=of_unit, reshard_after_forward=reshards, **rest)
        for unit, reshards in zip(units, _reshards(choice, len(units)), strict=True)
    ]
    root = fully_shard(model, mp_policy=of_root, reshard_after_forward=choice == "always", **rest)
    if dp_mesh.device_type == "cpu" and is_gloo(mesh["dp_shard"].get_group()):
        for module in (root, *shards):
            module.set_custom_all_gather(AllGatherOnCpu())
            module.set_custom_reduce_scatter(ReduceScatterOnCpu())
    _set_prefetch(root, shards, policy)
    for name in dict.fromkeys(policy.forward_methods):
        register_fsdp_forward_method(model, name)
    if not all(parameter.requires_grad for parameter in model.parameters()):
        _gather_in_backward_where_there_is_one(model, shards)


def weights_of(model: nn.Module, units: Sequence[nn.Module]) -> list[list[Weight]]:
    """What each unit gathers at once, and last the root, as data."""
    in_units = {p for unit in units for p in unit.parameters()}
    root = [p for p in model.parameters() if p not in in_units]
    return [[_weight(p) for p in group] for group in (*(unit.parameters() for unit in units), root)]


def _weight(parameter: Tensor) -> Weight:
    """With tp 1 there may be no tp axis in its mesh."""
    tp_dim = None
    if isinstance(parameter, DTensor):
        placements = zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=True)
        tp_dim = next((p.dim for axis, p in placements if axis == "tp" and isinstance(p, Shard)), None)
    return Weight(tuple(parameter.shape), tp_dim, parameter.requires_grad)


def _reshards(choice: str | int, units: int) -> list[bool | int]:
    """What fully_shard is told for each unit."""
    of_most = choice != "never" if isinstance(choice, str) else choice
    return [of_most] * (units - 1) + [choice == "always"] * min(units, 1)


def _set_prefetch(root: FSDPModule, units: list[FSDPModule], policy: FsdpPolicy) -> None:
    """The root runs first in both directions, so that it fetches the first units of each."""
    if policy.forward_prefetch:
        for module, ahead in _ahead([root, *units], policy.forward_prefetch):
            module.set_modules_to_forward_prefetch(ahead)
    if policy.backward_prefetch:
        for module, ahead in _ahead([root, *reversed(units)], policy.backward_prefetch):
            module.set_modules_to_backward_prefetch(ahead)


def _ahead(order: list[FSDPModule], depth: int) -> Iterator[tuple[FSDPModule, list[FSDPModule]]]:
    for index, module in enumerate(order):
        yield module, order[index + 1 : index + 1 + depth]


def _gather_in_backward_where_there_is_one(model: nn.Module, units: Sequence[FSDPModule]) -> None:
    """For models with frozen parameters: a unit none of whose outputs needs a gradient has no backward,
    and FSDP's prefetch would gather it in vain."""

    def begin(*_: Any) -> None:
        for unit in units:
            unit.set_unshard_in_backward(False)

    def note(unit: nn.Module, _: Any, output: Any) -> None:
        tensors = [t for t in torch.utils._pytree.tree_leaves(output) if isinstance(t, Tensor)]
        if isinstance(unit, FSDPModule) and any(t.requires_grad for t in tensors):
            unit.set_unshard_in_backward(True)

    model.register_forward_pre_hook(begin)
    for unit in units:
        if isinstance(unit, nn.Module):
            unit.register_forward_hook(note)


def set_gradient_sync(model: nn.Module, mode: GradientSync, *, is_last: bool) -> None:
    """What the next backward sends, in a step of several micro-batches. Call it before each forward.

    After the last micro-batch gradients are reduced in full, whatever the mode; until then

    - every: likewise, so that only shards of gradients are kept;
    - last: not at all; each rank keeps its whole gradients, in the reduction's dtype;
    - replicas_last: over dp_shard but not over dp_replicate; one more shard of gradients is kept.
      Without replicas it is the same as `every`.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last or mode != "last")
        model.set_requires_all_reduce(is_last or mode == "every")


def reshard(model: nn.Module) -> None:
    """Free gathered weights, so that the model's parameters are its shards. No communication.

    Backward does this by itself; after a forward alone the last unit and the root are still whole.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def class_of(model: nn.Module) -> type[nn.Module]:
    """The model's own class; `fully_shard` puts a subclass in its place."""
    return next(c for c in type(model).__mro__ if issubclass(c, nn.Module) and not issubclass(c, FSDPModule))


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
