"""Which rank of a mesh holds which block: asked of the sharded model, for all ranks in one process."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel2d.checkpoint.manifest import OPTIMIZER, WEIGHTS, Manifest
from parallel2d.checkpoint.mismatch import mismatches
from parallel2d.checkpoint.state import split_of, state_tensors
from parallel2d.errors import UserError
from parallel2d.shards import Box, local_box


@dataclass(frozen=True)
class Layout:
    """How a tensor lies on a mesh.

    Args:
        shape: of the whole.
        holders: {block: the ranks that hold it}; empty blocks are left out, the rest covers the
            tensor once.
        split: {mesh axis: tensor dim}; axes that replicate it are absent.
    """

    shape: tuple[int, ...]
    holders: Mapping[Box, tuple[int, ...]]
    split: Mapping[str, int]


def layouts_of_model(model: nn.Module, world: int) -> dict[str, Layout]:
    """{name in a checkpoint: layout} of every weight and persistent buffer of a sharded model."""
    # Blocks repeat the same few shapes, and a world may have a thousand ranks.
    known: dict[Any, Layout] = {}
    layouts = {}
    for name, tensor in state_tensors(model, None).items():
        key = (tuple(tensor.shape), tensor.placements if isinstance(tensor, DTensor) else None)
        if key not in known:
            known[key] = _layout_of(tensor, world)
        layouts[name] = known[key]
    return layouts


def _layout_of(tensor: Tensor, world: int) -> Layout:
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return _whole(shape, tuple(range(world)))
    mesh = tensor.device_mesh
    holders: dict[Box, tuple[int, ...]] = {}
    for rank in range(world):
        (coordinate,) = (mesh.mesh == rank).nonzero().tolist()
        box = local_box(tensor, coordinate)
        if 0 not in box.sizes:
            holders[box] = (*holders.get(box, ()), rank)
    return Layout(shape, holders, split_of(tensor))


def _whole(shape: tuple[int, ...], ranks: tuple[int, ...]) -> Layout:
    box = Box((0,) * len(shape), shape)
    return Layout(shape, {} if 0 in shape else {box: ranks}, {})


def layouts_of_checkpoint(manifest: Manifest, of_model: Mapping[str, Layout]) -> dict[str, Layout]:
    """{name: layout} of everything a checkpoint holds: optimizer state of a parameter's shape lies as the
    parameter does, the rest (step counts) on rank 0. UserError if it is not a checkpoint of the model.
    """
    owners = {name: _weight_of(name) for name in manifest.tensors}
    expected = {name: layout.shape for name, layout in of_model.items()}
    weights = {name: tensor.shape for name, tensor in manifest.tensors.items() if owners[name] == name}
    strays = {name: manifest.tensors[name].shape for name, owner in owners.items() if owner not in of_model}
    if told := mismatches(expected, weights | strays):
        raise UserError("\n".join(["the checkpoint holds other tensors than the model", *told]))
    found = {}
    for name, tensor in manifest.tensors.items():
        layout = of_model[owners[name]]
        found[name] = layout if layout.shape == tensor.shape else _whole(tensor.shape, (0,))
    return found


def _weight_of(name: str) -> str:
    """The weight that an entry of optimizer state is of; another tensor is its own."""
    if not name.startswith(OPTIMIZER):
        return name
    parameter, _, _ = name.removeprefix(OPTIMIZER).rpartition(".")
    return WEIGHTS + parameter
