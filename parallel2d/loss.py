"""Next-token loss on whole or vocabulary-sharded logits."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.collectives import all_gather
from parallel2d.shards import share_of

IGNORE_INDEX = -100


@dataclass(frozen=True)
class VocabShard:
    """The token ids [start, stop) whose logits this rank holds; the other ranks of the mesh hold the rest."""

    start: int
    stop: int
    vocab_size: int
    mesh: DeviceMesh | None

    @classmethod
    def of(cls, vocab_size: int, tp_mesh: DeviceMesh) -> "VocabShard":
        bounds = share_of(vocab_size, tp_mesh.size(), tp_mesh.get_local_rank())
        return cls(*bounds, vocab_size, tp_mesh)

    @classmethod
    def whole(cls, vocab_size: int) -> "VocabShard":
        """Of a model whose logits are whole on every rank."""
        return cls(0, vocab_size, vocab_size, mesh=None)

    @property
    def ranks(self) -> int:
        return 1 if self.mesh is None else self.mesh.size()


def cross_entropy_sum(logits: Tensor, targets: Tensor, vocab: VocabShard) -> Tensor:
    """Sum over tokens of -log softmax(logits)[target], in at least float32; the same on every tp rank.

    Args:
        logits: (b, s, v/tp), this rank's share of the vocabulary.
        targets: (b, s) token ids; IGNORE_INDEX counts nothing.

    Returns a 0-d tensor. No rank holds whole logits. Forward: one all-gather of two numbers per
    token (none at tp 1); backward: nothing.
    """
    return _VocabCrossEntropy.apply(logits.flatten(0, -2), targets.flatten(), vocab)


def gather_vocab(logits: Tensor, vocab: VocabShard) -> Tensor:
    """(…, v/tp) -> (…, v), without gradient. One all-gather, padded to the largest share."""
    if vocab.mesh is None or vocab.ranks == 1:
        return logits
    share = -(-vocab.vocab_size // vocab.ranks)
    padded = logits.new_full((*logits.shape[:-1], share), -torch.inf)
    padded[..., : logits.shape[-1]] = logits
    return all_gather(padded, vocab.mesh.get_group()).movedim(0, -2).flatten(-2)[..., : vocab.vocab_size]


class _VocabCrossEntropy(torch.autograd.Function):
    """In chunks of rows, whose float32 temporaries fit in a cache; logits and gradient keep their dtype."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, vocab: VocabShard) -> Tensor:
        # logits (n, v/tp), targets (n,)
        mine = (targets >= vocab.start) & (targets < vocab.stop)
        columns = (targets - vocab.start).masked_fill(~mine, 0)
        normalisers = [
            torch.logsumexp(_at_least_float32(rows), dim=-1) for rows in logits.split(_rows(logits))
        ]
        target_logit = logits.gather(-1, columns.unsqueeze(-1)).squeeze(-1).masked_fill(~mine, 0)
        local = torch.stack([torch.cat(normalisers), _at_least_float32(target_logit)])
        log_normaliser, target_logit = _combine(local, vocab.mesh)
        counted = targets != IGNORE_INDEX
        ctx.save_for_backward(logits, log_normaliser, columns, mine, counted)
        return (log_normaliser - target_logit).masked_fill(~counted, 0).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        # (softmax - 1 at the target) × the gradient of the loss, 0 where nothing is counted
        logits, log_normaliser, columns, mine, counted = ctx.saved_tensors
        scale = counted * grads[0].to(log_normaliser.dtype)
        gradient = torch.empty_like(logits)
        chunks = (t.split(_rows(logits)) for t in (gradient, logits, log_normaliser, scale, columns, mine))
        for into, rows, normaliser, factor, column, is_here in zip(*chunks, strict=True):
            same = into.dtype == normaliser.dtype
            wide = into if same else torch.empty_like(into, dtype=normaliser.dtype)
            torch.sub(rows, normaliser.unsqueeze(-1), out=wide).exp_()
            wide.scatter_add_(-1, column.unsqueeze(-1), -is_here.to(wide.dtype).unsqueeze(-1))
            wide.mul_(factor.unsqueeze(-1))
            if not same:
                into.copy_(wide)
            del wide  # or it would be there still while the next chunk's is made
        return gradient, None, None


def _rows(logits: Tensor) -> int:
    """How many rows make a chunk: 1 MiB of float32 for a CPU's cache, 256 MiB for a GPU's many cores.

    More where there would be above 64 chunks, each of which costs its dispatch.
    """
    elements = 2**18 if logits.device.type == "cpu" else 2**26
    return max(1, elements // logits.shape[-1], -(-len(logits) // 64))


def _at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _combine(local: Tensor, mesh: DeviceMesh | None) -> tuple[Tensor, Tensor]:
    """Each rank's (log-sum-exp, target logit), (2, n) -> those of the whole vocabulary, (n,) and (n,)."""
    if mesh is None or mesh.size() == 1:
        return local[0], local[1]
    parts = all_gather(local, mesh.get_group())
    return torch.logsumexp(parts[:, 0], dim=0), parts[:, 1].sum(dim=0)
