"""The files that hold a checkpoint's numbers: written block by block, read piece by piece.

A block is stored as torch.save writes a tensor, one after the other in a file, which is DCP's layout:
torch.distributed.checkpoint.FileSystemReader reads these files too. Reading here needs only the place
of the numbers, which the manifest has.
"""

import errno
import os
import pickle
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from parallel2d.checkpoint.durable import sync, write_text
from parallel2d.checkpoint.intact import DamagedCheckpoint, Hash, StoredFile, open_file
from parallel2d.checkpoint.manifest import (
    DCP_METADATA_FILE,
    MANIFEST_FILE,
    Manifest,
    Piece,
    StoredBlock,
    piece_rows,
    to_json,
)
from parallel2d.shards import Box

_COPY_BYTES = 2**20


def bytes_of(tensor: Tensor) -> memoryview:
    """The numbers of a contiguous CPU tensor, without a copy."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]  # numpy's stub lacks the buffer protocol below Python 3.12


class DataFile:
    """A file being written. `add` blocks, then `close`: what it holds is on disk then."""

    def __init__(self, path: Path, buffer_bytes: int = 1 << 20) -> None:
        self.path = path
        self._handle = open(path, "xb", buffering=buffer_bytes)  # noqa: SIM115  # closed by our own `close`
        self._failure: OSError | None = None
        self._hash = Hash()
        self._position = 0
        self._awaited, self._found = 0, -1

    def add(self, tensor: Tensor, offsets: tuple[int, ...]) -> StoredBlock:
        """Append a block of a tensor; `offsets`: its place in the whole."""
        tensor = tensor.detach().cpu().contiguous()
        if tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor = tensor.clone()  # torch.save would write the whole storage that this is a view of
        begin = self._position
        self._awaited, self._found = tensor.data_ptr(), begin if tensor.nbytes == 0 else -1
        try:
            with _without_crc32():
                torch.save(tensor, self)  # type: ignore[arg-type]  # it needs no more than write and flush
        except RuntimeError:
            # torch's own complaint about its unfinished archive would hide that the disk is full.
            if self._failure:
                raise self._failure from None
            raise
        if self._found < 0:
            raise RuntimeError("torch.save wrote a copy of the tensor: its place in the file is not known")
        sizes = tuple(tensor.shape)
        item = (begin, self._position - begin)
        return StoredBlock(self.path.name, self._found, tuple(offsets), sizes, item, _hashes(tensor))

    def write(self, data: memoryview) -> int:
        """For torch.save."""
        if len(data) and np.frombuffer(data, np.uint8).ctypes.data == self._awaited:
            self._found = self._position
        try:
            self._handle.write(data)
        except OSError as error:
            self._failure = error
            raise
        self._hash.update(data)
        self._position += len(data)
        return len(data)

    def flush(self) -> None:
        """For torch.save."""

    def close(self) -> StoredFile:
        self._handle.flush()
        os.fsync(self._handle.fileno())
        self._handle.close()
        return StoredFile(self._position, self._hash.hexdigest())

    def __enter__(self) -> "DataFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After a failure, what is still buffered would only fail again.
        with suppress(OSError) if error else nullcontext():
            self._handle.close()


def _hashes(tensor: Tensor) -> tuple[str, ...]:
    """One for each piece of a block."""
    if not tensor.nbytes:
        return ()
    data = bytes_of(tensor)
    rows = piece_rows(tuple(tensor.shape), tensor.itemsize) if tensor.ndim else 1
    step = rows * tensor.nbytes // (tensor.shape[0] if tensor.ndim else 1)
    return tuple(Hash(data[i : i + step]).hexdigest() for i in range(0, len(data), step))


@contextmanager
def _without_crc32() -> Iterator[None]:
    """torch's own checksum takes longer than the disk; the manifest's hashes stand for it."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def copy(reading: Any, target: Path) -> StoredFile:
    """Copy an open file to a new one, which is on disk when this returns; what it holds."""
    hashed, size = Hash(), 0
    with open(target, "xb") as writing:
        while data := reading.read(_COPY_BYTES):
            writing.write(data)
            hashed.update(data)
            size += len(data)
        writing.flush()
        os.fsync(writing.fileno())
    return StoredFile(size, hashed.hexdigest())


def commit(writing: Path, final: Path, manifest: Manifest) -> None:
    """Turn a folder with all data files into a checkpoint: the indexes, and the rename as the last act.

    `manifest.files` gains DCP's index.
    """
    index = pickle.dumps(_dcp_metadata(manifest))
    path = writing / DCP_METADATA_FILE
    path.write_bytes(index)
    sync(path)
    files = {**manifest.files, DCP_METADATA_FILE: StoredFile(len(index), Hash(index).hexdigest())}
    write_text(writing / MANIFEST_FILE, to_json(replace(manifest, files=files)))
    sync(writing)
    writing.rename(final)
    sync(final.parent)


def dcp_tensors(manifest: Manifest) -> dict[str, TensorStorageMetadata]:
    """The tensors in DCP's words."""
    return {
        name: TensorStorageMetadata(
            TensorProperties(dtype=tensor.torch_dtype),
            torch.Size(tensor.shape),
            [ChunkStorageMetadata(torch.Size(b.offsets), torch.Size(b.sizes)) for b in tensor.blocks],
        )
        for name, tensor in manifest.tensors.items()
    }


def _dcp_metadata(manifest: Manifest) -> Metadata:
    """The tensors, and where they are stored, in DCP's words."""
    places = {
        MetadataIndex(name, block.offsets, number): _StorageInfo(block.file, *block.item)
        for name, tensor in manifest.tensors.items()
        for number, block in enumerate(tensor.blocks)
    }
    paths = {name: (name,) for name in manifest.tensors}
    return Metadata(dcp_tensors(manifest), planner_data=paths, storage_data=places, version="1.0.0")  # type: ignore[arg-type]  # a dict of a subtype


class StoredBlocks:
    """The numbers of a checkpoint, read piece by piece, each piece checked. Closed by its `with`."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._handles: dict[str, Any] = {}

    def __enter__(self) -> "StoredBlocks":
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles.values():
            handle.close()

    def read_piece(self, piece: Piece, dtype: torch.dtype) -> Tensor:
        """One piece, of shape `piece.box.sizes`; DamagedCheckpoint if it is not what was written."""
        out = torch.empty(piece.box.sizes, dtype=dtype)
        self.read_piece_into(piece, out)
        return out

    def read_piece_into(self, piece: Piece, out: Tensor) -> None:
        """The same, into contiguous memory on the CPU."""
        if not piece.bytes:
            return
        data = bytes_of(out)
        if self._read(piece.file, piece.start, data) < piece.bytes:
            raise DamagedCheckpoint(f"{self.folder / piece.file} is truncated")
        if Hash(data).hexdigest() != piece.xxh3_128:
            last = piece.start + piece.bytes - 1
            raise DamagedCheckpoint(
                f"{self.folder / piece.file} is damaged: bytes {piece.start:,} to {last:,} were changed"
            )

    def _read(self, name: str, start: int, into: memoryview) -> int:
        """Read at a place until `into` is full or the file ends; bytes read."""
        if name not in self._handles:
            self._handles[name] = open_file(self.folder, name)
        done = 0
        while done < len(into):
            try:
                count = os.preadv(self._handles[name].fileno(), [into[done:]], start + done)
            except OSError as error:
                raise DamagedCheckpoint(f"{self.folder / name} cannot be read: {error.strerror}") from None
            if count == 0:
                break
            done += count
        return done

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """A tensor, or a block of it, on the CPU in its own dtype; reads the pieces that it needs."""
        tensor = self.manifest.tensors[name]
        box = box or Box((0,) * len(tensor.shape), tensor.shape)
        out = torch.empty(box.sizes, dtype=tensor.torch_dtype)
        self.read_into(name, box, out)
        return out

    def read_into(self, name: str, box: Box, out: Tensor) -> None:
        """The same, cast, into a tensor of the box's sizes that may be a view, transposed for example."""
        tensor = self.manifest.tensors[name]
        for piece in self.manifest.pieces(name):
            if (common := box.intersection(piece.box)) is None:
                continue
            source = self.read_piece(piece, tensor.torch_dtype)
            common.within(box).cut(out).copy_(common.within(piece.box).cut(source))


def write_error(folder: Path, error: OSError, needed_bytes: int) -> str:
    """One line for people on why a checkpoint could not be written to a folder."""
    told = f"{folder} cannot be written ({error.strerror})"
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return told
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.is_dir())
    return f"{told}: it needs {needed_bytes:,} bytes and {shutil.disk_usage(there).free:,} bytes are free"
