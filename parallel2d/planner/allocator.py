"""What CUDA's caching allocator would reserve for a stream of allocations.

Its rules (c10/cuda/CUDACachingAllocator.cpp, default settings): sizes are rounded up to 512 bytes; up to
1 MiB come from segments of 2 MiB, less than 10 MiB from segments of 20 MiB, more from segments of their
own, rounded up to 2 MiB. The smallest free piece of the same stream and pool that is large enough is
taken and, if enough is left over, split; a freed piece joins its free neighbours; no segment goes back.
"""

import bisect
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from parallel2d.planner.memory_log import Block, Event

_MIB = 2**20
_Pool = tuple[str, bool]  # stream, whether it is for small sizes


@dataclass(eq=False)
class _Piece:
    """A part of a segment, between its neighbours in it."""

    pool: _Pool
    address: int
    size: int
    free: bool = True
    before: "_Piece | None" = None
    after: "_Piece | None" = None

    def join_next(self) -> None:
        assert self.after is not None
        self.size += self.after.size
        self.after = self.after.after
        if self.after is not None:
            self.after.before = self


class _Allocator:
    def __init__(self) -> None:
        self.reserved = 0
        # What is free: (size, address) in order, and the piece at an address.
        self._sizes: dict[_Pool, list[tuple[int, int]]] = defaultdict(list)
        self._pieces: dict[int, _Piece] = {}

    def allocate(self, size: int, stream: str) -> _Piece:
        size = -(-size // 512) * 512
        pool = (stream, size <= _MIB)
        sizes = self._sizes[pool]
        place = bisect.bisect_left(sizes, (size, 0))
        piece = self._take(pool, place) if place < len(sizes) else self._new_segment(pool, size)
        left = piece.size - size
        if left >= 512 if size <= _MIB else left > _MIB:
            self._split(piece, size)
        return piece

    def release(self, piece: _Piece) -> None:
        piece.free = True
        if piece.after is not None and piece.after.free:
            self._withdraw(piece.after)
            piece.join_next()
        if piece.before is not None and piece.before.free:
            piece = piece.before
            self._withdraw(piece)
            piece.join_next()
            piece.free = True
        self._offer(piece)

    def _new_segment(self, pool: _Pool, size: int) -> _Piece:
        of_large = 20 * _MIB if size < 10 * _MIB else -(-size // (2 * _MIB)) * 2 * _MIB
        piece = _Piece(pool, self.reserved, 2 * _MIB if size <= _MIB else of_large, free=False)
        self.reserved += piece.size
        return piece

    def _split(self, piece: _Piece, size: int) -> None:
        """Keep so much of a piece, and offer the rest."""
        rest = _Piece(piece.pool, piece.address + size, piece.size - size, before=piece, after=piece.after)
        if rest.after is not None:
            rest.after.before = rest
        piece.after, piece.size = rest, size
        self._offer(rest)

    def _offer(self, piece: _Piece) -> None:
        bisect.insort(self._sizes[piece.pool], (piece.size, piece.address))
        self._pieces[piece.address] = piece

    def _withdraw(self, piece: _Piece) -> None:
        place = bisect.bisect_left(self._sizes[piece.pool], (piece.size, piece.address))
        self._take(piece.pool, place)

    def _take(self, pool: _Pool, place: int) -> _Piece:
        piece = self._pieces.pop(self._sizes[pool].pop(place)[1])
        piece.free = False
        return piece


def reserved_bytes(events: Iterable[Event]) -> int:
    """Of all events together, from an empty allocator on."""
    allocator = _Allocator()
    held: dict[Block, _Piece] = {}
    for event in events:
        if event.before:
            allocator.release(held.pop(event.block))
        if event.after:
            held[event.block] = allocator.allocate(event.after, event.block.stream)
    return allocator.reserved
