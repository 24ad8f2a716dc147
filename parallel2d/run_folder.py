"""The folder that a run writes to: `--out`."""

import fcntl
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
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


def next_commands(out: str, steps: int, meshes: Sequence[tuple[int, int]]) -> str:
    """What to type next: go on until `steps`, on this mesh and on others (dp, tp), and look at the curves."""
    out = shlex.quote(out)
    # Where the environment is not activated, its commands need their folder.
    folder = "" if shutil.which("torchrun") else os.path.relpath(Path(sys.executable).parent) + "/"
    go_on = f"{folder}torchrun {shlex.quote(sys.argv[0])} --config {out}/config.yaml --steps {steps}"
    other_mesh = [f"{go_on} --dp {dp} --tp {tp} --dp_replicate 1" for dp, tp in meshes]
    return "\n  ".join(["next", go_on, *other_mesh, f"{folder}tensorboard --logdir {out}"])
