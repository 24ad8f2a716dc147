"""Where a rank's share lies in the whole tensor.

DTensor's own answer (`compute_local_shape_and_global_offset`, torch 2.13) gives wrong offsets when
tp and dp_shard split one dim and do not divide it: pytorch issue 161368. Ours is the one that FSDP
and tensor parallelism split by.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from parallel2d.mesh_shape import share_of


@dataclass(frozen=True)
class Box:
    """A block of a tensor: offset and size in each dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def cut(self, whole: Tensor) -> Tensor:
        """The block of a full tensor, as a view."""
        for dim, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            whole = whole.narrow(dim, offset, size)
        return whole

    def intersection(self, other: "Box") -> "Box | None":
        """What two blocks of one tensor have in common, None if nothing."""
        offsets, sizes = [], []
        for mine, size, theirs, their_size in zip(
            self.offsets, self.sizes, other.offsets, other.sizes, strict=True
        ):
            start, stop = max(mine, theirs), min(mine + size, theirs + their_size)
            if stop <= start:
                return None
            offsets.append(start)
            sizes.append(stop - start)
        return Box(tuple(offsets), tuple(sizes))

    def within(self, outer: "Box") -> "Box":
        """The same block, with its place counted from the beginning of `outer`, which contains it."""
        return Box(tuple(o - p for o, p in zip(self.offsets, outer.offsets, strict=True)), self.sizes)


@dataclass(frozen=True)
class Split:
    """One mesh axis splits one dim of a tensor; `size`: of the dim, as this axis finds it."""

    axis: int
    dim: int
    size: int
    start: int
    stop: int


def splits_of(tensor: DTensor, coordinate: Sequence[int] | None = None) -> list[Split]:
    """How the tensor came to a rank's block, in the order of splitting. No communication.

    `coordinate`: the rank's place on the tensor's mesh; default: this rank's.
    tp splits first, and dp_shard splits what tp leaves (placement _StridedShard where both split the
    same dim): so the mesh's axes are applied last to first.
    """
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate() if coordinate is None else coordinate
    if coordinate is None:
        raise ValueError("this rank is not part of the tensor's mesh")
    splits, sizes = [], list(tensor.shape)
    for axis in reversed(range(mesh.ndim)):
        placement = tensor.placements[axis]
        if isinstance(placement, Shard | _StridedShard):
            size = sizes[placement.dim]
            start, stop = share_of(size, mesh.size(axis), coordinate[axis])
            splits.append(Split(axis, placement.dim, size, start, stop))
            sizes[placement.dim] = stop - start
    return splits


def local_box(tensor: DTensor, coordinate: Sequence[int] | None = None) -> Box:
    """The block that a rank holds, this one or the one at a place on the mesh. No communication."""
    offsets, sizes = [0] * tensor.ndim, list(tensor.shape)
    for split in splits_of(tensor, coordinate):
        offsets[split.dim] += split.start
        sizes[split.dim] = split.stop - split.start
    return Box(tuple(offsets), tuple(sizes))


def local_block(tensor: Tensor) -> tuple[Tensor, Box]:
    """What this rank holds of a tensor, and where that lies in it; of a plain one all. No communication."""
    if isinstance(tensor, DTensor):
        return tensor.to_local(), local_box(tensor)
    return tensor, Box((0,) * tensor.ndim, tuple(tensor.shape))
