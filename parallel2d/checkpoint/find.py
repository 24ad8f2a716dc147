"""The checkpoints of a folder: which are whole, which are damaged, and their names."""

import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from parallel2d.checkpoint.intact import DamagedCheckpoint, file_faults, told
from parallel2d.checkpoint.manifest import DCP_METADATA_FILE, MANIFEST_FILE, Manifest, read_manifest
from parallel2d.errors import UserError

_NAME = re.compile(r"step-([0-9]{8,})")
_SET_ASIDE = ".damaged"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files are there in their sizes; their content is checked when it is read."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def step_in_name(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def open_checkpoint(path: Path) -> Checkpoint:
    """DamagedCheckpoint if the manifest is not as it was written, or files are missing, foreign or cut."""
    manifest = read_manifest(path)
    if faults := file_faults(path, manifest.files, besides=MANIFEST_FILE):
        raise DamagedCheckpoint(told(path, faults))
    return Checkpoint(path, manifest)


def fault_of_name(path: Path, step: int) -> str:
    """ "" or that a folder's name is another step's."""
    differs = _NAME.fullmatch(path.name) is not None and step_in_name(path) != step
    return f"it holds step {step}" if differs else ""


def checkpoints_in(folder: Path) -> tuple[list[Checkpoint], dict[Path, DamagedCheckpoint]]:
    """Those that are whole, oldest first, and what is wrong with the others; other names are passed over."""
    whole: list[Checkpoint] = []
    damaged: dict[Path, DamagedCheckpoint] = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        if not _NAME.fullmatch(path.name):
            continue
        try:
            checkpoint = open_checkpoint(path)
            if fault := fault_of_name(path, checkpoint.step):
                raise DamagedCheckpoint(f"{path} is damaged: {fault}")
        except DamagedCheckpoint as error:
            damaged[path] = error
        else:
            whole.append(checkpoint)
    newest_first = sorted(damaged, key=step_in_name, reverse=True)
    return sorted(whole, key=lambda c: c.step), {path: damaged[path] for path in newest_first}


def is_checkpoint(path: Path) -> bool:
    """Whether a path is a checkpoint's, be it damaged, and not a run folder's."""
    if not path.is_dir():
        return False
    indexes = (MANIFEST_FILE, DCP_METADATA_FILE)
    return _NAME.fullmatch(path.name) is not None or any((path / name).exists() for name in indexes)


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that a path means: itself, or the newest one of a run folder, be it damaged.

    An older one in its place would hide that the newest is.
    """
    if is_checkpoint(path):
        return path
    _, whole, damaged = checkpoints_of_run(path)
    return newest_path(whole, damaged)


def checkpoints_of_run(path: Path) -> tuple[Path, list[Checkpoint], dict[Path, DamagedCheckpoint]]:
    """The folder of a run that holds checkpoints, and those; UserError if there is none, be it damaged."""
    for folder in (path / "checkpoints", path):
        whole, damaged = checkpoints_in(folder)
        if whole or damaged:
            return folder, whole, damaged
    raise UserError(f"{path} is neither a checkpoint (…/step-00000200) nor a run folder that holds one")


def newest_path(whole: Iterable[Checkpoint], damaged: Iterable[Path]) -> Path:
    """Of the largest step, whole or not."""
    return max([*(checkpoint.path for checkpoint in whole), *damaged], key=step_in_name)


def delete(path: Path) -> None:
    """Out of sight first, so that a crash in between leaves no half checkpoint behind."""
    doomed = path.with_name(path.name + ".tmp")
    path.rename(doomed)
    shutil.rmtree(doomed)


def set_aside(path: Path) -> Path:
    """Give a damaged checkpoint a name that no run reads or writes, so that its step can be saved again."""
    names = [path.with_name(f"{path.name}{_SET_ASIDE}{number}") for number in ("", *range(2, 1000))]
    aside = next(name for name in names if not name.exists())
    return path.rename(aside)


def remove_leftovers(folder: Path) -> None:
    """Delete what an interrupted save or deletion left; for one process, when no save runs."""
    for path in folder.glob("step-*.tmp") if folder.is_dir() else ():
        if _NAME.fullmatch(path.stem):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
