"""The files of a Hugging Face folder: config.json, *.safetensors, and the index where they are several.

Nothing is unpickled: the headers of safetensors are JSON, and the rest is numbers.
Format: https://huggingface.co/docs/safetensors.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from parallel2d.checkpoint.durable import sync, write_text
from parallel2d.errors import UserError

CONFIG_FILE = "config.json"
_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_FLOATS = ("F64", "F32", "F16", "BF16")


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
    """What the files hold: shapes at once, numbers slice by slice."""

    def __init__(self, slices: Mapping[str, Any]) -> None:
        self._slices = slices  # safetensors' handles: each reads from the file what it is asked for
        odd = [f"{n} is {s.get_dtype()}" for n, s in slices.items() if s.get_dtype() not in _FLOATS]
        if odd:
            raise UserError(
                f"{len(odd)} tensors are not of {', '.join(_FLOATS)}, and are not read: {'; '.join(odd[:10])}"
            )
        self.shapes: dict[str, tuple[int, ...]] = {n: tuple(s.get_shape()) for n, s in slices.items()}

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """One block of a stored tensor, in its own dtype, on the CPU."""
        block = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
        return self._slices[name][block]


@contextmanager
def open_folder(folder: Path) -> Iterator[StoredTensors]:
    """The tensors of the files that the index lists, or of model.safetensors where there is no index."""
    with ExitStack() as handles:
        places = _index_of(folder)
        names = sorted(set(places.values())) if places else [_SINGLE_FILE]
        slices: dict[str, Any] = {}
        for name in names:
            file = _open(folder / name, handles)
            held = set(file.keys())
            listed = {tensor for tensor, place in places.items() if place == name} if places else held
            if missing := sorted(listed - held):
                raise UserError(f"{folder / _INDEX_FILE} is damaged: {name} does not hold {missing[:10]}")
            if stray := sorted(held - listed):
                raise UserError(f"{folder / _INDEX_FILE} is damaged: it does not list {stray[:10]} of {name}")
            slices |= {tensor: file.get_slice(tensor) for tensor in listed}
        yield StoredTensors(slices)


def _index_of(folder: Path) -> dict[str, str]:
    """{tensor: file} of the index, {} if there is none. A file may not lie outside the folder."""
    path = folder / _INDEX_FILE
    if not path.exists():
        if not (folder / _SINGLE_FILE).is_file():
            raise UserError(
                f"{folder} has neither {_SINGLE_FILE} nor {_INDEX_FILE}: "
                f"only safetensors are read, nothing pickled"
            )
        return {}
    if (folder / _SINGLE_FILE).exists():
        raise UserError(
            f"{folder} has both {_SINGLE_FILE} and {_INDEX_FILE}: remove the one that is not meant"
        )
    places = _read_json(path).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(f, str) for f in places.values()):
        raise UserError(f"{path} is damaged: its weight_map must name a file for each tensor")
    for name in set(places.values()):
        parts = PurePosixPath(name).parts
        if PurePosixPath(name).is_absolute() or ".." in parts or not name.endswith(".safetensors"):
            raise UserError(f"{path} lists {name!r}, which is not a safetensors file in the folder")
    return places


def _open(path: Path, handles: ExitStack) -> Any:
    try:
        return handles.enter_context(safe_open(path, framework="pt"))
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read as safetensors: {error}") from None


@contextmanager
def write_folder(
    folder: Path, config: Mapping[str, Any], sizes: Mapping[str, int], max_file_bytes: float
) -> Iterator[Callable[[str, Tensor], None]]:
    """Write a folder under a temporary name, which becomes its own at the end; after an error it is removed.

    Gives a function to hand tensors to, one at a time and in the order of `sizes` (bytes of each).
    Holds the tensors of one file.
    """
    files = _split(sizes, max_file_bytes)
    writing = folder.with_name(f".{folder.name}.writing-{os.getpid()}")
    held: dict[str, Tensor] = {}

    def add(name: str, tensor: Tensor) -> None:
        held[name] = tensor.cpu()
        file = places[name]
        if len(held) == len(files[file]):
            _write_tensors(writing / file, held)
            held.clear()

    places = {tensor: file for file, tensors in files.items() for tensor in tensors}
    writing.mkdir(parents=True)
    try:
        _write_json(writing / CONFIG_FILE, config)
        yield add
        if len(files) > 1:
            total = {"total_size": sum(sizes.values())}
            _write_json(writing / _INDEX_FILE, {"metadata": total, "weight_map": places})
        sync(writing)
        writing.rename(folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(writing, ignore_errors=True)


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
        return {_SINGLE_FILE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, path, metadata={"format": "pt"})
    # safetensors makes files that only their owner reads; ours are like any other.
    path.chmod((path.parent / CONFIG_FILE).stat().st_mode)
    sync(path)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(content, indent=2, sort_keys=True) + "\n")
