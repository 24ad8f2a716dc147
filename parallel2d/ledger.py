"""Collectives of one training step: observed, and expected of a model by the formula of traffic.py."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode

from parallel2d.fsdp import weights_of
from parallel2d.mesh import AXES, MeshShape
from parallel2d.shared_memory import is_gloo
from parallel2d.traffic import WORLD, Ledger, Reach, Step, Traffic, expected_traffic

__all__ = ["Ledger", "Observer", "Step", "Traffic", "expected_step", "table"]

_KINDS = {
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",  # the compiler's, where the input is not needed any more
    "alltoall_base_": "all_to_all",
    "all_gather_": "all_gather",  # these, and all_reduce_, are shared_memory.py's as well
    "reduce_scatter_": "reduce_scatter",
    "fused_all_gather_matmul": "all_gather",  # asynchronous tensor parallelism
    "fused_matmul_reduce_scatter": "reduce_scatter",
}


class Observer(TorchDispatchMode):
    """Counts the collectives that this rank issues while it is active: forward, backward, compiled graphs."""

    # Attention inside a compiled graph is one, where its random state is kept for a second run.
    supports_higher_order_operators = True

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self._axes: dict[str, str] = {mesh[axis].get_group().group_name: axis for axis in AXES}
        self._seen: dict[tuple[str, str], Traffic] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """torch.compile refuses to work under a mode that does not say this; what its graphs send is seen."""
        return True

    @property
    def ledger(self) -> Ledger:
        return dict(self._seen)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # torch's signature
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional", "parallel2d", "symm_mem"):
            kind = _KINDS.get(func._opname)
            if kind is not None:
                group = _group_name(args)
                # What a reduce-scatter is on gloo, see `collectives.reduce_scatter`.
                if kind == "all_to_all" and is_gloo(_resolve_process_group(group)):
                    kind = "reduce_scatter"
                entry = (self._axis(group), kind)
                if func.namespace == "symm_mem":  # the whole is nowhere to be seen
                    size = _bytes(args[:1] if kind == "all_gather" else result)
                    size *= _resolve_process_group(group).size()
                else:
                    size = max(_bytes(args), _bytes(result))
                self._seen[entry] = self._seen.get(entry, Traffic()) + Traffic(1, size)
        return result

    def _axis(self, group_name: str) -> str:
        """Its name; that of a part of dp_shard, to which weights can be resharded, has its size added."""
        if group_name in self._axes:
            return self._axes[group_name]
        size = _resolve_process_group(GroupName(group_name)).size()
        return WORLD if size == dist.get_world_size() else f"dp_shard/{size}"


def _group_name(args: Sequence[Any]) -> str:
    """Functional ops name their group last; c10d's have a boxed one among their arguments."""
    if isinstance(args[-1], str):
        return args[-1]
    for argument in args:
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return dist.ProcessGroup.unbox(argument).group_name
    raise ValueError("a collective without a process group")


def _bytes(values: Any) -> int:
    tensors = [t for t in torch.utils._pytree.tree_leaves(values) if isinstance(t, Tensor)]
    return max((t.numel() * t.element_size() for t in tensors), default=0)


def expected_step(model: nn.Module, units: Sequence[nn.Module], mesh: DeviceMesh, step: Step) -> Ledger:
    """`expected_traffic` of a parallelized model whose blocks are `units`, for this rank."""
    shape = MeshShape(*(mesh[axis].size() for axis in AXES))
    return expected_traffic(
        weights_of(model, units),
        shape,
        step,
        _backward_reach(model, units),
        tp_index=mesh["tp"].get_local_rank(),
    )


def _backward_reach(model: nn.Module, units: Sequence[nn.Module]) -> Reach:
    """From the order of parameters, which is that of running: a half of a block begins with its norm.

    Norms are the only children of a block that own parameters; attention's and feed-forward's lie deeper.
    """
    parameters = list(model.parameters())
    in_units = {p for unit in units for p in unit.parameters()}
    first = next(i for i, p in enumerate(parameters) if p.requires_grad)
    of_norms = [next(child.parameters(recurse=False), None) for unit in units for child in unit.children()]
    norms = [i for i, p in enumerate(parameters) if any(p is norm for norm in of_norms)]
    if first < norms[0]:
        return Reach(len(units), len(norms), len(norms), embedding=True, head=True)
    last_of_units = max(i for i, p in enumerate(parameters) if p in in_units)
    whole = sum(norm >= first for norm in norms)
    halves = whole + (first not in norms and first <= last_of_units)
    head_alone = first > last_of_units and parameters[first].ndim > 1
    return Reach(-(-halves // 2), halves, whole, embedding=False, head=not head_alone)


def table(expected: Ledger, observed: Ledger) -> str:
    """Both, side by side, one line per axis and kind."""
    sizes = [f"{traffic.bytes:,}" for traffic in (*expected.values(), *observed.values())]
    width = max([15, *(len(size) + 2 for size in sizes)])  # one process sends nothing
    lines = [f"{'axis':14}{'collective':16}{'count':>7}{'bytes':>{width}}{'observed':>10}{'bytes':>{width}}"]
    for key in sorted(expected.keys() | observed.keys()):
        ours, theirs = expected.get(key, Traffic()), observed.get(key, Traffic())
        mark = "" if ours == theirs else "   differs"
        axis, kind = key
        lines.append(
            f"{axis:14}{kind:16}{ours.count:7}{ours.bytes:{width},}{theirs.count:10}{theirs.bytes:{width},}{mark}"
        )
    return "\n".join(lines)
