"""Llama and its relatives: modules, model, tensor-parallel plan; written for one device.

Under a plan the same code sees shares: shape comments say `s/tp` and `h/tp` where a rank holds a
part, and tp is 1 on one device. Papers: arXiv:2307.09288 (Llama 2), arXiv:2407.21783 (Llama 3);
biases make it Qwen2 (arXiv:2407.10671), the norm of queries and keys Qwen3 (arXiv:2505.09388), the
sliding window Mistral (arXiv:2310.06825).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from .llama_config import PRESETS as PRESETS
from .llama_config import LlamaConfig as LlamaConfig
from .parts import Embedding, Linear, RMSNorm, residual_std
from .rope import rotary_table, rotate


@dataclass(frozen=True)
class Positions:
    """What attention knows of positions: cos and sin of the rotary angles, and who sees whom.

    cos, sin: from `rotary_table`. mask: (s, s), added to scores: 0 where the row's position sees the
    column's, else -inf; None: it sees all up to itself.
    """

    cos: Tensor
    sin: Tensor
    mask: Tensor | None


class Attention(nn.Module):
    """Causal self-attention with rotary positions and grouped key/value heads."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.key_width
        queries, keys = config.num_heads * self.head_dim, config.num_kv_heads * self.head_dim
        self.q = Linear(config.width, queries, config.init_std, config.qkv_bias)
        self.k = Linear(config.width, keys, config.init_std, config.qkv_bias)
        self.v = Linear(config.width, keys, config.init_std, config.qkv_bias)
        added_std = residual_std(config.init_std, config.num_layers)
        self.o = Linear(queries, config.width, added_std, config.o_bias)
        self.q_norm = RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, x: Tensor, at: Positions) -> Tensor:
        # x: (b, s, d) -> (b, s/tp, d). Heads are counted from what the projections return: h/tp of them.
        q, k, v = (
            rearrange(y, "b s (h k) -> b h s k", k=self.head_dim) for y in (self.q(x), self.k(x), self.v(x))
        )
        q, k = rotate(self.q_norm(q), at.cos, at.sin), rotate(self.k_norm(k), at.cos, at.sin)
        grouped = q.shape[1] != k.shape[1]
        y = F.scaled_dot_product_attention(q, k, v, at.mask, is_causal=at.mask is None, enable_gqa=grouped)
        return self.o(rearrange(y, "b h s k -> b s (h k)"))


class FeedForward(nn.Module):
    """SwiGLU (arXiv:2002.05202)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = Linear(config.width, config.ffn_width, config.init_std, config.ffn_bias)
        self.up = Linear(config.width, config.ffn_width, config.init_std, config.ffn_bias)
        added_std = residual_std(config.init_std, config.num_layers)
        self.down = Linear(config.ffn_width, config.width, added_std, config.ffn_bias)

    def forward(self, x: Tensor) -> Tensor:
        # (b, s, d) -> (b, s, f/tp) -> (b, s/tp, d)
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Pre-norm attention and feed-forward on the residual stream."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.width, config.norm_eps)
        self.ffn = FeedForward(config)

    def forward(self, x: Tensor, at: Positions) -> Tensor:
        # (b, s/tp, d) -> (b, s/tp, d)
        x = x + self.attention(self.attention_norm(x), at)
        return x + self.ffn(self.ffn_norm(x))


class Llama(nn.Module):
    """Token ids (b, s) -> logits (b, s, v/tp)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.width, config.init_std)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.head = Linear(config.width, config.vocab_size, config.init_std)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        at = positions(ids.shape[1], self.config, x)
        for block in self.blocks:
            x = block(x, at)
        return self.head(self.norm(x))

    def tp_plan(self) -> dict[str, str]:
        """How each module is split over tp, and what it sends (parallel2d/styles.py)."""
        head_norms = {"blocks.*.attention.[qk]_norm": "per_head"} if self.config.qk_norm else {}
        return {
            "embedding": "vocab",
            "blocks.*.attention_norm": "sequence",
            "blocks.*.attention": "gather_sequence",
            "blocks.*.attention.q": "colwise_local",
            "blocks.*.attention.[kv]": f"kv_heads({self.config.key_width})",
            **head_norms,
            "blocks.*.attention.o": "rowwise_scatter",
            "blocks.*.ffn_norm": "sequence",
            "blocks.*.ffn": "gather_sequence",
            "blocks.*.ffn.gate": "colwise_local",
            "blocks.*.ffn.up": "colwise_local",
            "blocks.*.ffn.down": "rowwise_scatter",
            "norm": "sequence",
            "head": "vocab_head",
        }

    def flops_per_token(self, seq_len: int) -> int:
        """Floating-point operations of forward and backward per token.

        6 per weight of a matrix product, the head's included (tied or not), the embedding's lookup
        not; plus attention's 12 × layers × heads × head size × positions seen, causal masking not deducted
        (PaLM, arXiv:2204.02311, appendix B).
        """
        c = self.config
        attention = c.width * c.key_width * (2 * c.num_heads + 2 * c.num_kv_heads)
        per_layer = attention + 3 * c.width * c.ffn_width
        matmul_weights = c.num_layers * per_layer + c.width * c.vocab_size
        seen = min(seq_len, c.sliding_window or seq_len)
        return 6 * matmul_weights + 12 * c.num_layers * c.num_heads * c.key_width * seen


def positions(seq_len: int, config: LlamaConfig, like: Tensor) -> Positions:
    """Rotary angles and mask of a sequence.

    Computed anew in each forward: a buffer would have to survive meta, dtype casts and checkpoints.
    """
    device = like.device
    cos, sin = rotary_table(seq_len, config.key_width, config.rope_theta, config.rope_scaling, device)
    if not 0 < config.sliding_window < seq_len:
        return Positions(cos, sin, mask=None)
    index = torch.arange(seq_len, device=device)
    back = index.unsqueeze(1) - index
    unseen = (back < 0) | (back >= config.sliding_window)
    # In attention's dtype: of a boolean mask each block would make, and keep, such a one for itself.
    return Positions(cos, sin, torch.zeros_like(unseen, dtype=like.dtype).masked_fill_(unseen, -torch.inf))
