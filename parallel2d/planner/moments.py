"""The moments of a step that may be its peak of memory, each as a sum of terms with their formulas.

Symbols as in model.py; T the tokens of a micro-batch, D the ranks of dp_shard, c the bytes of a number in
compute, r in the reduction, p at rest; N_l weights of a block, N_0 those of the root.
"""

import functools
from dataclasses import dataclass

from parallel2d.mesh_shape import MeshShape, share_of
from parallel2d.planner.model import ModelShape
from parallel2d.planner.setup import Program, Setup
from parallel2d.traffic import Weight

GATHERED = "gathered parameters and reduce buffers"
PARTS = ("parameters", "gradients", "optimizer", "activations", "logits", GATHERED, "other")


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


def phases(
    shape: ModelShape, mesh: MeshShape, setup: Setup, program: Program, held: tuple[int, int, int]
) -> tuple[Phase, ...]:
    """In the order of running. held: bytes of parameters, gradients and optimizer state."""
    terms = _Terms(shape, mesh, setup, program, *held)
    L = shape.num_layers
    some = [n for n in sorted({L, L - 1, 2, 1}, reverse=True) if 1 <= n <= L]
    blocks = [phase for n in some for phase in (terms.block_backward(n), terms.block_done(n))]
    again = [terms.root_again()] * (terms.resharding == "always")
    last = (terms.root(), terms.root_reduced(), terms.update())
    return (terms.first_forward(), terms.loss(), *again, terms.head(), *blocks, *last)


@dataclass(frozen=True)
class _Terms:
    shape: ModelShape
    mesh: MeshShape
    setup: Setup
    program: Program
    parameters: int
    gradients: int
    optimizer: int

    def first_forward(self) -> Phase:
        """What is gathered is copied out of the buffer that it arrived in."""
        arrived = Line(GATHERED, 2 * self._c * (self._block + self._root), "2c·(N_0 + N_l)/t: and copied")
        return Phase("forward of the first block", (*self._states(0), arrived))

    def loss(self) -> Phase:
        """Its backward: all activations are kept."""
        T, t, c = self.setup.tokens, self.mesh.tp, self._c
        per_logit = self.program.logit_bytes if t == 1 else self.program.logit_bytes_tp
        lines = [Line("logits", T * per_logit * self._columns, f"{per_logit}·T·v/t")]
        if c != 2:
            # In float32 the logits need no copy, and their gradient is computed in its place.
            lines = [Line("logits", T * 2 * c * self._columns, "2c·T·v/t: logits and their gradient")]
        elif self.program.loss_chunk:
            rows = min(T, max(self.program.loss_chunk // self._columns, -(-T // 64)))
            lines.append(Line("logits", 4 * rows * self._columns, "a chunk of their gradient in float32"))
        if self.resharding != "always":
            lines.append(self._gathered(1))
        return Phase("loss", (*self._states(0), *self._kept_at_the_head(), *lines))

    def root_again(self) -> Phase:
        """The root, freed after forward, is gathered for its backward."""
        c = self._c
        lines = [
            Line("logits", self.setup.tokens * c * self._columns, "c·T·v/t: their gradient"),
            Line(GATHERED, 2 * c * self._root, "2c·N_0/t: as it arrives, and copied"),
        ]
        return Phase("gathering of the root", (*self._states(0), *self._kept_at_the_head(), *lines))

    def head(self) -> Phase:
        """Its backward: the gradients of logits, head and its input."""
        T, c, d = self.setup.tokens, self._c, self.shape.width
        lines = [
            Line("logits", T * c * self._columns, "c·T·v/t: their gradient"),
            Line(GATHERED, c * d * self._columns, "c·d·v/t: gradient of the head"),
            Line("activations", T * c * d, "c·T·d: gradient of its input"),
        ]
        return Phase(
            "backward of the head", (*self._states(0), *self._kept_at_the_head(), self._gathered(1), *lines)
        )

    def block_backward(self, number: int) -> Phase:
        """Of block `number` (from 1), while the one before it is gathered and the one after it is reduced."""
        c, d, L = self._c, self.shape.width, self.shape.num_layers
        per_layer, formula = self._kept()
        lines = [
            Line("activations", number * per_layer, f"{number} blocks × T·({formula})"),
            *self._working(),
            self._tables(),
            self._gathered(min(number, 2), left=number),
            Line(GATHERED, c * d * self._columns, "c·d·v/t: gradient of the head"),
            Line(GATHERED, c * d * self.shape.ffn_width // self.mesh.tp, "c·d·f/t: gradient of one matrix"),
        ]
        if number < L:
            r = self.setup.formats.reduce.itemsize
            lines.append(Line(GATHERED, r * self._block, "r·N_l/t: the block after it is reduced"))
        lines.append(self._waiting(L - number))
        return Phase(f"backward of block {number} of {L}", (*self._states(L - number), *lines))

    def block_done(self, number: int) -> Phase:
        """Its backward's end, when its gradients are all there and copied to be reduced."""
        c, r, L = self._c, self.setup.formats.reduce.itemsize, self.shape.num_layers
        per_layer, formula = self._kept()
        lines = [
            Line("activations", (number - 1) * per_layer, f"{number - 1} blocks × T·({formula})"),
            self._tables(),
            self._gathered(min(number, 2), left=number),
            Line(GATHERED, (c + r) * self._block, "(c + r)·N_l/t: its gradients, copied to be reduced"),
            self._waiting(L - number),
        ]
        return Phase(f"reduction of block {number} of {L}", (*self._states(L - number), *lines))

    def root(self) -> Phase:
        """The reduction of the root's gradients, as it begins."""
        c, r, d = self._c, self.setup.formats.reduce.itemsize, self.shape.width
        lines = [
            Line(GATHERED, (c + r) * self._root, "(c + r)·N_0/t: the root's gradients, copied to be reduced"),
            self._waiting(self.shape.num_layers),
        ]
        if self.shape.tie_embeddings:
            size = c * (self._root + 3 * d * self._columns) + r * self._block
            lines[0] = Line(GATHERED, size, "c·(N_0 + 3d·v)/t + r·N_l/t: tied gradients, being added")
        return Phase("reduction of the root", (*self._states(self.shape.num_layers), *lines))

    def root_reduced(self) -> Phase:
        """The same as it ends: its result is there, and the last gradient that went into it."""
        c, r, d = self._c, self.setup.formats.reduce.itemsize, self.shape.width
        lines = [
            Line(GATHERED, c * d * self._columns, "c·d·v/t: gradient of the embedding"),
            Line(GATHERED, r * self._root, "r·N_0/t: what was reduced"),
            self._waiting(self.shape.num_layers),
        ]
        if self.setup.accumulation > 1:
            size = r * self._root // self.mesh.dp_shard
            lines.append(Line(GATHERED, size, "r·N_0/(D·t): the sum, before it is added to the gradient"))
        return Phase("end of the root's reduction", (*self._states(self.shape.num_layers + 1), *lines))

    def update(self) -> Phase:
        """AdamW is fused: it needs no memory of its own."""
        return Phase("update", self._states(self.shape.num_layers + 1))

    @property
    def _c(self) -> int:
        return self.setup.formats.compute.itemsize

    @property
    def _columns(self) -> int:
        """Logits per token of this rank."""
        return share_of(self.shape.vocab_size, self.mesh.tp, 0)[1]

    @functools.cached_property
    def resharding(self) -> str | int:
        return self.setup.resharding(self.shape, self.mesh.tp)

    @functools.cached_property
    def _block(self) -> int:
        """Elements of a block's tp share, padded as FSDP gathers them."""
        return self._padded(self.shape.block(self.mesh.tp))

    @functools.cached_property
    def _root(self) -> int:
        return self._padded(self.shape.root(self.mesh.tp))

    def _padded(self, weights: list[Weight]) -> int:
        return sum(w.padded(self.mesh.dp_shard, self.mesh.tp) for w in weights)

    def _waiting(self, reduced: int) -> Line:
        """Where replicas add to the gradients of micro-batches before, each sum stays until the end."""
        kept = self.mesh.dp_replicate > 1 and self.setup.accumulation > 1
        size = self.setup.formats.reduce.itemsize * self._block // self.mesh.dp_shard * reduced * kept
        return Line(GATHERED, size, "r·N_l/(D·t), of what has been reduced: sums over replicas")

    def _states(self, reduced: int) -> tuple[Line, ...]:
        """reduced: blocks whose gradients are there, one more for the root's."""
        L = self.shape.num_layers
        of_blocks = self._block * L / (self._block * L + self._root)
        there = 1.0 if reduced > L or self.setup.accumulation > 1 else of_blocks * reduced / L
        return (
            Line("parameters", self.parameters, "p·N/(D·t)"),
            Line("optimizer", self.optimizer, "2p·N/(D·t): two moments, and a step count per weight"),
            Line("gradients", round(self.gradients * there), "p·N/(D·t), of what has been reduced"),
        )

    def _gathered(self, blocks: int, left: int | None = None) -> Line:
        """left: blocks whose backward is not done; by default all."""
        c, L = self._c, self.shape.num_layers
        if self.resharding == "never":
            held = self._block * (L if left is None else left) + self._root
            return Line(GATHERED, c * held, "c·N/t, of what has no backward yet: never freed before")
        held = min(blocks, L) * self._block + self._root
        if isinstance(self.resharding, int):
            # The other blocks rest in larger shards meanwhile.
            held += self._block * (L - min(blocks, L)) // self.resharding
        return Line(GATHERED, c * held, f"c·({min(blocks, L)}·N_l + N_0)/t: blocks at work, and the root")

    def _kept_at_the_head(self) -> list[Line]:
        per_layer, formula = self._kept()
        T, L, d = self.setup.tokens, self.shape.num_layers, self.shape.width
        return [
            Line("activations", L * per_layer, f"{L} blocks × T·({formula})"),
            Line("activations", T * (self._normed() + self._c * d), "T·(n·d/t + c·d): of norm and head"),
            self._tables(),
        ]

    def _tables(self) -> Line:
        s = self.setup.seq_len
        mask = self._c * s * s if 0 < self.shape.sliding_window < s else 0
        return Line("other", 6 * s * self.shape.head_dim + mask, "6·s·h: rotary tables; with a window c·s²")

    def _normed(self) -> int:
        """Bytes per token that a norm of the residual stream keeps: its share, and a number per token."""
        return (self._n * self.shape.width + 4) // self.mesh.tp

    @property
    def _n(self) -> int:
        """Bytes of a number that a norm keeps: of its input, or of two float32 copies of a narrower one."""
        return 8 if self._c == 2 and not self.program.fused_norms else self._c

    @property
    def _shares(self) -> tuple[int, int, int, int]:
        """Of one rank: q/t, k/t, the feed-forward's f/t times its gates, bytes of attention's sums."""
        t, shape = self.mesh.tp, self.shape
        gates = 2 if shape.gated else 1
        return (
            shape.query_width // t,
            shape.key_width_of(t),
            gates * shape.ffn_width // t,
            4 * shape.num_heads // t,
        )

    def _kept(self) -> tuple[int, str]:
        """Bytes that a block keeps from forward to backward, and their formula per token."""
        c, d, t, T = self._c, self.shape.width, self.mesh.tp, self.setup.tokens
        q, k, gates, sums = self._shares
        if self.setup.checkpoint == "full":
            return T * c * d // t, "c·d/t: its input"
        if self.setup.checkpoint == "none":
            return T * self._all(), "2n·d/t + c·(2d + 2q/t + 2k/t + 4f/t) + 4·heads/t: all of it"
        if self.program.keeps_all_products:
            kept = c * (d // t + 2 * q + 2 * k + 2 * d + gates) + sums
            return T * kept, "c·(d/t + 2q/t + 2k/t + 2d + 2f/t) + 4·heads/t: its input, products, attention"
        # Every second product; of what tp scatters both the whole and the share. A compiled block
        # computes one sum more again.
        kept = c * (d // t + 2 * q + k + self.shape.ffn_width // t + d) + sums
        kept += (2 * c * d // t if t > 1 else 0) - (c * d if self.setup.compile else 0)
        return T * kept, "c·(d/t + 2q/t + k/t + f/t + d) + 4·heads/t: its input, every second product"

    def _all(self) -> int:
        """Bytes per token that a block's backward needs."""
        q, k, gates, sums = self._shares
        kept = 2 * self._normed() + sums
        if self.shape.qk_norm:
            # By heads, whose order in memory becomes attention's result's: copied for the product after it.
            kept += self._n * (q + k) + 4 * (q + k) // self.shape.head_dim + self._c * q
        return kept + self._c * (2 * self.shape.width + 2 * q + 2 * k + 2 * gates)

    def _working(self) -> list[Line]:
        """What one block's backward holds besides what was kept: computed again, and gradients."""
        c, d, T = self._c, self.shape.width, self.setup.tokens
        q, k, gates, sums = self._shares
        flowing = Line("activations", T * c * (gates + d), "c·T·(2f/t + d): gradients on their way")
        if self.setup.checkpoint == "none":
            return [flowing]
        again, formula = self._all(), "T·(all that its backward needs), computed again"
        if self.setup.checkpoint == "selective":
            # What was kept serves as it is (attention, values, gates), or was used up (queries, keys, sum).
            again -= c * (2 * q + 2 * k + gates + d) + sums
            formula = "T·(all that its backward needs and was not kept), computed again"
        return [Line("activations", T * again, formula), flowing]
