"""Tied parameters: one and the same in several modules. torch replaces each occurrence on its own."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parallel2d.errors import UserError

Tie = list[tuple[nn.Module, str]]


def find_ties(model: nn.Module) -> list[Tie]:
    """Groups of (module, attribute) that hold one and the same parameter."""
    owners: dict[nn.Parameter, Tie] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(parameter, []).append((module, name))
    return [group for group in owners.values() if len(group) > 1]


def restore_ties(ties: list[Tie]) -> None:
    """Make one again what `find_ties` saw as one: the first owner's parameter."""
    for (first_module, first_name), *others in ties:
        first = first_module._parameters[first_name]
        for module, name in others:
            other = module._parameters[name]
            if (
                isinstance(first, DTensor)
                and isinstance(other, DTensor)
                and first.placements != other.placements
            ):
                raise UserError(
                    f"a parameter tied between two modules needs the same split in both, "
                    f"not {first.placements} and {other.placements}"
                )
            module._parameters[name] = first


def to_empty(model: nn.Module, device: torch.device | str) -> None:
    """nn.Module.to_empty, after which tied parameters are still tied."""
    ties = find_ties(model)
    model.to_empty(device=device)
    restore_ties(ties)
