"""The small files beside the weights of a Hugging Face folder: tokenizer, how to generate, chat template.

A checkpoint made from such a folder keeps them as plain files of its own, each under its name with a
prefix, listed and hashed in the manifest like all others.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel2d.checkpoint.files import copy
from parallel2d.checkpoint.intact import DamagedCheckpoint, Hash, StoredFile, open_file
from parallel2d.checkpoint.manifest import Manifest
from parallel2d.errors import UserError
from parallel2d.hf.folder import CONFIG_FILE, read_config

_PATTERNS = (
    "tokenizer*.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template*",
)
# No data file of a checkpoint begins like this.
_PREFIX = "hf-"


@dataclass(frozen=True)
class Companion:
    """A file to carry over.

    Args:
        name: in a Hugging Face folder.
        path: where it is.
        stored: what the checkpoint knows of it, if it is in one.
    """

    name: str
    path: Path
    stored: StoredFile | None = None


def companions_of(folder: Path) -> list[Companion]:
    """Those of a Hugging Face folder."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder with tokenizer files")
    found = {path for pattern in _PATTERNS for path in folder.glob(pattern) if path.is_file()}
    return [Companion(path.name, path) for path in sorted(found)]


def kept_companions(folder: Path, manifest: Manifest) -> list[Companion]:
    """Those that a checkpoint keeps; not the config.json."""
    kept = {name: file for name, file in manifest.files.items() if name.startswith(_PREFIX)}
    named = {name.removeprefix(_PREFIX): (folder / name, file) for name, file in kept.items()}
    return [Companion(name, *of) for name, of in named.items() if name != CONFIG_FILE]


def copy_to_folder(companions: Sequence[Companion], folder: Path) -> None:
    for companion in companions:
        _copy(companion, folder / companion.name)


def keep(source: Path, companions: Sequence[Companion], folder: Path) -> dict[str, StoredFile]:
    """Copy them and the config.json of `source` into a checkpoint being written: what its manifest lists."""
    files = [*companions, Companion(CONFIG_FILE, source / CONFIG_FILE)]
    return {_PREFIX + file.name: _copy(file, folder / (_PREFIX + file.name)) for file in files}


def kept_config(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """The config.json that a checkpoint keeps; {} if none."""
    stored = manifest.files.get(_PREFIX + CONFIG_FILE)
    if stored is None:
        return {}
    with open_file(folder, _PREFIX + CONFIG_FILE) as handle:
        data = handle.read()
    if Hash(data).hexdigest() != stored.xxh3_128:
        raise DamagedCheckpoint(f"{folder / (_PREFIX + CONFIG_FILE)} is damaged: its content was changed")
    return json.loads(data)


def config_beside(folder: Path) -> dict[str, Any]:
    """The config.json of a folder of tokenizer files; {} if none."""
    return read_config(folder) if (folder / CONFIG_FILE).exists() else {}


def _copy(companion: Companion, target: Path) -> StoredFile:
    """What the copy holds; DamagedCheckpoint if that is not what a checkpoint knows of it."""
    with _open(companion) as reading:
        copied = copy(reading, target)
    if companion.stored not in (None, copied):
        raise DamagedCheckpoint(f"{companion.path} is damaged: its content was changed")
    return copied


def _open(companion: Companion) -> Any:
    if companion.stored:
        return open_file(companion.path.parent, companion.path.name)
    try:
        return open(companion.path, "rb")
    except OSError as error:
        raise UserError(f"{companion.path} cannot be read: {error.strerror}") from None
