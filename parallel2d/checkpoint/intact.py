"""Whether files are what was written: plain files of their size and hash."""

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from parallel2d.errors import UserError

_READ_BYTES = 4 * 2**20

# 128 bits of XXH3 detect damage as well as a cryptographic hash does, at the speed of memory. They do
# not detect forgery; nothing in a checkpoint is executed, so a forged one is wrong numbers and no more.
Hash = xxhash.xxh3_128


class DamagedCheckpoint(UserError):
    """Files of a checkpoint that are not what was written."""


@dataclass(frozen=True)
class StoredFile:
    """A file's size in bytes and the hash of all of it."""

    bytes: int
    xxh3_128: str


def open_file(folder: Path, name: str) -> Any:
    """A file of a checkpoint for reading, unbuffered; DamagedCheckpoint if it is missing or no plain file.

    A link is refused: it could point anywhere.
    """
    path = folder / name
    try:
        # Not to block on a pipe, and not to follow a link.
        handle = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb", buffering=0)
    except OSError as error:
        raise DamagedCheckpoint(f"{path} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(handle.fileno()).st_mode):
        handle.close()
        raise DamagedCheckpoint(f"{path} is no plain file")
    return handle


def file_faults(folder: Path, files: Mapping[str, StoredFile], besides: str) -> dict[str, str]:
    """{file: what is wrong with it}, by name and size; contents are not read.

    `besides`: a name that may be there too.
    """
    faults = {
        name: fault for name, file in sorted(files.items()) if (fault := _fault_of(folder / name, file))
    }
    try:
        present = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise DamagedCheckpoint(f"{folder} cannot be read: {error.strerror}") from None
    return faults | {name: "not of this checkpoint" for name in present if name not in {*files, besides}}


def _fault_of(path: Path, file: StoredFile) -> str:
    try:
        status = os.lstat(path)
    except OSError as error:
        return str(error.strerror)
    if not stat.S_ISREG(status.st_mode):
        return "no plain file"
    return "" if status.st_size == file.bytes else f"{status.st_size:,} bytes instead of {file.bytes:,}"


def hash_faults(folder: Path, files: Mapping[str, StoredFile]) -> Iterator[tuple[str, str]]:
    """(file, what is wrong with its content or "") for each, after reading all of it."""
    for name in sorted(files):
        try:
            with open_file(folder, name) as handle:
                found = hash_of_file(handle)
        except (DamagedCheckpoint, OSError) as error:
            yield name, str(error)
        else:
            yield name, "" if found == files[name].xxh3_128 else f"its content was changed (hash {found})"


def told(folder: Path, faults: Mapping[str, str], shown: int = 10) -> str:
    """The first faults of a folder's files on one line, for people."""
    more = f", and {len(faults) - shown} more" if len(faults) > shown else ""
    each = [f"{name}: {fault}" for name, fault in list(faults.items())[:shown]]
    return f"{folder} is damaged: {'; '.join(each)}{more}"


def hash_of_file(handle: Any) -> str:
    hashed = Hash()
    buffer = bytearray(_READ_BYTES)
    while count := handle.readinto(buffer):
        hashed.update(memoryview(buffer)[:count])
    return hashed.hexdigest()
