"""Collectives of one training step: expected by formula, and observed.

Bytes are those of the whole tensor: what a gather returns, what a reduction is given. On a ring a
rank sends (n-1)/n of it for a gather or a reduce-scatter, and twice that for an all-reduce.
"""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode

from parallel2d.collectives import is_gloo
from parallel2d.fsdp import GradientSync, Reshard
from parallel2d.mesh import AXES
from parallel2d.shards import tp_shape

WORLD = "world"


@dataclass(frozen=True)
class Traffic:
    """How often, and how many bytes in all."""

    count: int = 0
    bytes: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.count + other.count, self.bytes + other.bytes)


# (axis, kind) -> Traffic; kinds: all_gather, reduce_scatter, all_reduce
Ledger = Mapping[tuple[str, str], Traffic]

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
        if func.namespace in ("c10d", "_c10d_functional"):
            kind = _KINDS.get(func._opname)
            if kind is not None:
                group = _group_name(args)
                # What a reduce-scatter is on gloo, see `collectives.reduce_scatter`.
                if kind == "all_to_all" and is_gloo(_resolve_process_group(group)):
                    kind = "reduce_scatter"
                entry = (self._axis(group), kind)
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


@dataclass(frozen=True)
class Step:
    """What decides a step's traffic, besides the model and the mesh.

    Args:
        micro_batch: sequences per forward on one rank.
        seq_len: tokens per sequence.
        width: of the residual stream.
        accumulation: forwards per step.
        compute: dtype of forward and backward, in which weights are gathered.
        reduce: dtype in which gradients are reduced over dp.
        activation_checkpoint: as given to `parallelize`.
        reshard_after_forward: as in `FsdpPolicy`.
        gradient_sync: as given to `train_step`.
        output: dtype of the logits; None for that of compute.
        compile: likewise.
    """

    micro_batch: int
    seq_len: int
    width: int
    accumulation: int
    compute: torch.dtype
    reduce: torch.dtype
    activation_checkpoint: str
    _: KW_ONLY
    reshard_after_forward: Reshard = "auto"
    gradient_sync: GradientSync = "every"
    output: torch.dtype | None = None
    compile: bool = False


def expected_step(model: nn.Module, units: Sequence[nn.Module], mesh: DeviceMesh, step: Step) -> Ledger:
    """The collectives of one `train_step` of a sequence-parallel transformer with L = len(units) blocks.

    For a parallelized model with attention and feed-forward in each block, as `Llama.tp_plan()` splits
    it: over tp every gather and scatter moves the residual stream, (b, s, d). Per forward and backward:

    - dp_shard: L+1 gathers of weights in forward, and in backward one for each group that was freed:
      L-1 (auto), L+1 (always) or none (never); with a number N, L-1 over dp_shard/N;
    - dp_shard: L+1 reduce-scatters of gradients; dp_replicate: L+1 all-reduces of the shards' gradients;
    - tp: 4L+2 gathers and as many scatters, 1 gather for the loss, L+1 all-reduces, each for all that a
      unit or the root has of weights that are whole over tp (norms, biases added after a sum, key/value
      heads fewer than tp); with activation checkpointing 2L gathers and L scatters more, for what is
      computed again (a compiled block with full checkpointing is computed again as a whole, its last
      scatter included: 2L scatters).

    With gradient_sync `last` the reductions over dp are once per step, with `replicas_last` those over
    dp_replicate. What is frozen is not reduced, and backward ends at the first trained parameter. Per
    step: over the world an all-reduce of three numbers. An axis of size 1 sends nothing.
    """
    reach = _backward_reach(model, units)
    ledger = _gathers(model, units, mesh, step, reach) | _reductions(model, units, mesh, step)
    ledger |= _activations(len(units), mesh, step, reach)
    sizes = {axis: mesh[axis].size() for axis in AXES} | {WORLD: mesh.size()}
    # An axis as large as the world has the world's own group.
    world = next((axis for axis in AXES if sizes[axis] == sizes[WORLD]), WORLD)
    # Token count, loss and squared gradient norm, in float64.
    ledger[world, "all_reduce"] = ledger.get((world, "all_reduce"), Traffic()) + Traffic(1, 24)
    # A part of an axis is named axis/size.
    sent = {key: traffic for key, traffic in ledger.items() if sizes[key[0].split("/")[0]] > 1}
    return {key: traffic for key, traffic in sent.items() if traffic.count}


@dataclass(frozen=True)
class _Reach:
    """How far down backward goes. Where nothing is frozen: through everything."""

    blocks: int  # the last so many have a backward
    halves: int  # of blocks: attention or feed-forward, each with its norm
    norms: int  # of these halves, those whose norm has a backward, too
    embedding: bool
    head: bool  # gradients pass the head


def _backward_reach(model: nn.Module, units: Sequence[nn.Module]) -> _Reach:
    """From the order of parameters, which is that of running: a half of a block begins with its norm.

    Norms are the only children of a block that own parameters; attention's and feed-forward's lie deeper.
    """
    parameters = list(model.parameters())
    in_units = {p for unit in units for p in unit.parameters()}
    first = next(i for i, p in enumerate(parameters) if p.requires_grad)
    of_norms = [next(child.parameters(recurse=False), None) for unit in units for child in unit.children()]
    norms = [i for i, p in enumerate(parameters) if any(p is norm for norm in of_norms)]
    if first < norms[0]:
        return _Reach(len(units), len(norms), len(norms), embedding=True, head=True)
    last_of_units = max(i for i, p in enumerate(parameters) if p in in_units)
    whole = sum(norm >= first for norm in norms)
    halves = whole + (first not in norms and first <= last_of_units)
    head_alone = first > last_of_units and parameters[first].ndim > 1
    return _Reach(-(-halves // 2), halves, whole, embedding=False, head=not head_alone)


_Entries = dict[tuple[str, str], Traffic]


def _groups(model: nn.Module, units: Sequence[nn.Module]) -> list[list[nn.Parameter]]:
    """What each unit gathers at once, and last the root."""
    in_units = {p for unit in units for p in unit.parameters()}
    root = [p for p in model.parameters() if p not in in_units]
    return [list(unit.parameters()) for unit in units] + [root]


def _gathers(
    model: nn.Module, units: Sequence[nn.Module], mesh: DeviceMesh, step: Step, reach: _Reach
) -> _Entries:
    shards, size = mesh["dp_shard"].size(), step.compute.itemsize * step.accumulation
    sizes = [sum(_padded(tp_shape(p), shards) for p in group) * size for group in _groups(model, units)]
    freed = {"never": slice(0, 0), "always": slice(-reach.blocks - 1, None)}
    again = sizes[freed.get(str(step.reshard_after_forward), slice(len(units) - reach.blocks, -2))]
    forward = Traffic(len(sizes) * step.accumulation, sum(sizes))
    backward = Traffic(len(again) * step.accumulation, sum(again))
    if isinstance(step.reshard_after_forward, str):
        return {("dp_shard", "all_gather"): forward + backward}
    part = f"dp_shard/{step.reshard_after_forward}"
    return {("dp_shard", "all_gather"): forward, (part, "all_gather"): backward}


def _reductions(model: nn.Module, units: Sequence[nn.Module], mesh: DeviceMesh, step: Step) -> _Entries:
    shards = mesh["dp_shard"].size()
    trained = [[p for p in group if p.requires_grad] for group in _groups(model, units)]
    sizes = [sum(_padded(tp_shape(p), shards) for p in group) for group in trained if group]
    reduced = sum(sizes) * step.reduce.itemsize
    whole = [sum(p.numel() for p in group if tp_shape(p) == p.shape) for group in trained]
    whole_bytes = sum(whole) * step.compute.itemsize * step.accumulation
    shard_times = 1 if step.gradient_sync == "last" else step.accumulation
    replica_times = step.accumulation if step.gradient_sync == "every" else 1
    return {
        ("dp_shard", "reduce_scatter"): Traffic(len(sizes) * shard_times, reduced * shard_times),
        ("dp_replicate", "all_reduce"): Traffic(
            len(sizes) * replica_times, reduced // shards * replica_times
        ),
        ("tp", "all_reduce"): Traffic(sum(n > 0 for n in whole) * step.accumulation, whole_bytes),
    }


def _padded(shape: tuple[int, ...], shards: int) -> int:
    """Elements of a weight whose dim 0 FSDP pads to a multiple of the shards."""
    rows = -(-shape[0] // shards) * shards
    return rows * int(torch.Size(shape[1:]).numel())


def _activations(layers: int, mesh: DeviceMesh, step: Step, reach: _Reach) -> _Entries:
    tokens = step.micro_batch * step.seq_len * step.accumulation
    stream = tokens * step.width * step.compute.itemsize
    again = 0 if step.activation_checkpoint == "none" else reach.blocks
    # Forward: the norms' outputs and the head's input are gathered, what is added to the stream scattered.
    gathers = 2 * layers + 1 + 2 * again + reach.halves + reach.embedding
    last = again if step.compile and step.activation_checkpoint == "full" else 0
    scatters = 2 * layers + 1 + again + last + reach.norms + reach.head
    loss = 2 * tokens * mesh["tp"].size() * max(4, (step.output or step.compute).itemsize)
    times = step.accumulation
    return {
        ("tp", "all_gather"): Traffic((gathers + 1) * times, gathers * stream + loss),
        ("tp", "reduce_scatter"): Traffic(scatters * times, scatters * stream),
    }


def table(expected: Ledger, observed: Ledger) -> str:
    """Both, side by side, one line per axis and kind."""
    lines = [f"{'axis':14}{'collective':16}{'count':>7}{'bytes':>15}{'observed':>10}{'bytes':>15}"]
    for key in sorted(expected.keys() | observed.keys()):
        ours, theirs = expected.get(key, Traffic()), observed.get(key, Traffic())
        mark = "" if ours == theirs else "   differs"
        axis, kind = key
        lines.append(
            f"{axis:14}{kind:16}{ours.count:7}{ours.bytes:15,}{theirs.count:10}{theirs.bytes:15,}{mark}"
        )
    return "\n".join(lines)
