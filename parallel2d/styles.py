"""Tensor-parallel styles: how a module's weights are split over tp, and the collectives it issues.

Weights rest as DTensors; in forward and backward all is plain local tensors (local_weights.py), because
DTensor's dispatch of an op costs more than a small layer's arithmetic. Layouts are those of this
rank's share: `b` batch, `s` sequence, `d` width, `f` features, `v` vocabulary.

The communication pattern is Megatron's tensor parallelism (arXiv:1909.08053, section 3) with
sequence parallelism (arXiv:2205.05198, section 4.2.2).
"""

import re
from collections.abc import Callable
from typing import Any, TypeVar

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from parallel2d.collectives import gather_sequence, scatter_sequence, sum_gradient, sum_output
from parallel2d.errors import UserError
from parallel2d.local_weights import distribute
from parallel2d.seeds import random_branch
from parallel2d.shards import share_of

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def _require(style: ParallelStyle, module: nn.Module, kind: type[AnyModule]) -> AnyModule:
    if not isinstance(module, kind):
        raise UserError(
            f"style {type(style).__name__} is for {kind.__name__}, not for {type(module).__name__}"
        )
    return module


def _with_forward(module: nn.Module, forward: Callable[..., Any]) -> nn.Module:
    module.forward = forward
    return module


def _bind(forward: Callable[..., Tensor], *first: Any) -> Callable[[Tensor], Tensor]:
    """functools.partial as a function, so that torch.compile re-uses one block's graph for the next."""

    def bound(x: Tensor) -> Tensor:
        return forward(*first, x)

    return bound


def _require_divisible(what: str, size: int, mesh: DeviceMesh) -> None:
    if size % mesh.size():
        raise UserError(f"{what} {size} is not divisible by tp {mesh.size()}")


class LocalStyle(ParallelStyle):
    """A style whose module sees its share of each of its weights as a plain tensor while it runs."""

    def partial(self, module: nn.Module, mesh: DeviceMesh) -> tuple[str, ...]:
        """Weights of which each rank's gradient is a part: summed over tp, a unit's in one all-reduce."""
        return ()


class Colwise(LocalStyle):
    """nn.Linear with its output features split: (…, d) -> (…, f/tp), weight (f/tp, d).

    Not for a fused projection that is cut in pieces afterwards: each rank would cut its own share.

    The input is the same on every rank; what each rank contributes to its gradient is summed.
    Forward: nothing; backward: one all-reduce.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = _require(self, module, nn.Linear)
        _require_divisible("number of output features", module.out_features, device_mesh)
        distribute(module, device_mesh, weight=Shard(0), bias=Shard(0))
        return _with_forward(module, _bind(self.forward, module, device_mesh))

    def forward(self, module: nn.Linear, mesh: DeviceMesh, x: Tensor) -> Tensor:
        return F.linear(sum_gradient(x, mesh), module.weight, module.bias)


class ColwiseLocal(Colwise):
    """Colwise inside a module that has GatherSequence, which sums the input's gradient for all its linears.

    Forward: nothing; backward: nothing.
    """

    def forward(self, module: nn.Linear, mesh: DeviceMesh, x: Tensor) -> Tensor:
        return F.linear(x, module.weight, module.bias)


class KvHeads(ColwiseLocal):
    """Colwise_local for key and value projections, whose heads may be fewer than tp.

    Where tp divides the heads h, each rank holds and returns h/tp of them. Where h divides tp, the
    weight stays whole, (h k, d), and tp/h neighbours return the same head: (b, s, d) -> (b, s, k).
    Forward: nothing; backward: nothing, or with a whole weight its part of the unit's all-reduce.
    """

    def __init__(self, head_dim: int) -> None:
        self.head_dim = head_dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = _require(self, module, nn.Linear)
        heads, rest = divmod(module.out_features, self.head_dim)
        tp = device_mesh.size()
        if rest or (heads % tp and tp % heads):
            raise UserError(
                f"{module.out_features} features are not heads of {self.head_dim}"
                if rest
                else f"number of key/value heads {heads} neither divides tp {tp} nor is divisible by it"
            )
        if heads % tp == 0:
            return super()._apply(module, device_mesh)
        distribute(module, device_mesh, weight=Replicate(), bias=Replicate())
        head = device_mesh.get_local_rank() * heads // tp
        mine = slice(head * self.head_dim, (head + 1) * self.head_dim)
        return _with_forward(module, _bind(self._forward_one_head, module, mine))

    def partial(self, module: nn.Module, mesh: DeviceMesh) -> tuple[str, ...]:
        # Each rank's gradient covers its own head, and of that what its own queries contribute.
        module = _require(self, module, nn.Linear)
        fewer_than_ranks = module.out_features // self.head_dim % mesh.size()
        return ("weight", "bias") if fewer_than_ranks else ()

    def _forward_one_head(self, module: nn.Linear, mine: slice, x: Tensor) -> Tensor:
        return F.linear(x, module.weight[mine], None if module.bias is None else module.bias[mine])


class Rowwise(LocalStyle):
    """nn.Linear with its input features split: (…, f/tp) -> (…, d), weight (d, f/tp), bias whole.

    Forward: one all-reduce; backward: nothing.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = _require(self, module, nn.Linear)
        _require_divisible("number of input features", module.in_features, device_mesh)
        distribute(module, device_mesh, weight=Shard(1), bias=Replicate())
        return _with_forward(module, _bind(self.forward, module, device_mesh))

    def forward(self, module: nn.Linear, mesh: DeviceMesh, x: Tensor) -> Tensor:
        # The bias is added after the sum: inside it, it would be counted tp times.
        y = sum_output(F.linear(x, module.weight), mesh)
        return y if module.bias is None else y + module.bias


class RowwiseScatter(Rowwise):
    """Rowwise whose output is left split by sequence: (b, s, f/tp) -> (b, s/tp, d).

    Forward: one reduce-scatter; backward: one all-gather, and the bias's part of the unit's all-reduce.
    """

    def partial(self, module: nn.Module, mesh: DeviceMesh) -> tuple[str, ...]:
        # Each rank adds the bias to its own tokens only.
        return ("bias",)

    def forward(self, module: nn.Linear, mesh: DeviceMesh, x: Tensor) -> Tensor:
        y = scatter_sequence(F.linear(x, module.weight), mesh)
        return y if module.bias is None else y + module.bias


class GatherSequence(ParallelStyle):
    """Any module without weights of its own that needs whole sequences.

    Its first argument arrives as (b, s/tp, d) and is passed on as (b, s, d).
    One gather serves every linear inside, and its backward sums what they contribute to the gradient.
    Forward: one all-gather; backward: one reduce-scatter.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        own = [name for name, parameter in module._parameters.items() if parameter is not None]
        if own:
            raise UserError(f"gather_sequence is for modules without parameters of their own, not {own}")
        whole = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not args:
                raise UserError("a module with gather_sequence takes its sequence by position, not by name")
            return whole(gather_sequence(args[0], device_mesh), *args[1:], **kwargs)

        return _with_forward(module, forward)


class Replicated(LocalStyle):
    """Any module that sees the same input on every tp rank: weights whole, gradients equal.

    No collectives.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute(module, device_mesh, **{name: Replicate() for name in module._parameters})
        return module


class PerHead(Replicated):
    """Any module that treats heads alike and sees this rank's, a norm of queries for one, weights whole.

    (b, h/tp, s, k) -> the same. Each rank's gradient covers its own heads.
    Forward: nothing; backward: its part of the unit's all-reduce.
    """

    def partial(self, module: nn.Module, mesh: DeviceMesh) -> tuple[str, ...]:
        return tuple(module._parameters)


class Sequence(PerHead):
    """Any module that sees a share of the sequence, a norm for one: (b, s/tp, d) -> the same, weights whole.

    Each rank's gradient covers its own tokens. Forward: nothing; backward: its part of the unit's all-reduce.
    """


class ShardedDropout(ParallelStyle):
    """A module without parameters that draws random numbers for a share of positions or heads.

    tp peers draw different numbers; without this style they draw the same, as they must where each
    holds the whole activation. Forward: nothing; backward: nothing.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if any(True for _ in module.parameters()):
            raise UserError("sharded_dropout is for modules without parameters")
        whole = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not module.training:
                return whole(*args, **kwargs)
            with random_branch(device_mesh.get_local_rank(), device_mesh.device_type):
                return whole(*args, **kwargs)

        return _with_forward(module, forward)


class Vocab(LocalStyle):
    """nn.Embedding with its rows split: ids (b, s), the same on every rank -> (b, s/tp, d), weight (v/tp, d).

    tp need not divide v. Forward: one reduce-scatter; backward: one all-gather.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = _require(self, module, nn.Embedding)
        unsupported = [name for name in ("padding_idx", "max_norm") if getattr(module, name) is not None]
        if unsupported or module.scale_grad_by_freq or module.sparse:
            raise UserError(
                "style vocab is for nn.Embedding without padding_idx, max_norm, scale_grad_by_freq, sparse"
            )
        distribute(module, device_mesh, weight=Shard(0))
        bounds = share_of(module.num_embeddings, device_mesh.size(), device_mesh.get_local_rank())
        return _with_forward(module, _bind(self.forward, module, device_mesh, bounds))

    def forward(self, module: nn.Embedding, mesh: DeviceMesh, bounds: tuple[int, int], ids: Tensor) -> Tensor:
        start, stop = bounds
        elsewhere = (ids < start) | (ids >= stop)
        rows = F.embedding((ids - start).masked_fill(elsewhere, 0), module.weight)
        return scatter_sequence(rows.masked_fill(elsewhere.unsqueeze(-1), 0), mesh)


class VocabHead(LocalStyle):
    """nn.Linear from width to vocabulary: (b, s/tp, d) -> logits (b, s, v/tp), weight (v/tp, d).

    tp need not divide v. Forward: one all-gather; backward: one reduce-scatter.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = _require(self, module, nn.Linear)
        distribute(module, device_mesh, weight=Shard(0), bias=Shard(0))
        return _with_forward(module, _bind(self.forward, module, device_mesh))

    def forward(self, module: nn.Linear, mesh: DeviceMesh, x: Tensor) -> Tensor:
        return F.linear(gather_sequence(x, mesh), module.weight, module.bias)


_STYLES: dict[str, ParallelStyle] = {
    "colwise": Colwise(),
    "colwise_local": ColwiseLocal(),
    "rowwise": Rowwise(),
    "rowwise_scatter": RowwiseScatter(),
    "gather_sequence": GatherSequence(),
    "replicated": Replicated(),
    "sequence": Sequence(),
    "per_head": PerHead(),
    "sharded_dropout": ShardedDropout(),
    "vocab": Vocab(),
    "vocab_head": VocabHead(),
}

STYLE_NAMES = (*_STYLES, "kv_heads(HEAD_DIM)")


def style_of(name: str) -> ParallelStyle | None:
    """The style of that name, or None."""
    heads = re.fullmatch(r"kv_heads\(([1-9]\d*)\)", name)
    return KvHeads(int(heads[1])) if heads else _STYLES.get(name)


# The styles after which a rank holds only some positions of the sequence.
SEQUENCE_STYLES = (GatherSequence, RowwiseScatter, Sequence, Vocab, VocabHead)
