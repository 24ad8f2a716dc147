"""A dispatch mode above fake tensors: what real code would compute and allocate, from shapes alone."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from parallel2d.planner.memory_log import MemoryLog
from parallel2d.planner.moments import GATHERED

_aten = torch.ops.aten

# torch's table lacks attention's ops for CPUs, whose arguments begin as those of the GPU's do.
_FLOPS: Mapping[Any, Any] = {
    **flop_registry,
    _aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[
        _aten._scaled_dot_product_flash_attention
    ],
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        _aten._scaled_dot_product_flash_attention_backward
    ],
}


class Tracer(TorchDispatchMode):
    """Counts floating-point operations and logs memory, of what passes it on its way to a FakeTensorMode.

    Whatever the host reads of a fake tensor is one: a finite loss, a finite norm, a token.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.memory = MemoryLog()
        self.pauses = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # torch's signature
        if any(map(is_traceable_wrapper_subclass_type, types)):
            # A DTensor's turn first: what it does to this rank's share comes by here again.
            return NotImplemented
        if func is _aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return 1.0 if args[0].is_floating_point() else 1
        if func is torch.ops._c10d_functional.wait_tensor.default:
            # It returns what it is given; a fake one would be a second tensor.
            return args[0]
        result = func(*args, **(kwargs or {}))
        if not self.pauses:
            self._log(func, args, kwargs or {}, result)
        return result

    def _log(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if func._overloadpacket in _FLOPS:
            self.flops += _FLOPS[func._overloadpacket](*args, **kwargs, out_val=result)
        for tensor in _fakes(result):
            self.memory.block(tensor)
        # FSDP's shards to gather, gathered weights and whole gradients: all pass through ops of its own.
        if func.namespace == "fsdp":
            for tensor in _fakes((args, kwargs, result)):
                block = self.memory.block(tensor)
                block.part = GATHERED
                if func._opname == "all_gather_copy_in":
                    block.stream = "all_gather"
        elif func._opname == "_reduce_scatter_base_" and self.memory.block(args[1]).part == GATHERED:
            # FSDP's own, of gradients that it has put together; tp's is of activations.
            block = self.memory.block(args[0])
            block.part, block.stream = GATHERED, "reduce_scatter"


def _fakes(values: Any) -> Iterator[Tensor]:
    return (value for value in tree_leaves(values) if isinstance(value, FakeTensor))


class _Pause:
    """While DTensor finds out the shape of a result it computes on whole shapes, which no rank ever holds."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def __enter__(self) -> None:
        self._tracer.pauses += 1

    def __exit__(self, *_: object) -> None:
        self._tracer.pauses -= 1


@contextmanager
def tracing() -> Iterator[Tracer]:
    """What is computed and allocated inside is fake, and traced."""
    tracer, resize, lock = Tracer(), torch.UntypedStorage.resize_, ShardingPropagator._fake_mode_lock

    def logged_resize(storage: Any, size: int) -> Any:
        resized = resize(storage, size)
        # Only FSDP gives and takes the memory of a living tensor: that of gathered weights.
        tracer.memory.resized(storage).part = GATHERED
        return resized

    # No op passes a mode when a storage is resized, and DTensor's own lock stands where the pause must.
    torch.UntypedStorage.resize_ = logged_resize  # type: ignore[method-assign, assignment]  # restored below
    ShardingPropagator._fake_mode_lock = _Pause(tracer)  # type: ignore[assignment]  # any context does
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), tracer:
            yield tracer
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]  # as it was
        ShardingPropagator._fake_mode_lock = lock
