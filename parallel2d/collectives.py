"""What tensor-parallel ranks send each other: local tensors in and out, with a gradient where one is needed.

`b` batch, `s` sequence. Layouts are those of arXiv:2205.05198 (section 4.2.2): the gradient of a
gather is a scatter and the other way round.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_group
from torch.distributed.tensor import DTensor, Partial

from parallel2d.errors import UserError
from parallel2d.shards import Split, splits_of
from parallel2d.shared_memory import is_gloo, shared_memory

# What torch.compile can put into a graph; outside of one their dispatch costs more than a small exchange.
_ops = torch.ops._c10d_functional
# Of groups on one machine; they take each dim that matters as one: rows, ranks, what each rank has of a row.
_shared = torch.ops.parallel2d

# torch 2.13 has new names for these two and warns of the old ones.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(n, …) on each rank -> (tp, n, …), in the order of ranks. One all-gather."""
    return _all_gather_rows(x, group).unflatten(0, (group.size(), x.shape[0]))


def _all_gather_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(n, …) on each rank -> (tp n, …). One all-gather."""
    size = group.size()
    if torch.compiler.is_compiling():
        return _ops.wait_tensor(_ops.all_gather_into_tensor(x.contiguous(), size, group.group_name))
    gathered = x.new_empty(size * x.shape[0], *x.shape[1:])
    all_gather_into(gathered, x.contiguous(), group)
    return gathered


def all_gather_into(output: Tensor, input: Tensor, group: dist.ProcessGroup) -> None:
    """(n, …) on each rank -> output (tp n, …), both contiguous. One all-gather."""
    if _is_shared(group):
        whole = output.view(1, group.size(), input.numel())
        _shared.all_gather_(whole, input.view(1, input.numel()), group.group_name)
    else:
        _all_gather_single(output, input, group=group)


def _reduce_scatter_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(tp n, …) on each rank -> the sum over ranks of this rank's (n, …). One reduce-scatter."""
    if torch.compiler.is_compiling():
        return _ops.wait_tensor(_ops.reduce_scatter_tensor(x, "sum", group.size(), group.group_name))
    scattered = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    reduce_scatter(scattered, x, group)
    return scattered


def reduce_scatter(output: Tensor, input: Tensor, group: dist.ProcessGroup, *, mean: bool = False) -> None:
    """The sum, or mean, over ranks of this rank's part of dim 0: input (tp n, …) -> output (n, …).

    One reduce-scatter. gloo's own is an all-reduce that throws most of its result away: between machines
    it is an all-to-all of the parts, summed here in the order of ranks, with half the bytes and one round.
    """
    if not is_gloo(group):
        _reduce_scatter_single(output, input, dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM, group)
        return
    if _is_shared(group):
        mine = output.view(1, output.numel())
        _shared.reduce_scatter_(mine, input.view(1, group.size(), output.numel()), group.group_name)
    else:
        parts = torch.empty_like(input)
        dist.all_to_all_single(parts, input, group=group)
        torch.sum(parts.unflatten(0, (group.size(), -1)), dim=0, out=output)
    if mean:
        output.div_(group.size())


def _all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum over ranks, out of place. One all-reduce."""
    if torch.compiler.is_compiling():
        return _ops.wait_tensor(_ops.all_reduce(x.contiguous(), "sum", group.group_name))
    total = x.clone(memory_format=torch.contiguous_format)
    all_reduce_(total, group)
    return total


def all_reduce_(x: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Sum over ranks, of the world if no group is given, in place, of a contiguous tensor. One all-reduce."""
    group = group or _get_default_group()
    if _is_shared(group):
        _shared.all_reduce_(x.view(-1), group.group_name)
    else:
        dist.all_reduce(x, group=group)


def _is_shared(group: dist.ProcessGroup) -> bool:
    return not torch.compiler.is_compiling() and shared_memory(group) is not None


def _all_gather_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(b, s/tp, …) -> (b, s, …)."""
    if not _is_shared(group):
        # In the words that torch's pass for asynchronous tensor parallelism looks for in a graph.
        return torch.cat(_all_gather_rows(x, group).chunk(group.size()), dim=1)
    whole = x.new_empty(x.shape[0], group.size(), *x.shape[1:])
    _shared.all_gather_(whole.flatten(2), x.flatten(1), group.group_name)
    return whole.flatten(1, 2)


def _reduce_scatter_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(b, s, …) partial sums -> (b, s/tp, …)."""
    if not _is_shared(group):
        return _reduce_scatter_rows(torch.cat(x.chunk(group.size(), dim=1)), group)
    parts = x.unflatten(1, (group.size(), -1))
    mine = x.new_empty(x.shape[0], parts.shape[2], *x.shape[2:])
    _shared.reduce_scatter_(mine.flatten(1), parts.flatten(2), group.group_name)
    return mine


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


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        total = _all_reduce(torch.cat([grad.flatten() for grad in grads]), ctx.group)
        sums = total.split([grad.numel() for grad in grads])
        return None, *(part.view_as(grad) for part, grad in zip(sums, grads, strict=True))


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


def sum_gradients(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """The tensors unchanged. Forward: nothing; backward: one all-reduce of all their gradients together."""
    return _SumGradients.apply(group, *tensors)


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
