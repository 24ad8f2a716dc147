"""Collectives of one training step: expected by formula, and observed.

Bytes are those of the whole tensor: what a gather returns, what a reduction is given. On a ring a
rank sends (n-1)/n of it for a gather or a reduce-scatter, and twice that for an all-reduce.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

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
}


class Observer(TorchDispatchMode):
    """Counts the collectives that this rank issues while it is active: forward, backward, compiled graphs."""

    # Attention inside a compiled graph is one, where its random state is kept for a second run.
    supports_higher_order_operators = True

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self._axes = {mesh[axis].get_group().group_name: axis for axis in AXES}
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
                entry = (self._axes.get(_group_name(args), WORLD), kind)
                size = max(_bytes(args), _bytes(result))
                self._seen[entry] = self._seen.get(entry, Traffic()) + Traffic(1, size)
        return result


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
        compile: likewise.
    """

    micro_batch: int
    seq_len: int
    width: int
    accumulation: int
    compute: torch.dtype
    reduce: torch.dtype
    activation_checkpoint: str
    compile: bool = False


def expected_step(model: nn.Module, units: Sequence[nn.Module], mesh: DeviceMesh, step: Step) -> Ledger:
    """The collectives of one `train_step` of a sequence-parallel transformer with L = len(units) blocks.

    For a parallelized model with attention and feed-forward in each block, as `Llama.tp_plan()` splits
    it: over tp every gather and scatter moves the residual stream, (b, s, d). Per forward and backward:

    - dp_shard: 2L gathers of weights (L blocks and the root in forward; in backward all blocks but the
      last, which like the root was kept) and L+1 reduce-scatters of gradients;
    - dp_replicate: L+1 all-reduces of the shards' gradients;
    - tp: 4L+2 gathers and as many scatters, 1 gather for the loss, 1 all-reduce for each norm weight;
      with activation checkpointing 2L gathers and L scatters more, for what is computed again (a compiled
      block is computed again as a whole, its last scatter included: 2L scatters more).

    Per step: over each data axis an all-reduce for the token count and one for the loss, over the world
    one for the gradient norm. An axis of size 1 sends nothing.
    """
    once = _weights(model, units, mesh, step) | _activations(model, len(units), mesh, step)
    ledger = {k: Traffic(t.count * step.accumulation, t.bytes * step.accumulation) for k, t in once.items()}
    sizes = {axis: mesh[axis].size() for axis in AXES} | {WORLD: mesh.size()}
    # An axis as large as the world has the world's own group.
    world = next((axis for axis in AXES if sizes[axis] == sizes[WORLD]), WORLD)
    norm = Traffic(1, 4 if mesh.device_type == "cuda" else 8)
    for axis, more in (("dp_shard", Traffic(2, 16)), ("dp_replicate", Traffic(2, 16)), (world, norm)):
        ledger[axis, "all_reduce"] = ledger.get((axis, "all_reduce"), Traffic()) + more
    return {key: traffic for key, traffic in ledger.items() if sizes[key[0]] > 1}


def _weights(
    model: nn.Module, units: Sequence[nn.Module], mesh: DeviceMesh, step: Step
) -> dict[tuple[str, str], Traffic]:
    shards = mesh["dp_shard"].size()
    in_units = {p for unit in units for p in unit.parameters()}
    root = [p for p in model.parameters() if p not in in_units]
    groups = [list(unit.parameters()) for unit in units] + [root]
    sizes = [sum(_padded(tp_shape(p), shards) for p in group) for group in groups]
    # The last block and the root are gathered once, the others twice.
    gathered = 2 * sum(sizes[:-2]) + sizes[-2] + sizes[-1]
    reduced = sum(sizes) * step.reduce.itemsize
    return {
        ("dp_shard", "all_gather"): Traffic(2 * len(units), gathered * step.compute.itemsize),
        ("dp_shard", "reduce_scatter"): Traffic(len(groups), reduced),
        ("dp_replicate", "all_reduce"): Traffic(len(groups), reduced // shards),
    }


def _padded(shape: tuple[int, ...], shards: int) -> int:
    """Elements of a weight whose dim 0 FSDP pads to a multiple of the shards."""
    rows = -(-shape[0] // shards) * shards
    return rows * int(torch.Size(shape[1:]).numel())


def _activations(
    model: nn.Module, layers: int, mesh: DeviceMesh, step: Step
) -> dict[tuple[str, str], Traffic]:
    tokens = step.micro_batch * step.seq_len
    stream = tokens * step.width * step.compute.itemsize
    again = 0 if step.activation_checkpoint == "none" else layers
    whole = step.compile and step.activation_checkpoint == "full"
    gathers, scatters = 4 * layers + 2 + 2 * again, 4 * layers + 2 + (2 * again if whole else again)
    loss = 2 * tokens * mesh["tp"].size() * max(4, step.compute.itemsize)
    norms = [p for p in model.parameters() if p.ndim == 1]
    norm_bytes = sum(p.numel() for p in norms) * step.compute.itemsize
    return {
        ("tp", "all_gather"): Traffic(gathers + 1, gathers * stream + loss),
        ("tp", "reduce_scatter"): Traffic(scatters, scatters * stream),
        ("tp", "all_reduce"): Traffic(len(norms), norm_bytes),
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
