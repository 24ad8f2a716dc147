"""What a checkpoint holds: one JSON file that names every tensor, block, file and hash.

    step-00000200/
      manifest.json        this module's; the only thing that says what the other files hold
      __0_0.distcp …       the blocks, one file per rank that wrote, as DCP lays them out
      .metadata            DCP's own index, for torch's tools; nothing here reads it

A tensor is stored in blocks (a rank's share), a block is cut along its dim 0 into pieces of about
`piece_bytes`, and each piece has its own hash: who reads a part of a block checks what it reads.
Reading takes JSON and numbers, nothing is unpickled.
"""

import functools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from parallel2d.checkpoint.intact import DamagedCheckpoint, Hash, StoredFile, open_file
from parallel2d.errors import UserError
from parallel2d.shards import Box

MANIFEST_FILE = "manifest.json"
DCP_METADATA_FILE = ".metadata"
FORMAT = 1
PIECE_BYTES = 4 * 2**20
# What the names of stored tensors begin with.
WEIGHTS, OPTIMIZER = "model.", "optimizer."


@dataclass(frozen=True)
class Piece:
    """Bytes [start, start + bytes) of a file: the block `box` of a tensor, row-major, and their hash."""

    file: str
    start: int
    bytes: int
    box: Box
    xxh3_128: str


@dataclass(frozen=True)
class StoredBlock:
    """A block of a tensor in a file.

    Args:
        file: name of the file, in the checkpoint's folder.
        start: of the block's numbers in the file, bytes.
        offsets: of the block in the whole tensor.
        sizes: of the block.
        item: start and size in bytes of what torch.save wrote, which holds the numbers; for DCP's index.
        hashes: one for each piece.
    """

    file: str
    start: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    item: tuple[int, int]
    hashes: tuple[str, ...]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's dtype (torch's name for it), shape and blocks, which cover it once.

    `split` is {mesh axis: tensor dim} on the mesh that saved it; axes that replicated it are absent.
    """

    dtype: str
    shape: tuple[int, ...]
    split: Mapping[str, int]
    blocks: tuple[StoredBlock, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize


@dataclass(frozen=True)
class Manifest:
    """Everything that is known of a checkpoint without reading its numbers.

    Args:
        step: updates done.
        mesh: {axis: size} of the mesh that saved it.
        versions: {parallel2d, torch: version} that wrote it.
        model: class of the model.
        optimizer: class of the optimizer, "" if only weights are stored.
        trainer: what the training loop saved beside the tensors, plain JSON. Its `model` is the
            model's configuration.
        files: {name: size and hash} of every file but the manifest.
        tensors: {name: tensor}; `model.…` are weights, `optimizer.….exp_avg` and so on its state.
        piece_bytes: the pieces' target size.
        began_from: the checkpoint or folder of another run with which this run began, or "".
    """

    step: int
    mesh: Mapping[str, int]
    versions: Mapping[str, str]
    model: str
    optimizer: str
    trainer: Mapping[str, Any]
    files: Mapping[str, StoredFile]
    tensors: Mapping[str, StoredTensor]
    piece_bytes: int = PIECE_BYTES
    format: int = FORMAT
    began_from: str = ""

    def pieces(self, name: str) -> Iterator[Piece]:
        """All pieces of a tensor, block by block."""
        tensor = self.tensors[name]
        for block in tensor.blocks:
            yield from pieces_of(block, tensor.torch_dtype.itemsize, self.piece_bytes)


@functools.cache
def versions() -> dict[str, str]:
    """Of what writes a checkpoint now."""
    return {"parallel2d": version("parallel2d"), "torch": torch.__version__}


def piece_rows(sizes: tuple[int, ...], itemsize: int, piece_bytes: int = PIECE_BYTES) -> int:
    """Rows (entries of dim 0) of a block that make a piece."""
    return max(1, piece_bytes // max(1, math.prod(sizes[1:]) * itemsize))


def num_pieces(sizes: tuple[int, ...], itemsize: int, piece_bytes: int) -> int:
    if 0 in sizes:
        return 0
    return -(-sizes[0] // piece_rows(sizes, itemsize, piece_bytes)) if sizes else 1


def pieces_of(block: StoredBlock, itemsize: int, piece_bytes: int) -> Iterator[Piece]:
    if 0 in block.sizes:
        return
    if not block.sizes:
        yield Piece(block.file, block.start, itemsize, Box((), ()), block.hashes[0])
        return
    row_bytes = math.prod(block.sizes[1:]) * itemsize
    rows = piece_rows(block.sizes, itemsize, piece_bytes)
    for index, first in enumerate(range(0, block.sizes[0], rows)):
        count = min(rows, block.sizes[0] - first)
        box = Box((block.offsets[0] + first, *block.offsets[1:]), (count, *block.sizes[1:]))
        start = block.start + first * row_bytes
        yield Piece(block.file, start, count * row_bytes, box, block.hashes[index])


def to_json(manifest: Manifest) -> str:
    """The file's text: the hash of the content's compact form, and the content, a line for each fact."""
    content = vars(manifest)
    lines = ",\n".join(f"{_dumps(key)}: {_lines_of(value)}" for key, value in content.items())
    return f'{{"xxh3_128": "{_hash_of(content)}", "content": {{\n{lines}\n}}}}\n'


def _lines_of(value: Any) -> str:
    if not isinstance(value, dict):
        return _dumps(value)
    return "{\n" + ",\n".join(f"  {_dumps(key)}: {_dumps(of)}" for key, of in value.items()) + "\n}"


def _dumps(value: Any, **how: Any) -> str:
    """JSON, of dataclasses too (dataclasses.asdict takes ten times as long)."""
    return json.dumps(value, default=vars, **how)


def _hash_of(content: Any) -> str:
    return Hash(_dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint; DamagedCheckpoint if it is missing or not as it was written.

    UserError if a later version wrote it.
    """
    path = folder / MANIFEST_FILE
    try:
        with open_file(folder, MANIFEST_FILE) as handle:
            text = json.loads(handle.read())
        sound = isinstance(text, dict) and _hash_of(text.get("content")) == text.get("xxh3_128")
    except DamagedCheckpoint:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path} is damaged: {error}") from None
    if not sound:
        raise DamagedCheckpoint(f"{path} is damaged: its content does not have its hash")
    content = text["content"]
    if not isinstance(content, dict) or type(content.get("format")) is not int or content["format"] < FORMAT:
        raise DamagedCheckpoint(f"{path} is not of format {FORMAT}")
    if content["format"] > FORMAT:
        # Not damaged: who passes it over goes back in time and gives its name away.
        raise UserError(f"{path} is of format {content['format']}, and this version reads {FORMAT}: upgrade")
    try:
        manifest = _parse(content)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise DamagedCheckpoint(f"{path} is damaged: {type(error).__name__} {error}") from None
    return manifest


def _parse(content: Mapping[str, Any]) -> Manifest:
    files = {name: StoredFile(_count(f["bytes"]), str(f["xxh3_128"])) for name, f in content["files"].items()}
    for name in files:
        if name in (".", "..", MANIFEST_FILE) or any(bad in name for bad in "/\\\0"):
            raise ValueError(f"{name!r} is no file of the checkpoint's folder")
        name.encode()  # JSON can spell half characters, which no file has in its name
    piece_bytes = _count(content["piece_bytes"])
    tensors = {name: _parse_tensor(name, t, files, piece_bytes) for name, t in content["tensors"].items()}
    if not isinstance(content["trainer"], dict):
        raise ValueError("trainer is no JSON object")
    return Manifest(
        step=_count(content["step"]),
        mesh={axis: _count(size) for axis, size in content["mesh"].items()},
        versions={name: str(version) for name, version in content["versions"].items()},
        model=str(content["model"]),
        optimizer=str(content["optimizer"]),
        trainer=content["trainer"],
        files=files,
        tensors=tensors,
        piece_bytes=piece_bytes,
        began_from=str(content["began_from"]),
    )


def _parse_tensor(
    name: str, content: Mapping[str, Any], files: Mapping[str, StoredFile], piece_bytes: int
) -> StoredTensor:
    dtype = getattr(torch, content["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name}: {content['dtype']!r} is no dtype")
    shape = _counts(content["shape"])
    blocks = tuple(
        StoredBlock(
            str(block["file"]),
            _count(block["start"]),
            _counts(block["offsets"]),
            _counts(block["sizes"]),
            (_count(block["item"][0]), _count(block["item"][1])),
            tuple(str(h) for h in block["hashes"]),
        )
        for block in content["blocks"]
    )
    for block in blocks:
        _require_sound(name, block, shape, dtype.itemsize, files, piece_bytes)
    if sum(math.prod(block.sizes) for block in blocks) != math.prod(shape) or _overlap(blocks):
        raise ValueError(f"{name}: its blocks do not cover it once")
    return StoredTensor(
        str(content["dtype"]), shape, {a: _count(d) for a, d in content["split"].items()}, blocks
    )


def _overlap(blocks: tuple[StoredBlock, ...]) -> bool:
    """Whether two blocks have something in common; by dim 0, so that few pairs are looked at."""
    near: list[Box] = []
    for box in sorted((Box(b.offsets, b.sizes) for b in blocks), key=lambda box: box.offsets[:1]):
        near = [
            other for other in near if not box.sizes or other.offsets[0] + other.sizes[0] > box.offsets[0]
        ]
        if any(box.intersection(other) for other in near):
            return True
        near.append(box)
    return False


def _require_sound(
    name: str,
    block: StoredBlock,
    shape: tuple[int, ...],
    itemsize: int,
    files: Mapping[str, StoredFile],
    piece_bytes: int,
) -> None:
    """ValueError if a block lies outside its tensor or its file, or has too few hashes."""
    inside = zip(block.offsets, block.sizes, shape, strict=True)
    if any(offset + size > whole for offset, size, whole in inside):
        raise ValueError(f"{name}: a block lies outside of {list(shape)}")
    if block.start + math.prod(block.sizes) * itemsize > files[block.file].bytes:
        raise ValueError(f"{name}: a block lies outside of {block.file}")
    if len(block.hashes) != num_pieces(block.sizes, itemsize, piece_bytes):
        raise ValueError(f"{name}: {len(block.hashes)} hashes for a block of {list(block.sizes)}")


def _count(value: Any) -> int:
    # torch counts in 64 bits.
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} is no count")
    return value


def _counts(values: Any) -> tuple[int, ...]:
    return tuple(_count(value) for value in values)
