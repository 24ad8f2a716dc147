"""Who reads which piece of a checkpoint, and to whom it is sent.

Each piece is read by one rank, the one that needs most of it, which checks it and sends the others
their parts: every stored byte is read from the disk once, in the order of the files, however the
meshes differ. What is sent goes in rounds of bounded size, the same ones on all ranks.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from parallel2d.checkpoint.manifest import Piece
from parallel2d.shards import Box

# Each rank sends and receives no more in a round, unless a single piece is larger.
ROUND_BYTES = 8 * 2**20


@dataclass(frozen=True)
class Need:
    """A block of a stored tensor that a rank wants in its item number `item`."""

    rank: int
    item: int
    box: Box


@dataclass(frozen=True)
class Part:
    """A part of a piece for one rank."""

    rank: int
    item: int
    box: Box
    bytes: int


@dataclass(frozen=True)
class Read:
    """A piece that a rank reads, and whom it serves."""

    piece: Piece
    dtype: str
    parts: tuple[Part, ...]


@dataclass
class Round:
    """What one rank does in a round of the exchange.

    Args:
        reads: pieces of which others need parts, in the order in which the parts are sent.
        receives: {sender: parts}, in the order in which they arrive.
    """

    reads: list[Read] = field(default_factory=list)
    receives: dict[int, list[tuple[str, Part]]] = field(default_factory=dict)


@dataclass
class RankPlan:
    """What a rank reads for itself alone, and its rounds."""

    own: list[Read] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)


class Exchange:
    """Builds the plans of all ranks, piece by piece."""

    def __init__(self, world: int) -> None:
        self.plans = [RankPlan() for _ in range(world)]
        self._load = [0] * world
        self._sent: list[list[int]] = []  # bytes, by round and rank
        self._received: list[list[int]] = []
        self._first_open = [0] * world  # the first round in which a rank may have room

    def add(self, piece: Piece, dtype: str, itemsize: int, needs: Iterable[Need]) -> None:
        """Plan a piece; nothing if nobody needs it."""
        parts = [part for need in needs if (part := _part(need, piece.box, itemsize))]
        if not parts:
            return
        wanted: dict[int, int] = {}
        for part in parts:
            wanted[part.rank] = wanted.get(part.rank, 0) + part.bytes
        reader = min(wanted, key=lambda rank: (-wanted[rank], self._load[rank], rank))
        self._load[reader] += piece.bytes
        read = Read(piece, dtype, tuple(parts))
        if len(wanted) == 1:
            self.plans[reader].own.append(read)
        else:
            self._send(reader, read, {rank: size for rank, size in wanted.items() if rank != reader})

    def _send(self, reader: int, read: Read, sizes: dict[int, int]) -> None:
        number = self._round_for(reader, sizes)
        self._sent[number][reader] += sum(sizes.values())
        self.plans[reader].rounds[number].reads.append(read)
        for part in read.parts:
            if part.rank != reader:
                receives = self.plans[part.rank].rounds[number].receives
                receives.setdefault(reader, []).append((read.dtype, part))
        for rank, size in sizes.items():
            self._received[number][rank] += size

    def _round_for(self, reader: int, sizes: dict[int, int]) -> int:
        number = max(self._first_open[rank] for rank in (reader, *sizes))
        while True:
            if number == len(self._sent):
                self._add_round()
            full = [rank for rank, size in sizes.items() if _is_full(self._received[number][rank], size)]
            full += [reader] if _is_full(self._sent[number][reader], sum(sizes.values())) else []
            if not full:
                return number
            number += 1
            for rank in full:
                self._first_open[rank] = max(self._first_open[rank], number)

    def _add_round(self) -> None:
        self._sent.append([0] * len(self.plans))
        self._received.append([0] * len(self.plans))
        for plan in self.plans:
            plan.rounds.append(Round())


def _is_full(used: int, more: int) -> bool:
    return used > 0 and used + more > ROUND_BYTES


def _part(need: Need, box: Box, itemsize: int) -> Part | None:
    common = need.box.intersection(box)
    return Part(need.rank, need.item, common, common.numel * itemsize) if common else None
