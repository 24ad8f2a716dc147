"""Which rank of a mesh holds which block: asked of the sharded model, for all ranks in one process."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel2d.checkpoint.manifest import OPTIMIZER, WEIGHTS, Manifest
from parallel2d.errors import UserError
from parallel2d.shards import Box, local_box, splits_of


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
    persistent = model.state_dict(keep_vars=True)
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    tensors |= {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    # Blocks repeat the same few shapes, and a world may have a thousand ranks.
    known: dict[Any, Layout] = {}
    layouts = {}
    for name, tensor in tensors.items():
        key = (tuple(tensor.shape), tensor.placements if isinstance(tensor, DTensor) else None)
        if key not in known:
            known[key] = _layout_of(tensor, world)
        layouts[WEIGHTS + name] = known[key]
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
    names = mesh.mesh_dim_names or ()
    return Layout(shape, holders, {names[split.axis]: split.dim for split in splits_of(tensor)})


def _whole(shape: tuple[int, ...], ranks: tuple[int, ...]) -> Layout:
    box = Box((0,) * len(shape), shape)
    return Layout(shape, {} if 0 in shape else {box: ranks}, {})


def layouts_of_checkpoint(manifest: Manifest, of_model: Mapping[str, Layout]) -> dict[str, Layout]:
    """{name: layout} of everything a checkpoint holds: optimizer state of a parameter's shape lies as the
    parameter does, the rest (step counts) on rank 0. UserError if it is not a checkpoint of the model.
    """
    stored = {name for name in manifest.tensors if name.startswith(WEIGHTS)}
    found, unknown = {}, sorted(stored - of_model.keys())
    for name, tensor in manifest.tensors.items():
        layout = of_model.get(name)
        if name.startswith(OPTIMIZER):
            parameter, _, _ = name.removeprefix(OPTIMIZER).rpartition(".")
            layout = of_model.get(WEIGHTS + parameter)
            if layout is None:
                unknown.append(name)
            elif layout.shape != tensor.shape:
                layout = _whole(tensor.shape, (0,))
        elif layout is not None and layout.shape != tensor.shape:
            raise UserError(
                f"{name} is {list(tensor.shape)} in the checkpoint, {list(layout.shape)} in the model"
            )
        found[name] = layout or _whole(tensor.shape, (0,))
    missing = sorted(of_model.keys() - stored)
    if missing or unknown:
        raise UserError(
            f"the checkpoint holds other tensors than the model: {len(missing)} missing {missing[:10]}, "
            f"{len(unknown)} unknown {unknown[:10]}"
        )
    return found
