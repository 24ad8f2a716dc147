"""The folder that a run writes to: `--out`."""

import fcntl
from pathlib import Path
from typing import IO

from parallel2d.errors import UserError

_HEADER = "# Written by parallel2d: the resolved configuration of the newest start.\n"


def require_usable(out: Path) -> None:
    """One UserError for a folder that cannot be written to or that holds a config.yaml of somebody's own."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out} cannot be a folder: {error.strerror}") from None
    config = out / "config.yaml"
    if config.exists() and not config.read_text(errors="replace").startswith(_HEADER):
        raise UserError(f"{config} was not written by a run and would be overwritten: use another --out")


def write_config(out: Path, text: str) -> None:
    (out / "config.yaml").write_text(_HEADER + text)


def lock(out: Path) -> IO[str]:
    """Keep other runs out of the folder for as long as the returned file is open."""
    handle = (out / ".lock").open("w")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise UserError(f"another run is writing to --out {out}: wait for it, or use another --out") from None
    return handle
