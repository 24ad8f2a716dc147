"""DCP's storage interface for loading: every stored byte is read once, checked, and sent where it belongs."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from parallel2d.checkpoint.exchange import Exchange, Need, Part, RankPlan, Read, Round
from parallel2d.checkpoint.files import StoredBlocks, dcp_tensors
from parallel2d.checkpoint.intact import DamagedCheckpoint
from parallel2d.checkpoint.manifest import Manifest, Piece, pieces_of
from parallel2d.shards import Box


class CheckpointReader(StorageReader):
    """Loads on any mesh. Memory besides the tensors: a few pieces and one round of the exchange.

    Collectives, besides DCP's own: one all-to-all per round. Pieces that only one rank needs are not
    sent; on the mesh that saved these are all but what several ranks hold (replicas, step counts).
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self.items: list[ReadItem] = []

    def reset(self, checkpoint_id: Any = None) -> None:
        """DCP calls it where it is given another place than ours."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata(dcp_tensors(self.manifest))  # type: ignore[arg-type]  # a dict of a subtype

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing to open yet."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """What rank 0 must know: of each item which block it needs a part of, and which."""
        self.items = plan.items
        needs = [
            (item.storage_index.fqn, tuple(item.storage_index.offset or ()), _box_of(item))
            for item in plan.items
        ]
        return LoadPlan([], storage_data=needs)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """On rank 0, which knows what each rank needs: who reads what."""
        needs: dict[tuple[str, tuple[int, ...]], list[Need]] = {}
        for rank, plan in enumerate(plans):
            for number, (name, offsets, box) in enumerate(plan.storage_data):
                needs.setdefault((name, offsets), []).append(Need(rank, number, box))
        exchange = Exchange(len(plans))
        for name, tensor in self.manifest.tensors.items():
            itemsize = tensor.torch_dtype.itemsize
            for block in tensor.blocks:
                for piece in pieces_of(block, itemsize, self.manifest.piece_bytes):
                    exchange.add(piece, tensor.dtype, itemsize, needs.get((name, block.offsets), ()))
        return [
            dataclasses.replace(plan, storage_data=of_rank)
            for plan, of_rank in zip(plans, exchange.plans, strict=True)
        ]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        with StoredBlocks(self.folder, self.manifest) as stored:
            _Load(self.items, planner, stored).run(plan.storage_data)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return isinstance(checkpoint_id, str | Path)


def _box_of(item: ReadItem) -> Box:
    """What an item wants, in the whole tensor."""
    offsets = zip(item.storage_index.offset or (), item.storage_offsets, strict=True)
    return Box(tuple(a + b for a, b in offsets), tuple(item.lengths))


class _Load:
    """One rank's part of a load. A piece that cannot be read is told at the end: peers wait for its round."""

    def __init__(self, items: list[ReadItem], planner: LoadPlanner, stored: StoredBlocks) -> None:
        self.items, self.planner, self.stored = items, planner, stored
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.fault: DamagedCheckpoint | None = None
        self.last: tuple[Piece, Tensor] | None = None
        self.memory: dict[str, Tensor] = {}

    def run(self, plan: RankPlan) -> None:
        for read in plan.own:
            self._load_own(read)
        for of_round in plan.rounds:
            self._exchange(of_round)
        if self.fault:
            raise self.fault

    def _load_own(self, read: Read) -> None:
        """A piece for this rank alone; straight into the tensor where that takes it as it is."""
        target = self._target(read.parts[0])
        whole = len(read.parts) == 1 and read.parts[0].box == read.piece.box
        dtype = getattr(torch, read.dtype)
        if whole and not target.is_cuda and target.dtype == dtype and target.is_contiguous():
            self._read_into(read, target)
            return
        data = self._scratch(read)
        self._read_into(read, data)
        self._keep(read, data)

    def _scratch(self, read: Read) -> Tensor:
        """Memory for a piece."""
        numbers = self._reused("piece", read.piece.bytes).view(getattr(torch, read.dtype))
        return numbers.view(read.piece.box.sizes)

    def _reused(self, purpose: str, size: int) -> Tensor:
        """Bytes, the same memory each time: pages that are new take as long as the reading."""
        if purpose not in self.memory or self.memory[purpose].nbytes < size:
            self.memory[purpose] = torch.empty(size, dtype=torch.uint8)
        return self.memory[purpose][:size]

    def _once(self, read: Read) -> Tensor:
        """A piece that is sent, in several rounds perhaps, which follow each other."""
        if self.last is None or self.last[0] != read.piece:
            self.last = read.piece, self._scratch(read)
            self._read_into(read, self.last[1])
        return self.last[1]

    def _read_into(self, read: Read, out: Tensor) -> None:
        try:
            self.stored.read_piece_into(read.piece, out)
        except DamagedCheckpoint as error:
            self.fault = self.fault or error

    def _keep(self, read: Read, data: Tensor) -> None:
        """The parts of a piece that this rank itself needs."""
        for part in read.parts:
            if part.rank == self.rank:
                self._target(part).copy_(part.box.within(read.piece.box).cut(data))

    def _target(self, part: Part) -> Tensor:
        """Where a part goes, as a view of this rank's tensor."""
        item = self.items[part.item]
        return part.box.within(_box_of(item)).cut(self.planner.resolve_tensor(item).detach())

    def _exchange(self, of_round: Round) -> None:
        """One round. One all-to-all of bytes over the world."""
        leaving = [part for read in of_round.reads for part in read.parts if part.rank != self.rank]
        sizes = [sum(part.room for part in leaving if part.rank == rank) for rank in range(self.world)]
        starts = list(itertools.accumulate(sizes, initial=0))
        sent = self._reused("sent", starts.pop())
        for read in of_round.reads:
            data = self._once(read)
            self._keep(read, data)
            for part in read.parts:
                if part.rank != self.rank:
                    place = _numbers(sent, starts[part.rank], read.dtype, part)
                    place.copy_(part.box.within(read.piece.box).cut(data))
                    starts[part.rank] += part.room
        arriving = [of_round.receives.get(rank, []) for rank in range(self.world)]
        from_each = [sum(part.room for _, part in parts) for parts in arriving]
        received = self._reused("received", sum(from_each))
        dist.all_to_all_single(received, sent, from_each, sizes)
        start = 0
        for dtype, part in itertools.chain(*arriving):
            self._target(part).copy_(_numbers(received, start, dtype, part))
            start += part.room


def _numbers(buffer: Tensor, start: int, dtype: str, part: Part) -> Tensor:
    """A part's place in a buffer, as what it holds."""
    return buffer[start : start + part.bytes].view(getattr(torch, dtype)).view(part.box.sizes)
