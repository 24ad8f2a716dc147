"""Weights from and to a Hugging Face folder, on any mesh.

Which of our parameters lies where is data, passed in as `names` (models/hf.py makes it): {parameter:
(tensor, transpose, part, parts)}. Take the stored tensor, transpose it if so told, cut its dim 0
into equal parts: the parameter is piece number `part`.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel2d.checkpoint.mismatch import mismatches
from parallel2d.collectives import gather_whole
from parallel2d.errors import UserError
from parallel2d.fsdp import reshard
from parallel2d.hf.folder import StoredTensors, open_folder, read_config
from parallel2d.hf.write import Kind, require_new, write_folder
from parallel2d.shards import Box, local_block
from parallel2d.ties import to_empty

__all__ = ["load_hf", "read_config", "save_hf"]

Place = tuple[str, bool, int, int]
Names = Mapping[str, Place]

# Tensors that transformers ignores too: rotary tables and causal masks that old versions stored.
_IGNORED = ("*.rotary_emb.inv_freq", "*h.*.attn.bias", "*h.*.attn.masked_bias")
# GPT-2's own folders lack it.
_OPTIONAL_PREFIX = "transformer."


def load_hf(folder: Path, model: nn.Module, names: Names, device: torch.device) -> None:
    """Fill a parallelized or plain model, each rank reading the slices that it holds. No communication.

    A model on meta is materialised on `device` first, ties kept. Numbers are cast to the parameters'
    dtype, which is exact where that is the wider one. Strict: missing, unexpected or misshapen tensors
    are one UserError, the same on every rank, before a weight changes. A tied head may be stored if it
    equals the embedding; to know that, every rank reads both in full, a few rows at a time.

    Args:
        folder: with model.safetensors, or model.safetensors.index.json and the files that it lists.
        model: without buffers, as the models of this project are.
        names: where each parameter lies.
        device: of a model on meta.
    """
    if buffers := [name for name, _ in model.named_buffers()]:
        raise UserError(f"a Hugging Face folder cannot fill the buffers {', '.join(buffers[:10])}")
    reshard(model)
    stored = open_folder(folder)
    names = as_stored(names, stored)
    require_model(folder, model, names, stored)
    if any(parameter.is_meta for parameter in model.parameters()):
        to_empty(model, device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local, box = local_block(parameter)
            if local.numel():
                local.copy_(read_block(stored, names[name], parameter.shape, box))


def as_stored(names: Names, stored: StoredTensors) -> dict[str, Place]:
    """The same places, without the prefix where the folder leaves it out."""
    found = {}
    for name, (tensor, transpose, part, parts) in names.items():
        short = tensor.removeprefix(_OPTIONAL_PREFIX)
        is_short = tensor not in stored.shapes and short in stored.shapes
        found[name] = (short if is_short else tensor, transpose, part, parts)
    return found


def require_model(folder: Path, model: nn.Module, names: Names, stored: StoredTensors) -> None:
    """One UserError with all that is missing, unexpected or misshapen; then one for a tie that is none.

    The model may be on meta. Ties are compared number by number, a few rows at a time.
    """
    parameters = dict(model.named_parameters())
    expected = {names[name][0]: stored_shape(p.shape, names[name]) for name, p in parameters.items()}
    aliases = {place[0] for name, place in names.items() if name not in parameters}
    ignored = {n for n in stored.shapes if any(fnmatchcase(n, glob) for glob in _IGNORED)}
    require_tensors(folder, expected, stored.shapes, aliases | ignored)
    _check_ties(model, names, stored)


def require_tensors(
    folder: Path,
    expected: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[int, ...]],
    allowed: Collection[str] = (),
) -> None:
    """One UserError with all that is missing, unexpected (if it is not allowed) or of another shape."""
    known = {name: shape for name, shape in found.items() if name in expected or name not in allowed}
    if told := mismatches(expected, known):
        raise UserError("\n".join([f"{folder} does not hold this model's tensors", *told]))


def stored_shape(shape: Sequence[int], place: Place) -> tuple[int, ...]:
    """Shape of the stored tensor of which a parameter of this shape is a part."""
    _, transpose, _, parts = place
    whole = (shape[0] * parts, *shape[1:])
    return whole[::-1] if transpose else whole


def _check_ties(model: nn.Module, names: Names, stored: StoredTensors) -> None:
    first = {parameter: name for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        one, other = names[first[parameter]][0], names[name][0]
        if one != other and other in stored.shapes and not _equal(one, other, stored):
            raise UserError(f"{other} is not equal to {one}, and the model has one parameter for both")


def _equal(one: str, other: str, stored: StoredTensors, rows: int = 1024) -> bool:
    """Whether two stored tensors hold the same numbers."""
    shape = stored.shapes[one]
    if shape != stored.shapes[other]:
        return False
    return all(
        torch.equal(*(stored.read(n, (i, *[0] * (len(shape) - 1)), (rows, *shape[1:])) for n in (one, other)))
        for i in range(0, shape[0], rows)
    )


def read_block(stored: StoredTensors, place: Place, shape: Sequence[int], box: Box) -> Tensor:
    """A block of a parameter of this shape, in the dtype that is stored; a view of the file."""
    tensor, transpose, part, _ = place
    offsets = (box.offsets[0] + part * shape[0], *box.offsets[1:])
    order = slice(None, None, -1 if transpose else 1)
    block = stored.read(tensor, offsets[order], box.sizes[order])
    return block.T if transpose else block


def save_hf(
    folder: Path,
    model: nn.Module,
    names: Names,
    config_json: Mapping[str, Any],
    dtype: torch.dtype | None = None,
    max_shard_bytes: float = 5e9,
) -> None:
    """Write a folder that transformers reads; all ranks call it, rank 0 writes. It is whole or not there.

    One tensor at a time is gathered onto every rank, by one all-gather for each axis that splits it.
    Bit by bit what the model holds, if dtype is None or the same.

    Args:
        folder: to be made; one with anything in it is refused.
        model: parallelized or plain.
        names: where each parameter goes; a tied one is written once.
        config_json: the folder's config.json, to which the dtype is added.
        dtype: to cast to; numbers that it cannot hold are refused.
        max_shard_bytes: a file is no larger, unless one tensor alone is.
    """
    require_new(folder)
    if dist.is_initialized():
        dist.barrier()  # all have looked before rank 0 makes it
    reshard(model)
    pieces: dict[str, dict[int, nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        tensor, _, part, _ = names[name]
        pieces.setdefault(tensor, {})[part] = parameter
    transposed = {tensor for tensor, transpose, _, _ in names.values() if transpose}
    dtype = dtype or next(model.parameters()).dtype
    shapes = {names[name][0]: stored_shape(p.shape, names[name]) for name, p in model.named_parameters()}
    kinds = {tensor: Kind(dtype, shapes[tensor]) for tensor in pieces}
    config = {**config_json, "torch_dtype": str(dtype).removeprefix("torch.")}
    writes = not dist.is_initialized() or dist.get_rank() == 0
    with write_folder(folder, config, kinds, max_shard_bytes) if writes else nullcontext() as writer:
        for tensor in kinds:  # all of one dtype: the writer's order is this one
            whole = _whole(tensor, pieces[tensor], tensor in transposed, dtype)
            if writer:
                writer.add(tensor, whole)
    if dist.is_initialized():
        dist.barrier()


def _whole(name: str, pieces: Mapping[int, nn.Parameter], transpose: bool, dtype: torch.dtype) -> Tensor:
    """A tensor as it is stored, on every rank. One all-gather per piece and axis that splits it."""
    whole = torch.cat([gather_whole(piece) for _, piece in sorted(pieces.items())]).to(dtype)
    require_finite(name, whole)
    return (whole.T if transpose else whole).contiguous()


def require_finite(name: str, numbers: Tensor) -> None:
    """UserError if one is NaN or infinite. Takes no memory."""
    if numbers.numel() and not torch.stack(torch.aminmax(numbers)).isfinite().all():
        raise UserError(f"{name} has numbers that are not finite in {numbers.dtype}: it is not carried over")
