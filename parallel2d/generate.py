"""Text from a (sharded) model."""

import torch
from torch import Tensor, nn

from parallel2d.fsdp import inference
from parallel2d.loss import VocabShard, gather_vocab


def generate(
    model: nn.Module,
    prompt: Tensor,
    num_tokens: int,
    *,
    vocab: VocabShard,
    context: int,
    temperature: float,
    seed: int,
) -> Tensor:
    """Continue a prompt: ids (b, s) -> (b, s + num_tokens), the same on every rank.

    All ranks call it with the same prompt. Each token runs the whole model on at most `context`
    last tokens (no key/value cache), padded on the right to a multiple of tp; causal attention
    keeps the padding out of sight. Besides what the model issues: one all-gather over tp of the
    last position's logits per token.

    Args:
        temperature: 0 takes the likeliest token; above it, sampling.
        seed: of the sampling; global random state is untouched.
    """
    generator = torch.Generator(prompt.device).manual_seed(seed)
    ids = prompt
    with inference(model):
        for _ in range(num_tokens):
            window = ids[:, -context:]
            padding = -window.shape[1] % vocab.ranks
            logits = model(nn.functional.pad(window, (0, padding)))[:, window.shape[1] - 1]
            whole = gather_vocab(logits, vocab).float()
            ids = torch.cat((ids, _choose(whole, temperature, generator)), dim=1)
    return ids


def _choose(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """(b, v) -> (b, 1)."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    return torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator)
