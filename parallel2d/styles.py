"""Tensor-parallel styles: how a module's weights are split over tp, and the collectives it issues.

Weights rest as DTensors. Inside forward and backward everything is a plain local tensor: DTensor's
per-op dispatch costs more than a small layer's arithmetic. Layouts are written for this rank's
share, with `b` batch, `s` sequence, `d` width, `f` features, `v` vocabulary.

The communication pattern is Megatron's tensor parallelism (arXiv:1909.08053, section 3) with
sequence parallelism (arXiv:2205.05198, section 4.2.2).
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from parallel2d.errors import UserError

# ---------------------------------------------------------------- collectives
#
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


# ---------------------------------------------------------------- and their gradients


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


# ---------------------------------------------------------------- weights


def shard_bounds(size: int, mesh: DeviceMesh) -> tuple[int, int]:
    """[start, stop) of this rank's share of a dim, by DTensor's rule: all shares but the last ones are ⌈size/tp⌉."""
    share = -(-size // mesh.size())
    start = min(mesh.get_local_rank() * share, size)
    return start, min(start + share, size)


def _distribute(module: nn.Module, mesh: DeviceMesh, **placements: Placement) -> None:
    """Turn the module's own parameters into DTensors on the tp mesh. No communication."""
    for name, placement in placements.items():
        parameter = module._parameters.get(name)
        if parameter is None:
            continue
        shared = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(shared, requires_grad=parameter.requires_grad))


def _local(parameter: Tensor | None, gradient: Placement | None = None) -> Tensor | None:
    """This rank's share of a weight; `gradient` says what its gradient is over tp (default: same layout)."""
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.to_local(grad_placements=None if gradient is None else [gradient])


@contextmanager
def _local_parameters(module: nn.Module, gradient: Placement) -> Iterator[None]:
    """Let the module's own code see local tensors where its parameters are.

    An instance attribute shadows the entry in `_parameters`, which stays as FSDP and the optimizer know it.
    """
    names = [name for name, parameter in module._parameters.items() if parameter is not None]
    for name in names:
        module.__dict__[name] = _local(module._parameters[name], gradient)
    try:
        yield
    finally:
        for name in names:
            del module.__dict__[name]


# ---------------------------------------------------------------- styles


class Style(ParallelStyle):
    """A ParallelStyle whose forward works on local tensors.

    Subclasses shard the weights in `shard` and replace the module's forward in `_apply`.
    """

    def _require(self, module: nn.Module, kind: type[nn.Module]) -> None:
        if not isinstance(module, kind):
            raise UserError(
                f"style {type(self).__name__} is for {kind.__name__}, not for {type(module).__name__}"
            )


def _require_divisible(what: str, size: int, mesh: DeviceMesh) -> None:
    if size % mesh.size():
        raise UserError(f"{what} {size} is not divisible by tp {mesh.size()}")


class Colwise(Style):
    """nn.Linear with its output features split: (…, d) -> (…, f/tp), weight (f/tp, d).

    The input is the same on every rank; what each rank contributes to its gradient is summed.
    Forward: nothing; backward: one all-reduce.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self._require(module, nn.Linear)
        _require_divisible("number of output features", module.out_features, device_mesh)
        _distribute(module, device_mesh, weight=Shard(0), bias=Shard(0))
        module.forward = functools.partial(self.forward, module, device_mesh)
        return module

    def forward(self, module: nn.Linear, mesh: DeviceMesh, x: Tensor) -> Tensor:
        return F.linear(sum_gradient(x, mesh), _local(module.weight), _local(module.bias))


class ColwiseLocal(Colwise):
    """Colwise inside a module that has GatherSequence, which sums the input's gradient for all its linears.

    Forward: nothing; backward: nothing.
    """

    def forward(self, module: nn.Linear, mesh: DeviceMesh, x: Tensor) -> Tensor:
        return F.linear(x, _local(module.weight), _local(module.bias))


class Rowwise(Style):
    """nn.Linear with its input features split: (…, f/tp) -> (…, d), weight (d, f/tp), bias whole.

    Forward: one all-reduce; backward: nothing.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self._require(module, nn.Linear)
        _require_divisible("number of input features", module.in_features, device_mesh)
        _distribute(module, device_mesh, weight=Shard(1), bias=Replicate())
        module.forward = functools.partial(self.forward, module, device_mesh)
        return module

    def forward(self, module: nn.Linear, mesh: DeviceMesh, x: Tensor) -> Tensor:
        # The bias is added after the sum: inside it, it would be counted tp times.
        y = sum_output(F.linear(x, _local(module.weight)), mesh)
        return y if module.bias is None else y + _local(module.bias)


class RowwiseScatter(Rowwise):
    """Rowwise whose output is left split by sequence: (b, s, f/tp) -> (b, s/tp, d).

    Forward: one reduce-scatter; backward: one all-gather.
    """

    def forward(self, module: nn.Linear, mesh: DeviceMesh, x: Tensor) -> Tensor:
        y = scatter_sequence(F.linear(x, _local(module.weight)), mesh)
        return y if module.bias is None else y + _local(module.bias, Partial())


class GatherSequence(Style):
    """Any module without weights of its own that needs whole sequences: its first argument (b, s/tp, d) -> (b, s, d).

    One gather serves every linear inside, and its backward sums what they contribute to the gradient.
    Forward: one all-gather; backward: one reduce-scatter.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        whole = module.forward

        def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            return whole(gather_sequence(x, device_mesh), *args, **kwargs)

        module.forward = forward
        return module


class Replicated(Style):
    """Any module that sees the same input on every tp rank: weights whole, gradients equal. No collectives."""

    gradient: Placement = Replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _distribute(module, device_mesh, **{name: Replicate() for name in module._parameters})
        module.forward = self._with_local_parameters(module, module.forward)
        return module

    def _with_local_parameters(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with _local_parameters(module, self.gradient):
                return forward(*args, **kwargs)

        return wrapped


class Sequence(Replicated):
    """Any module that sees a share of the sequence, a norm for one: (b, s/tp, d) -> (b, s/tp, d), weights whole.

    Each rank's gradient covers its own tokens, so FSDP sums it over tp before it reduces over dp.
    Forward: nothing; backward: one all-reduce per weight.
    """

    gradient = Partial()


class Vocab(Style):
    """nn.Embedding with its rows split: ids (b, s), the same on every rank -> (b, s/tp, d), weight (v/tp, d).

    tp need not divide v. Forward: one reduce-scatter; backward: one all-gather.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self._require(module, nn.Embedding)
        unsupported = [name for name in ("padding_idx", "max_norm") if getattr(module, name) is not None]
        if unsupported or module.scale_grad_by_freq or module.sparse:
            raise UserError("style vocab is for a plain nn.Embedding, without padding_idx, max_norm, … ")
        _distribute(module, device_mesh, weight=Shard(0))
        bounds = shard_bounds(module.num_embeddings, device_mesh)
        module.forward = functools.partial(self.forward, module, device_mesh, bounds)
        return module

    def forward(
        self, module: nn.Embedding, mesh: DeviceMesh, bounds: tuple[int, int], ids: Tensor
    ) -> Tensor:
        start, stop = bounds
        elsewhere = (ids < start) | (ids >= stop)
        rows = F.embedding((ids - start).masked_fill(elsewhere, 0), _local(module.weight))
        return scatter_sequence(rows.masked_fill(elsewhere.unsqueeze(-1), 0), mesh)


class VocabHead(Style):
    """nn.Linear from width to vocabulary: (b, s/tp, d) -> logits (b, s, v/tp), weight (v/tp, d).

    tp need not divide v. Forward: one all-gather; backward: one reduce-scatter.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self._require(module, nn.Linear)
        _distribute(module, device_mesh, weight=Shard(0), bias=Shard(0))
        module.forward = functools.partial(self.forward, module, device_mesh)
        return module

    def forward(self, module: nn.Linear, mesh: DeviceMesh, x: Tensor) -> Tensor:
        return F.linear(gather_sequence(x, mesh), _local(module.weight), _local(module.bias))


STYLES: dict[str, ParallelStyle] = {
    "colwise": Colwise(),
    "colwise_local": ColwiseLocal(),
    "rowwise": Rowwise(),
    "rowwise_scatter": RowwiseScatter(),
    "gather_sequence": GatherSequence(),
    "replicated": Replicated(),
    "sequence": Sequence(),
    "vocab": Vocab(),
    "vocab_head": VocabHead(),
}
