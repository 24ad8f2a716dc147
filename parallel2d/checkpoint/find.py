"""Which checkpoint a path means."""

import re
from pathlib import Path

from parallel2d.checkpoint.manifest import DCP_METADATA_FILE, MANIFEST_FILE
from parallel2d.errors import UserError

_NAME = re.compile(r"step-(\d{8,})")


def find_checkpoint(path: Path) -> Path:
    """The path itself if it is a checkpoint, or the newest of a run folder (runs/x or runs/x/checkpoints).

    A folder that is called step-00000200 or has DCP's index counts as a checkpoint without its manifest
    too: it is a damaged one, and an older one in its place would hide that.
    """
    if (path / MANIFEST_FILE).exists() or (path / DCP_METADATA_FILE).exists() or _is_step(path):
        return path
    steps = [step for folder in (path, path / "checkpoints") for step in _steps_in(folder)]
    if steps:
        return max(steps)[1]
    if not path.is_dir():
        raise UserError(f"{path} is not a folder: give a checkpoint or a run folder that holds one")
    raise UserError(
        f"{path} is neither a checkpoint (it has no {MANIFEST_FILE}) nor a run folder that holds one "
        f"(checkpoints/step-00000200)"
    )


def _is_step(path: Path) -> bool:
    return _NAME.fullmatch(path.name) is not None and path.is_dir()


def _steps_in(folder: Path) -> list[tuple[int, Path]]:
    if not folder.is_dir():
        return []
    found = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return [(int(match[1]), path) for match, path in found if match and path.is_dir()]
