"""GPT-2: modules, model, tensor-parallel plan; written for one device.

Under a plan the same code sees shares: shape comments say `s/tp` and `h/tp` where a rank holds a
part, and tp is 1 on one device. Paper: "Language Models are Unsupervised Multitask Learners" (2019).
"""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from .gpt2_config import PRESETS as PRESETS
from .gpt2_config import GPT2Config as GPT2Config
from .parts import Embedding, Linear, residual_std


class CausalMix(nn.Module):
    """softmax(q kᵀ / √k) v over earlier positions, with dropout of the probabilities.

    A module of its own, so that a plan can say that tp ranks drop independently: each has other heads.
    """

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # (b, h/tp, s, k) each -> the same
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.head_dim = config.width // config.num_heads
        self.q = Linear(config.width, config.width, config.init_std, bias=True)
        self.k = Linear(config.width, config.width, config.init_std, bias=True)
        self.v = Linear(config.width, config.width, config.init_std, bias=True)
        self.mix = CausalMix(config.attention_dropout)
        added_std = residual_std(config.init_std, config.num_layers)
        self.o = Linear(config.width, config.width, added_std, bias=True)
        self.dropout = nn.Dropout(config.residual_dropout)

    def forward(self, x: Tensor) -> Tensor:
        # x: (b, s, d) -> (b, s/tp, d). Heads are counted from what the projections return: h/tp of them.
        q, k, v = (
            rearrange(y, "b s (h k) -> b h s k", k=self.head_dim) for y in (self.q(x), self.k(x), self.v(x))
        )
        return self.dropout(self.o(rearrange(self.mix(q, k, v), "b h s k -> b s (h k)")))


class FeedForward(nn.Module):
    """Two linears with GELU between them, in its tanh approximation (arXiv:1606.08415)."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.up = Linear(config.width, config.ffn_width, config.init_std, bias=True)
        added_std = residual_std(config.init_std, config.num_layers)
        self.down = Linear(config.ffn_width, config.width, added_std, bias=True)
        self.dropout = nn.Dropout(config.residual_dropout)

    def forward(self, x: Tensor) -> Tensor:
        # (b, s, d) -> (b, s, f/tp) -> (b, s/tp, d)
        return self.dropout(self.down(F.gelu(self.up(x), approximate="tanh")))


class Block(nn.Module):
    """Pre-norm attention and feed-forward on the residual stream."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.LayerNorm(config.width, config.norm_eps)
        self.ffn = FeedForward(config)

    def forward(self, x: Tensor) -> Tensor:
        # (b, s/tp, d) -> (b, s/tp, d)
        x = x + self.attention(self.attention_norm(x))
        return x + self.ffn(self.ffn_norm(x))


class GPT2(nn.Module):
    """Token ids (b, s) -> logits (b, s, v/tp); one matrix for the embedding and the head."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.width, config.init_std)
        # Half of the tokens' deviation, as in the authors' code.
        self.positions = Embedding(config.max_positions, config.width, config.init_std / 2)
        self.dropout = nn.Dropout(config.embedding_dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width, config.norm_eps)
        self.head = Linear(config.width, config.vocab_size, config.init_std)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        length, longest = ids.shape[1], self.config.max_positions
        if length > longest:
            raise ValueError(
                f"sequence length {length} is more than model.max_positions {longest}: there is no position "
                f"for the rest, so shorten the sequence or train with more positions"
            )
        # One row of positions, looked up as tokens are, so that a rank gets those of its own share.
        positions = torch.arange(length, device=ids.device).unsqueeze(0)
        x = self.dropout(self.embedding(ids) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def tp_plan(self) -> dict[str, str]:
        """How each module is split over tp, and what it sends (parallel2d/styles.py)."""
        return {
            "embedding": "vocab",
            "positions": "vocab",
            "dropout": "sharded_dropout",
            "blocks.*.attention_norm": "sequence",
            "blocks.*.attention": "gather_sequence",
            "blocks.*.attention.[qkv]": "colwise_local",
            "blocks.*.attention.mix": "sharded_dropout",
            "blocks.*.attention.o": "rowwise_scatter",
            "blocks.*.attention.dropout": "sharded_dropout",
            "blocks.*.ffn_norm": "sequence",
            "blocks.*.ffn": "gather_sequence",
            "blocks.*.ffn.up": "colwise_local",
            "blocks.*.ffn.down": "rowwise_scatter",
            "blocks.*.ffn.dropout": "sharded_dropout",
            "norm": "sequence",
            "head": "vocab_head",
        }

    def flops_per_token(self, seq_len: int) -> int:
        """Floating-point operations of forward and backward per token.

        6 per weight of a matrix product, the head's included, the embeddings' lookups not; plus
        attention's 12 × layers × width × sequence, causal masking not deducted (PaLM,
        arXiv:2204.02311, appendix B).
        """
        c = self.config
        per_layer = 4 * c.width**2 + 2 * c.width * c.ffn_width
        matmul_weights = c.num_layers * per_layer + c.width * c.vocab_size
        return 6 * matmul_weights + 12 * c.num_layers * c.width * seq_len
