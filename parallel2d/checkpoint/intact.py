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


def file_faults(folder: Path, files: Mapping[str, StoredFile], besides: str) -> list[str]:
    """What is wrong with the files of a folder by name and size; their content is not read.

    `besides`: a name that may be there too.
    """
    faults = []
    for name, file in sorted(files.items()):
        try:
            status = os.lstat(folder / name)
        except OSError as error:
            faults.append(f"{name}: {error.strerror}")
            continue
        if not stat.S_ISREG(status.st_mode):
            faults.append(f"{name}: no plain file")
        elif status.st_size != file.bytes:
            faults.append(f"{name}: {status.st_size:,} bytes instead of {file.bytes:,}")
    present = sorted(path.name for path in folder.iterdir())
    faults += [f"{name}: not of this checkpoint" for name in present if name not in {*files, besides}]
    return faults


def hash_faults(folder: Path, files: Mapping[str, StoredFile]) -> Iterator[tuple[str, str]]:
    """(name, what is wrong or "") for each file, after reading all of it."""
    for name in sorted(files):
        try:
            with open_file(folder, name) as handle:
                found = hash_of_file(handle)
        except DamagedCheckpoint as error:
            yield name, str(error)
        else:
            expected = files[name].xxh3_128
            yield name, "" if found == expected else f"{name}: its content was changed (hash {found})"


def hash_of_file(handle: Any) -> str:
    hashed = Hash()
    buffer = bytearray(_READ_BYTES)
    while count := handle.readinto(buffer):
        hashed.update(memoryview(buffer)[:count])
    return hashed.hexdigest()
