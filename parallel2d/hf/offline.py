"""A checkpoint to a Hugging Face folder and back, by one process and without a mesh.

The model is on meta and gives names and shapes only. Numbers pass through a buffer: what is held at a
time is one block of a tensor and one piece of a file, or one tensor that is stored transposed.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from parallel2d.checkpoint.files import DataFile, StoredBlocks, commit, write_error
from parallel2d.checkpoint.intact import DamagedCheckpoint, StoredFile, file_faults, told
from parallel2d.checkpoint.manifest import (
    MANIFEST_FILE,
    WEIGHTS,
    Manifest,
    StoredBlock,
    StoredTensor,
    versions,
)
from parallel2d.checkpoint.rows import row_boxes
from parallel2d.checkpoint.state import mesh_of
from parallel2d.errors import UserError
from parallel2d.hf.companions import Companion, copy_to_folder, keep
from parallel2d.hf.folder import StoredTensors, open_folder
from parallel2d.hf.weights import (
    Names,
    Place,
    as_stored,
    read_block,
    require_finite,
    require_model,
    require_tensors,
    stored_shape,
)
from parallel2d.hf.write import Kind, require_new, temporary, write_folder
from parallel2d.shards import Box

_BUFFER_BYTES = 128 * 2**20
_ITEM_BYTES = 4096  # what torch.save writes around a tensor's numbers is less

Told = Callable[[int], object]  # called with the bytes written since the last call


def export_hf(
    source: Path,
    manifest: Manifest,
    folder: Path,
    model: nn.Module,
    names: Names,
    config_json: Mapping[str, Any],
    companions: Sequence[Companion] = (),
    dtype: torch.dtype | None = None,
    max_shard_bytes: float = 5e9,
    progress: Told = lambda _: None,
) -> dict[str, Kind]:
    """Write the weights of a checkpoint as save_hf does, and return what was written. No communication.

    Optimizer state is left alone. Every piece read is checked against its hash, every file written is
    read again.

    Args:
        source: the checkpoint.
        manifest: of it.
        folder: to be made; one with anything in it is refused, and one inside the checkpoint.
        model: on meta, of the checkpoint's class and configuration.
        names: where each parameter goes; a tied one is written once.
        config_json: the folder's config.json, to which the dtype is added.
        companions: files to copy.
        dtype: to cast to, None for what is stored; numbers that it cannot hold are refused.
        max_shard_bytes: a file is no larger, unless one tensor alone is.
    """
    require_new(folder)
    _require_source(source, manifest, folder)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    stored = {n.removeprefix(WEIGHTS): t for n, t in manifest.tensors.items() if n.startswith(WEIGHTS)}
    require_tensors(source, shapes, {name: tensor.shape for name, tensor in stored.items()})
    pieces: dict[str, dict[int, str]] = {}
    for name in shapes:
        pieces.setdefault(names[name][0], {})[names[name][2]] = name
    kinds = {t: _kind([stored[n] for n in of.values()], names[of[0]], dtype) for t, of in pieces.items()}
    # Of several dtypes, transformers loads all as the one that config.json names.
    widest = reduce(torch.promote_types, [kind.dtype for kind in kinds.values()])
    config = {**config_json, "torch_dtype": str(widest).removeprefix("torch.")}
    writing = write_folder(folder, config, kinds, max_shard_bytes)
    with StoredBlocks(source, manifest) as blocks, writing as writer:
        with writer.telling():
            copy_to_folder(companions, writer.folder)
        for tensor, kind in writer.kinds.items():
            of = pieces[tensor]
            for rows in _rows(kind, of, shapes, names[of[0]][1], blocks):
                require_finite(tensor, rows)
                writer.add(tensor, rows)
                progress(rows.nbytes)
    return writer.kinds


def _require_source(source: Path, manifest: Manifest, folder: Path) -> None:
    if folder.resolve().is_relative_to(source.resolve()):
        raise UserError(f"{folder} lies inside the checkpoint {source}: give a folder outside of it")
    if faults := file_faults(source, manifest.files, MANIFEST_FILE):
        raise DamagedCheckpoint(told(source, faults))


def _kind(stored: Sequence[StoredTensor], place: Place, dtype: torch.dtype | None) -> Kind:
    """What the parameters that are parts of one tensor become."""
    own = reduce(torch.promote_types, [tensor.torch_dtype for tensor in stored])
    return Kind(dtype or own, stored_shape(stored[0].shape, place))


def _rows(
    kind: Kind,
    pieces: Mapping[int, str],
    shapes: Mapping[str, tuple[int, ...]],
    transpose: bool,
    blocks: StoredBlocks,
) -> Iterator[Tensor]:
    """A tensor as it goes into the folder, some rows at a time; all at once if it is transposed.

    A few rows of a transposed tensor are a little of every piece that was stored: the pieces would be
    read again and again.
    """
    for box in row_boxes(kind.shape, kind.dtype.itemsize, kind.bytes if transpose else _BUFFER_BYTES):
        rows = torch.empty(box.sizes, dtype=kind.dtype)
        # As the parameters see it: one after the other along dim 0.
        ours = rows.T if transpose else rows
        wanted = Box(box.offsets, tuple(ours.shape))
        for part, name in pieces.items():
            shape = shapes[name]
            whole = Box((part * shape[0], *[0] * (len(shape) - 1)), shape)
            if common := wanted.intersection(whole):
                out = common.within(wanted).cut(ours)
                blocks.read_into(WEIGHTS + name, common.within(whole), out)
        yield rows


def import_hf(
    folder: Path,
    destination: Path,
    model: nn.Module,
    names: Names,
    trainer: Mapping[str, Any],
    companions: Sequence[Companion] = (),
    dtype: torch.dtype | None = torch.float32,
    max_file_bytes: float = 5e9,
    progress: Told = lambda _: None,
) -> Manifest:
    """Make a checkpoint of weights only, at step 0, from a Hugging Face folder. No communication.

    As strict as load_hf. The folder's config.json and `companions` are kept in the checkpoint.

    Args:
        folder: with config.json and safetensors.
        destination: the checkpoint, to be made; a folder with anything in it is refused.
        model: on meta, of the class and configuration that config.json asks for.
        names: where each parameter lies.
        trainer: what a training loop finds beside the tensors; its `model` is the configuration.
        companions: files to keep.
        dtype: to cast to, None for what is stored; numbers that it cannot hold are refused.
        max_file_bytes: a data file is no larger, unless one block alone is.
    """
    require_new(destination)
    stored = open_folder(folder)
    names = as_stored(names, stored)
    require_model(folder, model, names, stored)
    writing = temporary(destination)
    try:
        writing.mkdir(parents=True)
        files = keep(folder, companions, writing)
        with _DataFiles(writing, max_file_bytes) as data:
            tensors = {
                WEIGHTS + name: _store(tuple(p.shape), names[name], stored, dtype, data, progress)
                for name, p in model.named_parameters()
            }
            data.close()
        kind, mesh = type(model).__name__, mesh_of(model)
        manifest = Manifest(0, mesh, versions(), kind, "", trainer, files | data.files, tensors)
        commit(writing, destination, manifest)
    except OSError as error:
        kinds = [dtype or stored.dtypes[names[name][0]] for name, _ in model.named_parameters()]
        needed = sum(p.numel() * kind.itemsize for p, kind in zip(model.parameters(), kinds, strict=True))
        raise UserError(write_error(destination.parent, error, needed)) from None
    finally:
        shutil.rmtree(writing, ignore_errors=True)
    return manifest


def _store(
    shape: tuple[int, ...],
    place: Place,
    stored: StoredTensors,
    dtype: torch.dtype | None,
    data: "_DataFiles",
    progress: Told,
) -> StoredTensor:
    """Write a parameter in blocks along dim 0."""
    dtype = dtype or stored.dtypes[place[0]]
    blocks = []
    for box in row_boxes(shape, dtype.itemsize, _BUFFER_BYTES):
        block = read_block(stored, place, shape, box).to(dtype)
        require_finite(place[0], block)
        blocks.append(data.add(block, box.offsets))
        progress(block.nbytes)
    return StoredTensor(str(dtype).removeprefix("torch."), shape, {}, tuple(blocks))


class _DataFiles:
    """Data files filled one after the other, named as if each were another rank's."""

    def __init__(self, folder: Path, max_file_bytes: float) -> None:
        self.folder = folder
        self.files: dict[str, StoredFile] = {}
        self._max_file_bytes = max_file_bytes
        self._open: DataFile | None = None
        self._filled = 0

    def __enter__(self) -> "_DataFiles":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self._open:
            self._open.__exit__(kind, error, trace)

    def add(self, block: Tensor, offsets: tuple[int, ...]) -> StoredBlock:
        if self._open and self._filled + block.nbytes + _ITEM_BYTES > self._max_file_bytes:
            self.close()
        if self._open is None:
            self._open = DataFile(self.folder / f"__{len(self.files)}_0.distcp")
        stored = self._open.add(block, offsets)
        self._filled = sum(stored.item)
        return stored

    def close(self) -> None:
        """Have the last file on disk."""
        if self._open:
            self.files[self._open.path.name] = self._open.close()
        self._open, self._filled = None, 0
