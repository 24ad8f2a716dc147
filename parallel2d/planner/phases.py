"""Where in a step a trace is, told by hooks on the model, its units and the optimizer."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from parallel2d.planner.memory_log import MemoryLog

LOSS, UPDATE = "loss", "update"


class Phases:
    """Names the phase of what happens next, and what new memory is for, in a MemoryLog.

    Units have phases of their own at both ends of the model, `edge` each, and share one between. So the
    same phases are found at any depth, and what their peaks grow by with each unit more is constant.
    """

    def __init__(self, memory: MemoryLog, edge: int) -> None:
        self._memory, self._edge = memory, edge

    def watch(self, model: nn.Module, units: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> None:
        # Before FSDP's hooks, which gather.
        model.register_forward_pre_hook(lambda *_: self._enter("forward, before the blocks"), prepend=True)
        for index, unit in enumerate(units):
            self._watch_unit(unit, self._name(index, len(units)))
        units[0].register_forward_pre_hook(
            lambda _, args: self._on_gradient(args, "backward, before the blocks")
        )
        units[-1].register_forward_hook(lambda *_: self._enter("forward, after the blocks"))
        model.register_forward_hook(self._begin_loss)
        optimizer.register_step_pre_hook(self._begin_update)
        optimizer.register_step_post_hook(lambda *_: self._enter("between steps", "other"))

    def _name(self, index: int, units: int) -> str:
        left = units - 1 - index
        if left < self._edge:
            return f"block L-{left}" if left else "block L"
        return f"block {index + 1}" if index < self._edge else "blocks between"

    def _enter(self, phase: str, part: str = "activations") -> None:
        self._memory.enter(phase, part)

    def _watch_unit(self, unit: nn.Module, name: str) -> None:
        unit.register_forward_pre_hook(lambda *_: self._enter(f"forward, {name}"), prepend=True)
        unit.register_forward_hook(lambda _, args, output: self._on_gradient(output, f"backward, {name}"))

    def _begin_loss(self, model: nn.Module, args: Any, output: Any) -> None:
        self._enter(LOSS, "logits")
        self._on_gradient(output, "backward, after the blocks")
        for tensor in _tensors(output):
            self._memory.block(tensor).part = "logits"

    def _on_gradient(self, values: Any, phase: str) -> None:
        """Enter the phase when backward arrives at these values."""
        for tensor in _tensors(values):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self._enter(phase))

    def _begin_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._enter(UPDATE, "other")
        for group in optimizer.param_groups:
            self._memory.name("gradients", (p.grad for p in group["params"] if p.grad is not None))


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]
