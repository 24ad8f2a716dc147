"""What tensor-parallel ranks send each other: local tensors in and out, with a gradient where one is needed.

`b` batch, `s` sequence. Layouts are those of arXiv:2205.05198 (section 4.2.2): the gradient of a
gather is a scatter and the other way round.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from parallel2d.errors import UserError
from parallel2d.shards import Split, splits_of

# The functional ops, because torch.compile traces them as they are; each waits for its result.
_ops = torch.ops._c10d_functional


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(n, …) on each rank -> (tp, n, …), in the order of ranks. One all-gather."""
    size = group.size()
    gathered = _ops.all_gather_into_tensor(x.contiguous(), size, group.group_name)
    return _ops.wait_tensor(gathered).unflatten(0, (size, x.shape[0]))


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(tp, n, …) on each rank -> the sum over ranks of this rank's (n, …). One reduce-scatter."""
    scattered = _ops.reduce_scatter_tensor(
        x.flatten(0, 1).contiguous(), "sum", group.size(), group.group_name
    )
    return _ops.wait_tensor(scattered)


def _all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum over ranks, out of place. One all-reduce."""
    return _ops.wait_tensor(_ops.all_reduce(x.contiguous(), "sum", group.group_name))


def _all_gather_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(b, s/tp, …) -> (b, s, …)."""
    return all_gather(x, group).transpose(0, 1).flatten(1, 2)


def _reduce_scatter_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(b, s, …) partial sums -> (b, s/tp, …)."""
    return _reduce_scatter(x.unflatten(1, (group.size(), -1)).transpose(0, 1), group)


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_gather_sequence(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _reduce_scatter_sequence(grads[0], ctx.group), None


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _reduce_scatter_sequence(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _all_gather_sequence(grads[0], ctx.group), None


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grads[0], ctx.group), None


class _SumOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def gather_sequence(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """(b, s/tp, …) -> (b, s, …). Forward: one all-gather; backward: one reduce-scatter."""
    return _GatherSequence.apply(x, mesh.get_group())


def scatter_sequence(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """(b, s, …) partial sums -> (b, s/tp, …). Forward: one reduce-scatter; backward: one all-gather."""
    if x.shape[1] % mesh.size():
        raise UserError(
            f"sequence length {x.shape[1]} is not divisible by tp {mesh.size()}: "
            f"pad it to {-(-x.shape[1] // mesh.size()) * mesh.size()}"
        )
    return _ScatterSequence.apply(x, mesh.get_group())


def sum_gradient(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """x unchanged. Forward: nothing; backward: one all-reduce of its gradient."""
    return _SumGradient.apply(x, mesh.get_group())


def sum_output(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Partial sums -> their total on every rank. Forward: one all-reduce; backward: nothing."""
    return _SumOutput.apply(x, mesh.get_group())


def gather_whole(tensor: Tensor) -> Tensor:
    """A sharded tensor in full on every rank, bit by bit and without gradient; a plain one as it is.

    One all-gather per mesh axis that splits it, of shares padded to the largest. Undoes the splits of
    `shards.splits_of`, last one first, so that it cannot disagree with what `local_box` says.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise ValueError(f"a tensor of partial sums ({tensor.placements}) has no whole yet")
    whole = tensor.to_local().detach()
    for split in reversed(splits_of(tensor)):
        whole = _undo(split, whole, tensor.device_mesh)
    return whole


def _undo(split: Split, share: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's share along one dim -> the dim in full."""
    parts = mesh.size(split.axis)
    if parts == 1:
        return share
    share = share.movedim(split.dim, 0)
    padded = share.new_zeros(-(-split.size // parts), *share.shape[1:])
    padded[: share.shape[0]] = share
    # Every share but the last ones is full, so what is padding lies at the end.
    return all_gather(padded, mesh.get_group(split.axis)).flatten(0, 1)[: split.size].movedim(0, split.dim)
