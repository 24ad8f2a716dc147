"""float8 matrix products in the blocks, by torchao; weights at rest, and what is sent, stay as they are."""

import dataclasses
from collections.abc import Sequence

import torch
from torch import nn

from parallel2d.errors import UserError
from parallel2d.local_weights import to_local

# Of torchao: one scale for a tensor, for each row, or for each row but with weight gradients in full.
_LEAST_CAPABILITY = {"tensorwise": (8, 9), "rowwise": (9, 0), "rowwise_with_gw_hp": (9, 0)}
# What a GPU's float8 product takes.
_MULTIPLE = 16


def apply_float8(units: Sequence[nn.Module], recipe: str, device_type: str) -> None:
    """Let the linear maps of the units multiply in float8, in place; before styles are applied to them.

    Operands are scaled and rounded in forward and backward, each rank's by its own largest values: what
    a mesh splits has other scales than the whole, so that losses agree with other meshes' only as float8
    does with itself. On a CPU the rounding is real and the products are in the dtype of compute.

    recipe: none, tensorwise, rowwise or rowwise_with_gw_hp, as in
    https://docs.pytorch.org/ao/stable/workflows/training.html
    """
    if recipe == "none":
        return
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    config = dataclasses.replace(config, emulate=device_type == "cpu")
    for unit in units:
        convert_to_float8_training(unit, config=config)


def require_float8_shapes(units: Sequence[nn.Module], recipe: str) -> None:
    """UserError if a linear map, as one tp rank has it, is no shape for a float8 product; not for none."""
    if recipe == "none":
        return
    found = []
    for number, unit in enumerate(units):
        for name, module in unit.named_modules():
            if isinstance(module, nn.Linear) and any(n % _MULTIPLE for n in to_local(module.weight).shape):
                rows, columns = to_local(module.weight).shape
                found.append(f"{name} of block {number}: {columns} in, {rows} out on a tp rank")
    if found:
        raise UserError(
            f"float8 products need sizes that are multiples of {_MULTIPLE}: {'; '.join(found[:5])}"
            f"{f'; {len(found) - 5} more' if len(found) > 5 else ''}: use another width, ffn_width or tp"
        )


def float8_problems(recipe: str, device_type: str) -> list[str]:
    """What this machine lacks for it; empty if nothing."""
    if recipe == "none":
        return []
    try:
        import torchao.float8  # noqa: F401
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "torchao":
            raise
        return [f"precision.float8 {recipe} needs torchao: pip install 'parallel2d[float8]'"]
    least = _LEAST_CAPABILITY[recipe]
    if device_type == "cuda" and (here := torch.cuda.get_device_capability()) < least:
        needed, has = (".".join(map(str, capability)) for capability in (least, here))
        return [f"precision.float8 {recipe} needs a GPU of compute capability {needed}: this one has {has}"]
    return []
