"""How far two checkpoints are apart, tensor by tensor."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel2d.checkpoint.files import StoredBlocks
from parallel2d.checkpoint.manifest import Manifest
from parallel2d.checkpoint.rows import row_boxes

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Difference:
    """A tensor in two checkpoints.

    `relative` is max |a - b| / max |b|, max |b| over b's finite values: 0 where all are equal, infinity
    where b is zero and a is not, NaN where one of them has a NaN and the other has not the same bits.
    `reason`: why there is no such number, "" if there is.
    """

    name: str
    relative: float
    reason: str = ""

    def is_beyond(self, tolerance: float) -> bool:
        return bool(self.reason) or not self.relative <= tolerance

    @property
    def order(self) -> tuple[bool, bool, float, str]:
        """Worst first, when sorted: what cannot be compared, NaN, then by size."""
        is_nan = math.isnan(self.relative)
        return not self.reason, not is_nan, 0.0 if is_nan else -self.relative, self.name


def bytes_to_compare(a: Manifest, b: Manifest) -> int:
    """Of both together, for the progress."""
    common = [name for name in a.tensors if name in b.tensors and not _reason(name, a, b)]
    return 2 * sum(a.tensors[name].bytes for name in common)


def differences(a: StoredBlocks, b: StoredBlocks, progress: Callable[[int], None]) -> list[Difference]:
    """Of all tensors of either, worst first. Both are read once, some rows at a time, every hash checked."""
    names = dict.fromkeys([*a.manifest.tensors, *b.manifest.tensors])
    found = []
    for name in names:
        if reason := _reason(name, a.manifest, b.manifest):
            found.append(Difference(name, math.inf, reason))
        else:
            found.append(Difference(name, _relative(name, a, b, progress)))
    return sorted(found, key=lambda difference: difference.order)


def _reason(name: str, a: Manifest, b: Manifest) -> str:
    ours, theirs = a.tensors.get(name), b.tensors.get(name)
    if ours is None or theirs is None:
        return f"only in {'A' if theirs is None else 'B'}"
    if ours.shape != theirs.shape:
        return f"shape {list(ours.shape)} in A, {list(theirs.shape)} in B"
    if ours.dtype != theirs.dtype:
        return f"dtype {ours.dtype} in A, {theirs.dtype} in B"
    return ""


def _relative(name: str, a: StoredBlocks, b: StoredBlocks, progress: Callable[[int], None]) -> float:
    stored = a.manifest.tensors[name]
    apart, largest = 0.0, 0.0
    for box in row_boxes(stored.shape, stored.torch_dtype.itemsize):
        ours, theirs = a.read(name, box), b.read(name, box)
        wide = _widened(theirs)
        largest = max(largest, _largest_finite(wide))
        if not _same_bits(ours, theirs).all():
            apart = _max(apart, _largest_difference(ours, theirs, wide))
        progress(2 * ours.nbytes)
    if apart == 0:
        return 0.0
    return apart / largest if largest else apart * math.inf


def _max(first: float, second: float) -> float:
    """Python's own forgets a NaN that does not come first."""
    return math.nan if math.isnan(first) or math.isnan(second) else max(first, second)


def _largest_finite(wide: Tensor) -> float:
    return wide.abs().nan_to_num_(nan=0.0, posinf=0.0).max().item()


def _largest_difference(ours: Tensor, theirs: Tensor, wide: Tensor) -> float:
    apart = (_widened(ours) - wide).abs()
    apart[_same_bits(ours, theirs)] = 0.0
    if not ours.is_floating_point() and not ours.is_complex():
        # Integers beyond 2^53 may differ by less than float64 tells apart.
        apart[(apart == 0) & ~_same_bits(ours, theirs)] = 1.0
    return apart.max().item()


def _widened(tensor: Tensor) -> Tensor:
    """As float64 or complex128, which hold every smaller dtype's numbers exactly."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _same_bits(a: Tensor, b: Tensor) -> Tensor:
    """Where two tensors of one dtype are the same bit by bit: infinities and NaNs too."""
    if a.is_complex():
        return _same_bits(torch.view_as_real(a), torch.view_as_real(b)).all(-1)
    integers = _INTEGERS[a.itemsize]
    return a.view(integers) == b.view(integers)
