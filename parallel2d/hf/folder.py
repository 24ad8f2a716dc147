"""The files of a Hugging Face folder, read: config.json, *.safetensors, the index where they are several.

Nothing is unpickled: the headers of safetensors are JSON, and the rest is numbers.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from parallel2d.errors import UserError

CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder; UserError if it is missing or damaged."""
    return _read_json(folder / CONFIG_FILE)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} is damaged: it holds no JSON object")
    return content


class StoredTensors:
    """What the files of a folder hold: shapes and dtypes at once, numbers slice by slice."""

    def __init__(self, headers: Mapping[str, tuple[Path, str, Sequence[int]]]) -> None:
        odd = [f"{name} is {dtype}" for name, (_, dtype, _) in headers.items() if dtype not in DTYPES]
        if odd:
            raise UserError(
                f"{len(odd)} tensors are not of {', '.join(DTYPES)}, and are not read: {'; '.join(odd[:10])}"
            )
        self._paths = {name: path for name, (path, _, _) in headers.items()}
        self.dtypes = {name: DTYPES[dtype] for name, (_, dtype, _) in headers.items()}
        self.shapes: dict[str, tuple[int, ...]] = {name: tuple(s) for name, (_, _, s) in headers.items()}

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """One block of a stored tensor, in its own dtype, on the CPU; a view of the file."""
        block = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
        # safetensors maps the file, and what was read of a mapping counts as this process's memory
        # until it is closed: so it lives no longer than the block.
        with _open(self._paths[name]) as file:
            return file.get_slice(name)[block]


def open_folder(folder: Path) -> StoredTensors:
    """The tensors of the files that the index lists, or of model.safetensors where there is no index."""
    places = _index_of(folder)
    headers: dict[str, tuple[Path, str, Sequence[int]]] = {}
    for name in sorted(set(places.values())) if places else [SINGLE_FILE]:
        with _open(folder / name) as file:
            held = set(file.keys())
            listed = {tensor for tensor, place in places.items() if place == name} if places else held
            if missing := sorted(listed - held):
                raise UserError(f"{folder / INDEX_FILE} is damaged: {name} does not hold {missing[:10]}")
            if stray := sorted(held - listed):
                raise UserError(f"{folder / INDEX_FILE} is damaged: it does not list {stray[:10]} of {name}")
            for tensor in listed:
                part = file.get_slice(tensor)
                headers[tensor] = (folder / name, part.get_dtype(), part.get_shape())
    return StoredTensors(headers)


def _index_of(folder: Path) -> dict[str, str]:
    """{tensor: file} of the index, {} if there is none. A file may not lie outside the folder."""
    path = folder / INDEX_FILE
    if not path.exists():
        if not (folder / SINGLE_FILE).is_file():
            raise UserError(
                f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}: "
                f"only safetensors are read, nothing pickled"
            )
        return {}
    if (folder / SINGLE_FILE).exists():
        raise UserError(f"{folder} has both {SINGLE_FILE} and {INDEX_FILE}: remove the one that is not meant")
    places = _read_json(path).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(f, str) for f in places.values()):
        raise UserError(f"{path} is damaged: its weight_map must name a file for each tensor")
    for name in set(places.values()):
        parts = PurePosixPath(name).parts
        if PurePosixPath(name).is_absolute() or ".." in parts or not name.endswith(".safetensors"):
            raise UserError(f"{path} lists {name!r}, which is not a safetensors file in the folder")
    return places


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read as safetensors: {error}") from None
