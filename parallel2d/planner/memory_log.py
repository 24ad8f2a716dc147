"""What a traced step allocates and frees, in order, and its peaks."""

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from parallel2d.planner.moments import PARTS


@dataclass(eq=False)
class Block:
    """One storage. What it is for, and the stream it is allocated on, may turn out later than it is made."""

    part: str
    bytes: int = 0
    stream: str = "compute"


@dataclass(frozen=True)
class Event:
    """A block changes its size, in bytes, in a phase of the step; 0 before it begins and after it ends."""

    block: Block
    before: int
    after: int
    phase: str


class MemoryLog:
    """Follows storages from the first tensor seen on them to their end.

    `enter` says in which phase of the step is what comes next, and what it is for.
    """

    def __init__(self) -> None:
        self._phase, self._part = "between steps", "other"
        self.events: list[Event] = []
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], Block]] = {}

    def enter(self, phase: str, part: str) -> None:
        self._phase, self._part = phase, part
        # No change, but a phase that allocates nothing has its largest moment, too.
        self.events.append(Event(Block(part), 0, 0, phase))

    def block(self, tensor: Tensor) -> Block:
        """The one that a tensor lies on."""
        return self._block(tensor.untyped_storage())

    def name(self, part: str, tensors: Iterable[Tensor]) -> None:
        """Say what tensors are for; of DTensors, the memory of this rank's share."""
        for tensor in tensors:
            block = self.block(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
            block.part, block.stream = part, "compute"

    def resized(self, storage: torch.UntypedStorage) -> Block:
        """Its block, after its size was changed in place."""
        block = self._block(storage)
        self._record(block, storage.nbytes())
        return block

    def _block(self, storage: torch.UntypedStorage) -> Block:
        key = id(storage)
        if key not in self._known:
            block = Block(self._part)
            self._known[key] = (weakref.ref(storage, lambda _: self._end(key)), block)
            self._record(block, storage.nbytes())
        return self._known[key][1]

    def _end(self, key: int) -> None:
        _, block = self._known.pop(key)
        self._record(block, 0)

    def _record(self, block: Block, size: int) -> None:
        if size != block.bytes:
            self.events.append(Event(block, block.bytes, size, self._phase))
            block.bytes = size

    def peaks(self, start: int) -> dict[str, Mapping[str, int]]:
        """For each phase from event number `start` on: bytes of each part at the phase's largest moment."""
        now = dict.fromkeys(PARTS, 0)
        found: dict[str, Mapping[str, int]] = {}
        for number, event in enumerate(self.events):
            now[event.block.part] += event.after - event.before
            if number >= start and sum(now.values()) > sum(found.get(event.phase, {}).values()):
                found[event.phase] = dict(now)
        return found
