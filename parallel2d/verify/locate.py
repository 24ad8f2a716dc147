"""Where a wrong plan goes wrong: the first output, or the first gradient, that differs."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves

from parallel2d.shards import share_of


class Recorder:
    """Watches a model's modules while it is entered: which runs, and what each returned first."""

    def __init__(self, model: nn.Module, keep_outputs: bool = False) -> None:
        self._model = model
        self._keep_outputs = keep_outputs
        self._stack: list[str] = []
        self._hooks: list[Any] = []
        self.outputs: dict[str, Tensor] = {}

    @property
    def running(self) -> str:
        """The innermost module whose forward has begun and not ended; an exception leaves it there."""
        return self._stack[-1] if self._stack else ""

    def __enter__(self) -> "Recorder":
        for name, module in self._model.named_modules():
            self._hooks.append(module.register_forward_pre_hook(self._enter(name)))
            self._hooks.append(module.register_forward_hook(self._leave))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _enter(self, name: str) -> Callable[..., None]:
        return lambda *_: self._stack.append(name)

    def _leave(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        name = self._stack.pop()
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        if self._keep_outputs and tensors:
            self.outputs.setdefault(name, tensors[0].detach().clone())


@torch.no_grad()
def first_wrong_output(
    model: nn.Module, reference: nn.Module, inputs: Tensor, tp_mesh: DeviceMesh
) -> tuple[str | None, str] | None:
    """(last module that is right, first that is wrong), in the order in which their forwards end.

    Right is an output that equals the reference's, or a share of it along one dim. None if all are.
    One all-reduce.

    Args:
        model: on the mesh.
        reference: the same model on this process alone.
        inputs: this rank's.
    """
    with Recorder(model, keep_outputs=True) as ours:
        model(inputs)
    with Recorder(reference, keep_outputs=True) as theirs:
        reference(inputs)
    names = [name for name in theirs.outputs if name in ours.outputs]
    right = [_is_share(ours.outputs[name], theirs.outputs[name], tp_mesh) for name in names]
    on_all = torch.tensor(right, dtype=torch.int32)
    dist.all_reduce(on_all, op=dist.ReduceOp.MIN)
    return _first(zip(names, on_all.tolist(), strict=True))


def _is_share(ours: Tensor, whole: Tensor, tp_mesh: DeviceMesh) -> bool:
    bound = 1e-9 * whole.abs().max().item()
    return any((ours - part).abs().max() <= bound for part in _shares(ours, whole, tp_mesh) if part.numel())


def _shares(ours: Tensor, whole: Tensor, tp_mesh: DeviceMesh) -> Iterator[Tensor]:
    """Blocks of the whole that have this shape, along the one dim in which the shapes differ."""
    if ours.shape == whole.shape:
        yield whole
    if ours.ndim != whole.ndim:
        return
    differing = [d for d in range(ours.ndim) if ours.shape[d] != whole.shape[d]]
    if len(differing) != 1 or ours.shape[differing[0]] > whole.shape[differing[0]]:
        return
    dim, size = differing[0], ours.shape[differing[0]]
    by_rank, _ = share_of(whole.shape[dim], tp_mesh.size(), tp_mesh.get_local_rank())
    starts = {by_rank, *range(0, whole.shape[dim], max(size, 1))}
    yield from (whole.narrow(dim, start, size) for start in starts if start + size <= whole.shape[dim])


def first_wrong_gradient(
    errors: Sequence[tuple[str, float]], tolerance: float
) -> tuple[str | None, str] | None:
    """(last parameter that is right, first that is wrong), from the loss backwards; None if all are right.

    Args:
        errors: (parameter, error) in the order of the forward.
    """
    return _first((name, error < tolerance) for name, error in reversed(errors))


def _first(agreed: Iterable[tuple[str, bool]]) -> tuple[str | None, str] | None:
    right = None
    for name, agrees in agreed:
        if not agrees:
            return right, name
        right = name
    return None
