"""Writes that outlive a crash of the machine."""

import os
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """The file's content is on disk when this returns; its name is after `sync` of its folder."""
    path.write_text(text, encoding="utf-8")
    sync(path)


def sync(path: Path) -> None:
    """Have what a file holds, or the names in a folder, on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
