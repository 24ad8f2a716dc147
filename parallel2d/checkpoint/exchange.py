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

    @property
    def room(self) -> int:
        """Bytes in a buffer, where each part begins at a multiple of every dtype's size."""
        return -(-self.bytes // 16) * 16


@dataclass(frozen=True)
class Read:
    """A piece that a rank reads, or still has from the round before, and whom it serves."""

    piece: Piece
    dtype: str
    parts: list[Part]


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
            wanted[part.rank] = wanted.get(part.rank, 0) + part.room
        reader = min(wanted, key=lambda rank: (-wanted[rank], self._load[rank], rank))
        self._load[reader] += piece.bytes
        own = [part for part in parts if part.rank == reader]
        if len(wanted) == 1:
            self.plans[reader].own.append(Read(piece, dtype, own))
            return
        for rank in (rank for rank in wanted if rank != reader):
            read = Read(piece, dtype, own + [part for part in parts if part.rank == rank])
            self._send(reader, rank, read, wanted[rank])
            own = []

    def _send(self, reader: int, rank: int, read: Read, size: int) -> None:
        """Plan what one rank gets of a piece, besides what the reader keeps.

        A piece that many need, HSDP's replicas for example, takes several rounds, one after the other.
        """
        number = self._round_for(reader, rank, size)
        reads = self.plans[reader].rounds[number].reads
        if reads and reads[-1].piece == read.piece:
            reads[-1].parts.extend(read.parts)
        else:
            reads.append(read)
        receives = self.plans[rank].rounds[number].receives
        receives.setdefault(reader, []).extend((read.dtype, p) for p in read.parts if p.rank == rank)
        self._sent[number][reader] += size
        self._received[number][rank] += size
        # Not back to an earlier round: its piece would have to be kept until then.
        self._first_open[reader] = max(self._first_open[reader], number)

    def _round_for(self, reader: int, rank: int, size: int) -> int:
        number = max(self._first_open[reader], self._first_open[rank])
        while True:
            if number == len(self._sent):
                self._add_round()
            sends_full = _is_full(self._sent[number][reader], size)
            receives_full = _is_full(self._received[number][rank], size)
            if not (sends_full or receives_full):
                return number
            number += 1
            for full, of in ((sends_full, reader), (receives_full, rank)):
                self._first_open[of] = max(self._first_open[of], number) if full else self._first_open[of]

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
