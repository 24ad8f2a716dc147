"""Collectives of one training step by formula, from shapes alone: no torch, no model, no process group.

Bytes are those of the whole tensor: what a gather returns, what a reduction is given. On a ring a
rank sends (n-1)/n of it for a gather or a reduce-scatter, and twice that for an all-reduce.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Protocol

from parallel2d.mesh_shape import AXES, MeshShape, share_of

WORLD = "world"
# Blocks that take no more than this, all together, are cheaper kept whole from forward to backward than
# gathered a second time (docs/speed.md).
WHOLE_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Traffic:
    """How often, and how many bytes in all."""

    count: int = 0
    bytes: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.count + other.count, self.bytes + other.bytes)


# (axis, kind) -> Traffic; kinds: all_gather, reduce_scatter, all_reduce
Ledger = Mapping[tuple[str, str], Traffic]
_Entries = dict[tuple[str, str], Traffic]


class Dtype(Protocol):
    """A torch.dtype, or what takes its place where there is no torch."""

    @property
    def itemsize(self) -> int: ...


@dataclass(frozen=True)
class Weight:
    """A parameter as data.

    Args:
        shape: of the whole parameter.
        tp_dim: the dim that tp splits; None if every tp rank holds all of it.
        trained: whether it has a gradient.
    """

    shape: tuple[int, ...]
    tp_dim: int | None = None
    trained: bool = True

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def tp_share(self, tp: int, index: int = 0) -> tuple[int, ...]:
        """Shape of one tp rank's share, before dp_shard splits it: what FSDP gathers."""
        sizes = list(self.shape)
        if self.tp_dim is not None:
            start, stop = share_of(sizes[self.tp_dim], tp, index)
            sizes[self.tp_dim] = stop - start
        return tuple(sizes)

    def padded(self, shards: int, tp: int, index: int = 0) -> int:
        """Elements of the share, whose dim 0 FSDP pads to a multiple of the shards."""
        rows, *rest = self.tp_share(tp, index)
        return -(-rows // shards) * shards * math.prod(rest)


# What each unit gathers at once, in the order of running, and last the root.
Groups = Sequence[Sequence[Weight]]


@dataclass(frozen=True)
class Reach:
    """How far down backward goes. Where nothing is frozen: through everything."""

    blocks: int  # the last so many have a backward
    halves: int  # of blocks: attention or feed-forward, each with its norm
    norms: int  # of these halves, those whose norm has a backward, too
    embedding: bool = True
    head: bool = True  # gradients pass the head

    @classmethod
    def whole(cls, layers: int) -> "Reach":
        return cls(layers, 2 * layers, 2 * layers)


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
        resharding: as `FsdpPolicy.resharding`.
        gradient_sync: as given to `train_step`.
        output: dtype of the logits; None for that of compute.
        compile: likewise.
    """

    micro_batch: int
    seq_len: int
    width: int
    accumulation: int
    compute: Dtype
    reduce: Dtype
    activation_checkpoint: str
    _: KW_ONLY
    resharding: str | int = "auto"
    gradient_sync: str = "every"
    output: Dtype | None = None
    compile: bool = False


def resharding(choice: str | int, gathered_bytes: int) -> str | int:
    """What reshard_after_forward `auto` stands for, by what all blocks take where they are whole: one tp
    rank's share of their weights, in the dtype of compute. Other choices are what they are."""
    if choice != "auto":
        return choice
    return "never" if gathered_bytes <= WHOLE_BYTES else "but_last"


def gathered_bytes(blocks: Groups, tp: int, itemsize: int) -> int:
    """Of all weights, whole over dp_shard: the largest tp rank's share, the same number on every rank."""
    return itemsize * sum(weight.padded(1, tp) for block in blocks for weight in block)


def expected_traffic(
    groups: Groups, mesh: MeshShape, step: Step, reach: Reach, *, tp_index: int = 0
) -> Ledger:
    """The collectives of one `train_step` of a sequence-parallel transformer with L blocks.

    For attention and feed-forward in each block, as `Llama.tp_plan()` splits it: over tp every gather and
    scatter moves the residual stream, (b, s, d). Per forward and backward:

    - dp_shard: L+1 gathers of weights in forward, and in backward one for each group that was freed:
      L-1 (but_last), L+1 (always) or none (never); with a number N, L-1 over dp_shard/N;
    - dp_shard: L+1 reduce-scatters of gradients; dp_replicate: L+1 all-reduces of the shards' gradients;
    - tp: 4L+2 gathers and as many scatters, 1 gather for the loss, L+1 all-reduces, each for all that a
      unit or the root has of weights that are whole over tp (norms, biases added after a sum, key/value
      heads fewer than tp); with activation checkpointing 2L gathers and L scatters more, for what is
      computed again (a compiled block with full checkpointing is computed again as a whole, its last
      scatter included: 2L scatters).

    With gradient_sync `last` the reductions over dp are once per step, with `replicas_last` those over
    dp_replicate. What is frozen is not reduced, and backward ends at the first trained parameter. Per
    step: over the world an all-reduce of three numbers. An axis of size 1 sends nothing.

    Args:
        groups: the weights of each block, and last those of the root.
        tp_index: the rank's place on tp, where tp does not divide the vocabulary.
    """
    ledger = _gathers(groups, mesh, step, reach, tp_index) | _reductions(groups, mesh, step, tp_index)
    ledger |= _activations(len(groups) - 1, mesh, step, reach)
    sizes = {axis: getattr(mesh, axis) for axis in AXES} | {WORLD: mesh.world}
    # An axis as large as the world has the world's own group.
    world = next((axis for axis in AXES if sizes[axis] == sizes[WORLD]), WORLD)
    # Token count, loss and squared gradient norm, in float64.
    ledger[world, "all_reduce"] = ledger.get((world, "all_reduce"), Traffic()) + Traffic(1, 24)
    # A part of an axis is named axis/size.
    sent = {key: traffic for key, traffic in ledger.items() if sizes[key[0].split("/")[0]] > 1}
    return {key: traffic for key, traffic in sent.items() if traffic.count}


def _gathers(groups: Groups, mesh: MeshShape, step: Step, reach: Reach, tp_index: int) -> _Entries:
    size, layers = step.compute.itemsize * step.accumulation, len(groups) - 1
    sizes = [sum(w.padded(mesh.dp_shard, mesh.tp, tp_index) for w in group) * size for group in groups]
    freed = {"never": slice(0, 0), "always": slice(-reach.blocks - 1, None)}
    choice = resharding(step.resharding, gathered_bytes(groups[:-1], mesh.tp, step.compute.itemsize))
    again = sizes[freed.get(str(choice), slice(layers - reach.blocks, -2))]
    forward = Traffic(len(sizes) * step.accumulation, sum(sizes))
    backward = Traffic(len(again) * step.accumulation, sum(again))
    if isinstance(choice, str):
        return {("dp_shard", "all_gather"): forward + backward}
    part = f"dp_shard/{choice}"
    return {("dp_shard", "all_gather"): forward, (part, "all_gather"): backward}


def _reductions(groups: Groups, mesh: MeshShape, step: Step, tp_index: int) -> _Entries:
    trained = [[w for w in group if w.trained] for group in groups]
    sizes = [sum(w.padded(mesh.dp_shard, mesh.tp, tp_index) for w in group) for group in trained if group]
    reduced = sum(sizes) * step.reduce.itemsize
    whole = [sum(w.numel for w in group if w.tp_dim is None) for group in trained]
    whole_bytes = sum(whole) * step.compute.itemsize * step.accumulation
    shard_times = 1 if step.gradient_sync == "last" else step.accumulation
    replica_times = step.accumulation if step.gradient_sync == "every" else 1
    return {
        ("dp_shard", "reduce_scatter"): Traffic(len(sizes) * shard_times, reduced * shard_times),
        ("dp_replicate", "all_reduce"): Traffic(
            len(sizes) * replica_times, reduced // mesh.dp_shard * replica_times
        ),
        ("tp", "all_reduce"): Traffic(sum(n > 0 for n in whole) * step.accumulation, whole_bytes),
    }


def _activations(layers: int, mesh: MeshShape, step: Step, reach: Reach) -> _Entries:
    tokens = step.micro_batch * step.seq_len * step.accumulation
    stream = tokens * step.width * step.compute.itemsize
    gathers, scatters = moves_of_stream(layers, step, reach)
    loss = 2 * tokens * mesh.tp * max(4, (step.output or step.compute).itemsize)
    times = step.accumulation
    return {
        ("tp", "all_gather"): Traffic((gathers + 1) * times, gathers * stream + loss),
        ("tp", "reduce_scatter"): Traffic(scatters * times, scatters * stream),
    }


def moves_of_stream(layers: int, step: Step, reach: Reach) -> tuple[int, int]:
    """How often tp gathers the residual stream, and scatters it, per forward and backward."""
    again = 0 if step.activation_checkpoint == "none" else reach.blocks
    # Forward: the norms' outputs and the head's input are gathered, what is added to the stream scattered.
    gathers = 2 * layers + 1 + 2 * again + reach.halves + reach.embedding
    last = again if step.compile and step.activation_checkpoint == "full" else 0
    scatters = 2 * layers + 1 + again + last + reach.norms + reach.head
    return gathers, scatters
