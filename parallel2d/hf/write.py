"""The files of a Hugging Face folder, written row by row: no more is held than what is handed over.

A safetensors file is the length of a JSON header (8 bytes, little-endian), the header, and the
numbers of its tensors, row-major, one after the other: all places are known before the first number.
Format: https://huggingface.co/docs/safetensors.
"""

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from parallel2d.checkpoint.durable import sync, write_text
from parallel2d.checkpoint.files import bytes_of, write_error
from parallel2d.checkpoint.intact import Hash, hash_of_file
from parallel2d.errors import UserError
from parallel2d.hf.folder import CONFIG_FILE, DTYPES, INDEX_FILE, SINGLE_FILE

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Kind(NamedTuple):
    """What is known of a tensor before its numbers."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class _TensorFile:
    """A safetensors file being written: the header at once, then the numbers in its order."""

    def __init__(self, path: Path, kinds: Mapping[str, Kind]) -> None:
        self.path = path
        self.kinds = kinds
        self._hash = Hash()
        self._handle = open(path, "xb")  # noqa: SIM115  # closed by our own `close`
        self.write(_header(kinds))

    def write(self, data: bytes | memoryview) -> None:
        self._handle.write(data)
        self._hash.update(data)

    def close(self) -> None:
        """Have it on disk, and read it again: UserError if it is not what was written."""
        self._handle.flush()
        os.fsync(self._handle.fileno())
        self._handle.close()
        with open(self.path, "rb", buffering=0) as handle:
            same = hash_of_file(handle) == self._hash.hexdigest()
        if not (same and self._has_its_tensors()):
            raise UserError(
                f"{self.path} does not read back as it was written: the disk or the memory is failing"
            )

    def _has_its_tensors(self) -> bool:
        """Whether safetensors itself finds what should be there."""
        try:
            with safe_open(self.path, framework="pt") as file:
                slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  # not a dict
                found = {n: Kind(DTYPES[s.get_dtype()], tuple(s.get_shape())) for n, s in slices.items()}
        except SafetensorError:
            return False
        return found == dict(self.kinds)

    def abandon(self) -> None:
        with suppress(OSError):  # on a full disk it tries in vain to write what is left in its buffer
            self._handle.close()


def _header(kinds: Mapping[str, Kind]) -> bytes:
    content: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, kind in kinds.items():
        places = [position, position + kind.bytes]
        content[name] = {"dtype": _NAMES[kind.dtype], "shape": kind.shape, "data_offsets": places}
        position += kind.bytes
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class FolderWriter:
    """A folder being written.

    Args:
        folder: under its temporary name; other files may be put into it.
        kinds: of all tensors.
        max_file_bytes: a file is no larger, unless one tensor alone is.
    """

    def __init__(self, folder: Path, kinds: Mapping[str, Kind], max_file_bytes: float) -> None:
        self.folder = folder
        # Wide numbers first, so that every tensor lies where its numbers are aligned.
        self.kinds = dict(sorted(kinds.items(), key=lambda item: -item[1].dtype.itemsize))
        self._files = _split({name: kind.bytes for name, kind in self.kinds.items()}, max_file_bytes)
        self._open: _TensorFile | None = None
        self._awaited = [(file, name) for file, names in self._files.items() for name in names]
        self._written = 0

    def add(self, name: str, rows: Tensor) -> None:
        """The next rows of the tensor, which is the next one of `kinds`; on any device, cast already."""
        file, awaited = self._awaited[0]
        if awaited != name or rows.dtype != self.kinds[name].dtype:
            raise RuntimeError(f"{name} of {rows.dtype} was added where {awaited} is to be written")
        with self.telling():
            if self._open is None:
                kinds = {name: self.kinds[name] for name in self._files[file]}
                self._open = _TensorFile(self.folder / file, kinds)
            self._open.write(bytes_of(rows.detach().cpu().contiguous()))
            self._written += rows.nbytes
            if self._written >= self.kinds[name].bytes:
                self._written = 0
                self._awaited.pop(0)
                if not self._awaited or self._awaited[0][0] != file:
                    self._open.close()
                    self._open = None

    def finish(self, final: Path) -> None:
        """Write the index, and give the folder its own name."""
        if self._awaited:
            raise RuntimeError(f"{self._awaited[0][1]} was not written")
        if len(self._files) > 1:
            places = {tensor: file for file, tensors in self._files.items() for tensor in tensors}
            total = {"total_size": self.bytes}
            write_json(self.folder / INDEX_FILE, {"metadata": total, "weight_map": places})
        sync(self.folder)
        self.folder.rename(final)
        sync(final.parent)

    def abandon(self) -> None:
        if self._open:
            self._open.abandon()

    @property
    def bytes(self) -> int:
        return sum(kind.bytes for kind in self.kinds.values())

    @contextmanager
    def telling(self) -> Iterator[None]:
        """An error of the disk becomes a UserError that says where, and how much room it takes."""
        try:
            yield
        except OSError as error:
            raise UserError(write_error(self.folder.parent, error, self.bytes)) from None


@contextmanager
def write_folder(
    folder: Path, config: Mapping[str, Any], kinds: Mapping[str, Kind], max_file_bytes: float
) -> Iterator[FolderWriter]:
    """Write a folder under a temporary name, its own at the end; after an error it is removed."""
    writer = FolderWriter(temporary(folder), kinds, max_file_bytes)
    try:
        with writer.telling():
            writer.folder.mkdir(parents=True)
            write_json(writer.folder / CONFIG_FILE, config)
        yield writer
        with writer.telling():
            writer.finish(folder)
    finally:
        writer.abandon()
        shutil.rmtree(writer.folder, ignore_errors=True)


def require_new(folder: Path) -> None:
    """UserError if there is something that an export would mix with or overwrite."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not an empty folder: give another one")


def temporary(folder: Path) -> Path:
    """The name beside it that a folder has while it is being written."""
    return folder.with_name(f".{folder.name}.writing-{os.getpid()}")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(content, indent=2, sort_keys=True) + "\n")


def _split(sizes: Mapping[str, int], max_file_bytes: float) -> dict[str, list[str]]:
    """{file: its tensors}, in order, each file as full as it may be."""
    groups: list[list[str]] = [[]]
    free = max_file_bytes
    for name, size in sizes.items():
        if groups[-1] and size > free:
            groups.append([])
            free = max_file_bytes
        groups[-1].append(name)
        free -= size
    if len(groups) == 1:
        return {SINGLE_FILE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}
