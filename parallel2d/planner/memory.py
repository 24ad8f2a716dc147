"""Peak memory of one rank, by formula: what stays, what a phase of the step adds, what the allocator keeps.

Symbols as in model.py; b·s tokens of a micro-batch are `T`, D the ranks of dp_shard, c the bytes of a
number in compute, r in the reduction, p at rest; N_l weights of a block, N_0 those of the root.
"""

import functools
import math
from dataclasses import dataclass

from parallel2d.mesh_shape import MeshShape, share_of
from parallel2d.planner.model import ModelShape
from parallel2d.planner.setup import OURS, Program, Setup
from parallel2d.traffic import Weight

# What CUDA's caching allocator holds beyond what is allocated, as a part of everything that comes and goes
# within a step; and gradients find no room among freed activations. One number for all programs and GPUs,
# fitted on published peaks (docs/planner.md).
FRAGMENTATION = 0.16
# A run whose predicted reserved memory is within this part of what the GPU has is borderline.
MARGIN = 0.10

PARTS = ("parameters", "gradients", "optimizer", "activations", "logits", "gathered", "other")


@dataclass(frozen=True)
class Line:
    """One term of a phase: which part of the table it belongs to, how large it is, and why."""

    part: str
    bytes: int
    formula: str


@dataclass(frozen=True)
class Phase:
    """A moment of the step that may be the peak."""

    name: str
    lines: tuple[Line, ...]

    @property
    def total(self) -> int:
        return sum(line.bytes for line in self.lines)

    @property
    def transient(self) -> int:
        """Without what stays from step to step."""
        stays = ("parameters", "gradients", "optimizer")
        return sum(line.bytes for line in self.lines if line.part not in stays)

    def by_part(self) -> dict[str, int]:
        return {part: sum(line.bytes for line in self.lines if line.part == part) for part in PARTS}


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank. `allocated`: by tensors, at the worst moment; `reserved`: held by the allocator."""

    phases: tuple[Phase, ...]
    parameters: int
    gradients: int
    optimizer: int

    @property
    def peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def allocated(self) -> int:
        return self.peak.total

    @property
    def stays(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    @property
    def transient(self) -> int:
        """The most that comes and goes within a step."""
        return max(phase.transient for phase in self.phases)

    @property
    def reserved(self) -> int:
        return self.stays + round((1 + FRAGMENTATION) * self.transient)

    def verdict(self, memory_bytes: float) -> str:
        return verdict(self.reserved, memory_bytes)


def verdict(reserved: float, memory_bytes: float) -> str:
    """fit, borderline or no, for a GPU with so much."""
    if reserved * (1 + MARGIN) <= memory_bytes:
        return "fit"
    return "no" if reserved * (1 - MARGIN) > memory_bytes else "borderline"


def states(
    shape: ModelShape, mesh: MeshShape, param_bytes: int, *, shard_index: int = 0, tp_index: int = 0
) -> tuple[int, int, int]:
    """Bytes of parameters, gradients and AdamW's state on one rank; rank 0 has the largest shards.

    AdamW: two moments, and a float32 step count for each parameter.
    """
    block, root = shape.block(mesh.tp), shape.root(mesh.tp)
    of_block, of_root = (
        sum(_shard(w, mesh, shard_index, tp_index) for w in group) for group in (block, root)
    )
    held = (shape.num_layers * of_block + of_root) * param_bytes
    return held, held, 2 * held + 4 * (shape.num_layers * len(block) + len(root))


def _shard(weight: Weight, mesh: MeshShape, shard_index: int, tp_index: int) -> int:
    """Elements: tp takes its share first, dp_shard splits dim 0 of that."""
    rows, *rest = weight.tp_share(mesh.tp, tp_index)
    start, stop = share_of(rows, mesh.dp_shard, shard_index)
    return (stop - start) * math.prod(rest)


def memory(shape: ModelShape, mesh: MeshShape, setup: Setup, program: Program = OURS) -> Memory:
    """Of rank 0, in training with AdamW."""
    parameters, gradients, optimizer = states(shape, mesh, setup.formats.param.itemsize)
    terms = _Terms(shape, mesh, setup, program, parameters, gradients, optimizer)
    phases = (terms.loss(), terms.last_block(), terms.first_block(), terms.root(), terms.update())
    return Memory(phases, parameters, gradients, optimizer)


@dataclass(frozen=True)
class _Terms:
    shape: ModelShape
    mesh: MeshShape
    setup: Setup
    program: Program
    parameters: int
    gradients: int
    optimizer: int

    @functools.cached_property
    def block(self) -> int:
        """Elements of a block's tp share, padded as FSDP gathers them."""
        return self._padded(self.shape.block(self.mesh.tp))

    @functools.cached_property
    def root_elements(self) -> int:
        return self._padded(self.shape.root(self.mesh.tp))

    def _padded(self, weights: list[Weight]) -> int:
        return sum(w.padded(self.mesh.dp_shard, self.mesh.tp) for w in weights)

    def loss(self) -> Phase:
        """Backward of the loss: all activations are kept, and nothing is freed yet."""
        return self._phase("loss", self.shape.num_layers, 0.0, [self._logits()], blocks=1)

    def last_block(self) -> Phase:
        """Backward of the last block, while the one before it is gathered; the head has its gradient."""
        c, d, t = self.setup.formats.compute.itemsize, self.shape.width, self.mesh.tp
        head = c * d * share_of(self.shape.vocab_size, t, 0)[1]
        lines = [Line("other", head, "c·d·v/t: the head's gradient, whole until the root is reduced")]
        lines += self._working()
        return self._phase("backward of the last block", self.shape.num_layers - 1, 0.0, lines, blocks=2)

    def first_block(self) -> Phase:
        """Backward of the first block: all others have their gradients, reduced; one is being reduced."""
        c, d, t = self.setup.formats.compute.itemsize, self.shape.width, self.mesh.tp
        head = c * d * share_of(self.shape.vocab_size, t, 0)[1]
        reducing = self.block * self.setup.formats.reduce.itemsize
        lines = [Line("other", head, "c·d·v/t: the head's gradient")]
        if self.shape.num_layers > 1:
            lines.append(Line("other", reducing, "r·N_l/t: the block above is being reduced"))
        lines += self._working()
        share = 1 - self.block / (self.block * self.shape.num_layers + self.root_elements)
        return self._phase("backward of the first block", 0, share, lines, blocks=1)

    def root(self) -> Phase:
        """The reduction of the root's gradients, which ends backward."""
        elements = self.root_elements
        lines = [
            Line("other", elements * self.setup.formats.compute.itemsize, "c·N_0/t: the root's gradients"),
            Line("other", elements * self.setup.formats.reduce.itemsize, "r·N_0/t: what is reduced of them"),
        ]
        return Phase("reduction of the root", (*self._states(1.0), *lines))

    def update(self) -> Phase:
        """AdamW is fused: it needs no memory of its own."""
        return Phase("update", self._states(1.0))

    def _states(self, gradients: float) -> tuple[Line, ...]:
        if self.setup.accumulation > 1:
            gradients = 1.0
        return (
            Line("parameters", self.parameters, "p·N/(D·t)"),
            Line("optimizer", self.optimizer, "2p·N/(D·t): two moments, and a step count per weight"),
            Line("gradients", round(self.gradients * gradients), "p·N/(D·t), of what has been reduced"),
        )

    def _phase(self, name: str, kept: int, gradients: float, more: list[Line], *, blocks: int) -> Phase:
        per_layer, formula = self._kept()
        lines = [
            Line("activations", kept * per_layer, f"{kept} blocks × T·({formula})"),
            *self._head_input(name == "loss"),
            *self._gathered(blocks),
            *more,
        ]
        return Phase(name, (*self._states(gradients), *lines))

    def _logits(self) -> Line:
        c, t = self.setup.formats.compute.itemsize, self.mesh.tp
        per_logit = self.program.logit_bytes if t == 1 else self.program.logit_bytes_tp
        # In float32 the logits are their own copy, and their gradient is one tensor.
        per_logit = per_logit if c == 2 else 2 * max(c, 4)
        columns = share_of(self.shape.vocab_size, t, 0)[1]
        return Line("logits", self.setup.tokens * per_logit * columns, f"{per_logit}·T·v/t")

    def _head_input(self, is_loss: bool) -> list[Line]:
        if not is_loss:
            return []
        c, d, t = self.setup.formats.compute.itemsize, self.shape.width, self.mesh.tp
        tables = 8 * self.setup.seq_len * self.shape.head_dim
        mask = self.setup.seq_len**2 if 0 < self.shape.sliding_window < self.setup.seq_len else 0
        return [
            Line("activations", self.setup.tokens * c * (d + d // t), "c·T·(d + d/t): of norm and head"),
            Line("other", tables + mask, "8·s·h: rotary tables; s² with a sliding window"),
        ]

    def _gathered(self, blocks: int) -> list[Line]:
        c, reshard, layers = self.setup.formats.compute.itemsize, self.setup.reshard, self.shape.num_layers
        if reshard == "never":
            return [Line("gathered", c * (self.block * layers + self.root_elements), "c·N/t: never freed")]
        held = min(blocks, layers) * self.block
        text = f"c·({blocks}·N_l + N_0)/t: blocks at work, and the root"
        if reshard == "always" and blocks == 1:
            return [Line("gathered", 0, "0: freed after forward")]
        return [Line("gathered", c * (held + self.root_elements), text)]

    def _kept(self) -> tuple[int, str]:
        """Bytes that a block keeps from forward to backward, and their formula per token."""
        c, d, t, T = self.setup.formats.compute.itemsize, self.shape.width, self.mesh.tp, self.setup.tokens
        q, f, k = self.shape.query_width // t, self.shape.ffn_width // t, self.shape.key_width_of(t)
        heads = 4 * self.shape.num_heads // t
        gates = 2 if self.shape.gated else 1
        checkpoint = self.setup.checkpoint
        if checkpoint == "full":
            return T * c * d // t, "c·d/t: its input"
        if checkpoint == "selective" and self.program.keeps_all_products:
            kept = c * (d // t + 2 * q + 2 * k + 2 * d + gates * f) + heads
            return T * kept, "c·(d/t + 2q/t + 2k/t + 2d + 2f/t) + 4·heads/t: its input, products, attention"
        if checkpoint == "selective":
            # Every second product; of what tp scatters both the whole and the share. A compiled block
            # computes one sum more again.
            kept = c * (d // t + 2 * q + k + f + d) + heads + (2 * c * d // t if t > 1 else 0)
            kept -= c * d if self.setup.compile else 0
            return T * kept, "c·(d/t + 2q/t + k/t + f/t + d) + 4·heads/t: its input, every second product"
        return (
            T * self._all(),
            "c·(2d + 2d/t + 2q/t + 2k/t + 4f/t) + 4·heads/t + 8/t: what backward needs",
        )

    def _all(self) -> int:
        """Bytes per token that a block's backward needs."""
        c, d, t = self.setup.formats.compute.itemsize, self.shape.width, self.mesh.tp
        q, f, k = self.shape.query_width // t, self.shape.ffn_width // t, self.shape.key_width_of(t)
        normed = q + k if self.shape.qk_norm else 0
        numbers = 2 * d + 2 * d // t + 2 * q + 2 * k + (4 if self.shape.gated else 2) * f + normed
        return c * numbers + 4 * self.shape.num_heads // t + 8 // t

    def _working(self) -> list[Line]:
        """What one block's backward holds: what it needs, computed again or kept, and its gradients."""
        c, d, t, T = self.setup.formats.compute.itemsize, self.shape.width, self.mesh.tp, self.setup.tokens
        needed = T * self._all()
        f = self.shape.ffn_width // t
        flowing = T * c * (d + d // t + 2 * f)
        return [
            Line("activations", needed, "T·(what one block's backward needs)"),
            Line("activations", flowing, "c·T·(d + d/t + 2f/t): gradients on their way"),
            Line("other", c * self.block, "c·N_l/t: gradients of its weights"),
        ]
