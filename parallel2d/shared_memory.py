"""Collectives of ranks on one machine through memory that all of them map, where gloo would use sockets.

gloo sends everything through TCP, by a thread of its own: two copies in the kernel and four changes of thread
for each message. Here a rank writes into its slot, tells its peers with a few bytes over a Unix socket, and
reads from theirs.
"""

import os
import socket
import struct
import tempfile
import weakref
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group

# What a rank sends at once; more goes in pieces. It has twice this in memory once it has sent as much.
_SLOT_BYTES = 2**21
# Every rank tells every other: above this many, gloo's rings and trees send fewer messages.
_MOST_RANKS = 32

# What a rank says when its part is in its slot: the collective and its bytes, so that ranks which run
# different code stop, where they would read each other's old numbers.
_PACKET = struct.Struct("<cQ")
_GATHER, _SCATTER, _SUM, _HELLO = b"g", b"s", b"r", b"h"

# Groups end with their world, which forgets them: what belongs to them goes with them.
_of_group: "weakref.WeakKeyDictionary[dist.ProcessGroup, SharedMemory | None]" = weakref.WeakKeyDictionary()


def shared_memory(group: dist.ProcessGroup) -> "SharedMemory | None":
    """That of a gloo group whose ranks all run on this machine, under Linux; None for any other.

    Collective when it is first called for a group: one broadcast and one all-gather of small objects.
    """
    if group not in _of_group:
        _of_group[group] = _connect(group) if _may_share(group) else None
    return _of_group[group]


def is_gloo(group: dist.ProcessGroup) -> bool:
    """Whether the group's tensors lie on the CPU: gloo sends them, where shared memory does not."""
    return dist.get_backend(group) == dist.Backend.GLOO


def _may_share(group: dist.ProcessGroup) -> bool:
    return is_gloo(group) and 1 < group.size() <= _MOST_RANKS and hasattr(os, "memfd_create")


class SharedMemory:
    """The slots of a group's ranks, and the sockets over which they say that there is something in them.

    A collective is: put, meet, take. There are two slots for each rank, used in turn, so that one meeting
    is enough: who puts into a slot again has met the others since, who took what was in it before that.
    """

    def __init__(self, memory: int, peers: dict[int, socket.socket], rank: int) -> None:
        """memory: descriptor of a file of the size that `_bytes_of` says; is not needed afterwards."""
        self._rank = rank
        self._peers = peers
        self._ranks = len(peers) + 1
        whole = torch.from_file(
            f"/proc/self/fd/{memory}", shared=True, size=_bytes_of(self._ranks), dtype=torch.uint8
        )
        self._slots = whole.view(2, self._ranks, _SLOT_BYTES)
        self._turn = 0
        weakref.finalize(self, _close, list(peers.values()))

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        """x (b, m) of each rank -> out (b, ranks, m)."""
        for rows, columns in _pieces(len(x), x.shape[1], x.element_size()):
            slots = self._next(x[rows, columns])
            slots[self._rank].copy_(x[rows, columns])
            self._meet(_GATHER, slots[0].nbytes)
            out[rows, :, columns].copy_(slots.transpose(0, 1))

    def reduce_scatter(self, out: Tensor, x: Tensor) -> None:
        """x (b, ranks, m) of each rank -> the sum over ranks of this rank's part, out (b, m)."""
        for rows, columns in _pieces(len(out), out.shape[1], out.element_size() * self._ranks):
            slots = self._next(x[rows, :, columns].transpose(0, 1))
            for rank in self._peers:
                slots[self._rank, rank].copy_(x[rows, rank, columns])
            self._meet(_SCATTER, slots[0].nbytes)
            mine, total = x[rows, self._rank, columns], out[rows, columns]
            if self._ranks == 2:  # twice as fast as a sum over a dim of two
                torch.add(mine, slots[1 - self._rank, self._rank], out=total)
            else:
                slots[self._rank, self._rank].copy_(mine)
                torch.sum(slots[:, self._rank], dim=0, out=total)

    def all_reduce(self, x: Tensor) -> None:
        """x (m,) of each rank -> their sum, in place; the same bits on every rank."""
        for _, columns in _pieces(1, len(x), x.element_size()):
            slots = self._next(x[columns])
            slots[self._rank].copy_(x[columns])
            self._meet(_SUM, slots[0].nbytes)
            torch.sum(slots, dim=0, out=x[columns])

    def _next(self, like: Tensor) -> Tensor:
        """Every rank's slot of this turn, as tensors of this shape and dtype: (ranks, …)."""
        self._turn = 1 - self._turn
        return self._slots[self._turn, :, : like.nbytes].view(like.dtype).view(self._ranks, *like.shape)

    def _meet(self, collective: bytes, size: int) -> None:
        """Return when every rank has come to the same place. What they wrote before can be read then."""
        packet = _PACKET.pack(collective, size)
        for rank, peer in self._peers.items():
            _send(peer, packet, rank)
        for rank, peer in self._peers.items():
            theirs = _receive(peer, rank)
            if theirs != packet:
                kind, their_size = _PACKET.unpack(theirs)
                raise RuntimeError(
                    f"ranks of a group run different collectives: {size} bytes of {collective!r} here, "
                    f"{their_size} of {kind!r} on its rank {rank}"
                )


def _bytes_of(ranks: int) -> int:
    return 2 * ranks * _SLOT_BYTES


def _pieces(rows: int, columns: int, itemsize: int) -> Iterator[tuple[slice, slice]]:
    """A (rows, columns) array in parts that fit a slot: whole rows where one does, else parts of one."""
    if 0 < columns * itemsize <= _SLOT_BYTES:
        height = _SLOT_BYTES // (columns * itemsize)
        yield from ((slice(i, i + height), slice(None)) for i in range(0, rows, height))
        return
    width = _SLOT_BYTES // itemsize
    for row in range(rows):
        yield from ((slice(row, row + 1), slice(i, i + width)) for i in range(0, columns, width))


def _send(peer: socket.socket, packet: bytes, rank: int) -> None:
    try:
        peer.send(packet)
    except OSError as error:
        raise dist.DistNetworkError(f"rank {rank} of a group is gone: {error}") from None


def _receive(peer: socket.socket, rank: int) -> bytes:
    try:
        packet = peer.recv(_PACKET.size)
    except TimeoutError:
        waited = f"{peer.gettimeout():g} s"
        raise dist.DistNetworkError(f"rank {rank} of a group does not answer within {waited}") from None
    except OSError as error:
        raise dist.DistNetworkError(f"rank {rank} of a group is gone: {error}") from None
    if not packet:
        raise dist.DistNetworkError(f"rank {rank} of a group is gone")
    return packet


def _close(sockets: list[socket.socket]) -> None:
    for one in sockets:
        one.close()


# --- who is where


def _connect(group: dist.ProcessGroup) -> SharedMemory | None:
    """None where a rank is on another machine, or in a container that shows it other files."""
    rank, ranks = group.rank(), group.size()
    box = [_make_folder() if rank == 0 else None]
    dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
    if box[0] is None:
        return None
    folder = Path(box[0])
    listener = _listen(folder / str(rank), ranks)
    places: list[str | None] = [None] * ranks
    dist.all_gather_object(places, _boot_id() if listener else None, group=group)
    memory = None
    if listener and places[0] is not None and len(set(places)) == 1:
        timeout: timedelta = group._get_backend(torch.device("cpu")).options._timeout
        memory = _share(rank, _peers(folder, listener, rank, ranks, timeout))
    if listener:
        listener.close()
        (folder / str(rank)).unlink()
    dist.barrier(group)
    if rank == 0:
        folder.rmdir()
    return memory


def _make_folder() -> str | None:
    """For the sockets' names, until all are connected. None where nothing can be written."""
    try:
        return tempfile.mkdtemp(prefix="parallel2d-")
    except OSError:
        return None


def _boot_id() -> str | None:
    """Names this machine until it starts again; a file that two of them see may be on a network."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return None


def _listen(path: Path, ranks: int) -> socket.socket | None:
    # Packets keep their bounds, and a peer's death ends the connection.
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(str(path))
    except OSError:
        listener.close()
        return None
    listener.listen(ranks)
    return listener


def _peers(
    folder: Path, listener: socket.socket, rank: int, ranks: int, timeout: timedelta
) -> dict[int, socket.socket]:
    """A connection to each other rank: calls go to the lower ones, which listen by now."""
    peers = {}
    for other in range(rank):
        peers[other] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        peers[other].connect(str(folder / str(other)))
        peers[other].send(_PACKET.pack(_HELLO, rank))
    listener.settimeout(timeout.total_seconds())
    for _ in range(rank + 1, ranks):
        caller, _address = listener.accept()
        peers[_PACKET.unpack(caller.recv(_PACKET.size))[1]] = caller
    for peer in peers.values():
        peer.settimeout(timeout.total_seconds())
    return dict(sorted(peers.items()))


def _share(rank: int, peers: dict[int, socket.socket]) -> SharedMemory:
    """Rank 0's memory, which has no name and ends with the last process that maps it."""
    if rank == 0:
        descriptor = os.memfd_create("parallel2d")
        os.truncate(descriptor, _bytes_of(len(peers) + 1))  # pages come as they are written to
        for peer in peers.values():
            socket.send_fds(peer, [_PACKET.pack(_HELLO, 0)], [descriptor])
    else:
        descriptor = socket.recv_fds(peers[0], _PACKET.size, 1)[1][0]
    memory = SharedMemory(descriptor, peers, rank)
    os.close(descriptor)
    return memory


# --- as operations of torch, so that whoever watches a step's collectives sees them


def _all_gather(out: Tensor, x: Tensor, group: str) -> None:
    _known(group).all_gather(out, x)


def _reduce_scatter(out: Tensor, x: Tensor, group: str) -> None:
    _known(group).reduce_scatter(out, x)


def _all_reduce(x: Tensor, group: str) -> None:
    _known(group).all_reduce(x)


def _known(name: str) -> SharedMemory:
    memory = _of_group[_resolve_process_group(GroupName(name))]
    assert memory is not None, "whoever calls has asked shared_memory()"
    return memory


_library = torch.library.Library("parallel2d", "DEF")
_library.define("all_gather_(Tensor(a!) out, Tensor x, str group) -> ()")
_library.define("reduce_scatter_(Tensor(a!) out, Tensor x, str group) -> ()")
_library.define("all_reduce_(Tensor(a!) x, str group) -> ()")
_library.impl("all_gather_", _all_gather, "CPU")
_library.impl("reduce_scatter_", _reduce_scatter, "CPU")
_library.impl("all_reduce_", _all_reduce, "CPU")
