"""The vocabulary-parallel loss is torch's cross entropy, values and gradients."""

import pytest
import torch
import torch.nn.functional as F

from parallel2d import MeshShape, build_mesh, launch
from parallel2d.loss import VocabShard, cross_entropy_sum, gather_vocab
from tests.ranks import run_ranks


def example(vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 8 * torch.randn(2, 5, vocab_size, dtype=torch.float64, generator=generator)
    targets = torch.randint(vocab_size, (2, 5), generator=generator)
    targets[0, 1] = targets[1] = -100
    targets[0, 0], targets[0, 2] = 0, vocab_size - 1
    return logits, targets


def sharded_loss(tp: int, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    with launch.world(tp, "cpu", 60):
        vocab = VocabShard.of(vocab_size, build_mesh(MeshShape(tp=tp), "cpu")["tp"])
        logits, targets = example(vocab_size)
        mine = logits[..., vocab.start : vocab.stop].clone().requires_grad_()
        loss = cross_entropy_sum(mine, targets, vocab)
        (3 * loss).backward()
        return loss.detach(), gather_vocab(mine.grad, vocab), gather_vocab(mine.detach(), vocab)


SEVERAL_CHUNKS = 100_003  # of which a chunk has two rows


@pytest.mark.parametrize(
    ("tp", "vocab_size"),
    [(1, 11), (2, 11), (4, 10), (4, 13), (3, 3), (8, 64), (1, SEVERAL_CHUNKS), (2, SEVERAL_CHUNKS)],
)
def test_equals_torch(tp, vocab_size):
    logits, targets = example(vocab_size)
    whole = logits.clone().requires_grad_()
    expected = F.cross_entropy(whole.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=-100)
    (3 * expected).backward()
    for loss, gradient, gathered in run_ranks(tp, sharded_loss, tp, vocab_size):
        assert loss.item() == pytest.approx(expected.item(), rel=1e-13)
        assert torch.allclose(gradient, whole.grad, rtol=1e-12, atol=1e-14)
        assert torch.equal(gathered, logits)


def loss_and_gradient(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with launch.world(1, "cpu", 60):
        vocab = VocabShard.of(logits.shape[-1], build_mesh(MeshShape(), "cpu")["tp"])
        logits.requires_grad_()
        loss = cross_entropy_sum(logits, targets, vocab)
        loss.backward()
        return loss.detach(), logits.grad


def test_nothing_but_ignored_tokens_is_zero():
    loss, gradient = run_ranks(1, loss_and_gradient, torch.randn(1, 4, 7), torch.full((1, 4), -100))[0]
    assert loss.item() == 0
    assert torch.count_nonzero(gradient) == 0


def test_bfloat16_logits_are_summed_in_float32():
    logits = torch.randn(1, 5, SEVERAL_CHUNKS, generator=torch.Generator().manual_seed(0)).bfloat16()
    targets = torch.tensor([[0, 5, SEVERAL_CHUNKS - 1, -100, 1]])
    loss, gradient = run_ranks(1, loss_and_gradient, logits, targets)[0]
    expected = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")
    assert (loss.dtype, gradient.dtype) == (torch.float32, torch.bfloat16)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
