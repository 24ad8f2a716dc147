"""Peak memory of one rank, by formula: what stays, what a phase of the step adds, what the allocator keeps.

Symbols as in model.py; b·s tokens of a micro-batch are `T`, D the ranks of dp_shard, c the bytes of a
number in compute, r in the reduction, p at rest; N_l weights of a block, N_0 those of the root.
"""

import math
from dataclasses import dataclass

from parallel2d.mesh_shape import MeshShape, share_of
from parallel2d.planner.model import ModelShape
from parallel2d.planner.moments import Phase, phases
from parallel2d.planner.setup import OURS, Program, Setup
from parallel2d.traffic import Weight

# What CUDA's caching allocator holds beyond what is allocated, as a part of everything that comes and goes
# within a step; and gradients find no room among freed activations. One number for all programs and GPUs,
# fitted on published peaks (docs/planner.md).
FRAGMENTATION = 0.16
# A run whose predicted reserved memory is within this part of what the GPU has is borderline.
MARGIN = 0.10


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
    held = states(shape, mesh, setup.formats.param.itemsize)
    return Memory(phases(shape, mesh, setup, program, held), *held)
