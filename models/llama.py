"""Llama: configuration, modules, model, tensor-parallel plan; written for one device.

Under a plan the same code sees shares: shape comments say `s/tp` and `h/tp` where a rank holds a
part, and tp is 1 on one device. Paper: arXiv:2307.09288 (Llama 2), arXiv:2407.21783 (Llama 3).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn


@dataclass(frozen=True)
class LlamaConfig:
    """Shape of a Llama.

    Args:
        vocab_size: number of token ids.
        width: size of the residual stream.
        num_layers: number of blocks.
        num_heads: query heads.
        num_kv_heads: key/value heads, each serving num_heads / num_kv_heads query heads.
        head_dim: size of one head; 0 means width / num_heads.
        ffn_width: hidden size of the feed-forward layers.
        rope_theta: base of the rotary frequencies.
        norm_eps: epsilon of the RMS norms.
        init_std: standard deviation of the initial weights.
        tie_embeddings: one matrix for the embedding and the output head.
    """

    vocab_size: int = 256
    width: int = 128
    num_layers: int = 2
    num_heads: int = 8
    num_kv_heads: int = 8
    head_dim: int = 0
    ffn_width: int = 384
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    init_std: float = 0.02
    tie_embeddings: bool = False

    @property
    def key_width(self) -> int:
        """Size of one head, whether given or derived."""
        return self.head_dim or self.width // self.num_heads

    def problems(self, tp: int) -> list[str]:
        """What this shape has against itself and against tp; empty if nothing."""
        found = [
            f"model.{name} {size} is not positive"
            for name in ("vocab_size", "width", "num_layers", "num_heads", "num_kv_heads", "ffn_width")
            if (size := getattr(self, name)) < 1
        ]
        found += [f"model.rope_theta {self.rope_theta} is not positive"] if self.rope_theta <= 0 else []
        found += [
            f"model.{name} {value} is negative"
            for name in ("head_dim", "init_std", "norm_eps")
            if (value := getattr(self, name)) < 0
        ]
        if found:
            return found
        if not self.head_dim and self.width % self.num_heads:
            found.append(f"model.width {self.width} is not divisible by model.num_heads {self.num_heads}")
        if self.key_width % 2:
            found.append(f"head size {self.key_width} is odd: rotary embeddings need an even one")
        if self.num_heads % self.num_kv_heads:
            found.append(f"num_heads {self.num_heads} is not divisible by num_kv_heads {self.num_kv_heads}")
        for name in ("num_heads", "num_kv_heads", "ffn_width"):
            size = getattr(self, name)
            if size % tp:
                fits = ", ".join(str(n) for n in range(1, min(size, 64) + 1) if size % n == 0)
                found.append(f"{name} {size} is not divisible by tp {tp}: use tp {fits}")
        # Every rank must hold at least one row of the vocabulary, by DTensor's ⌈v/tp⌉ split.
        if -(-self.vocab_size // tp) * (tp - 1) >= self.vocab_size:
            found.append(f"vocab_size {self.vocab_size} leaves ranks of tp {tp} without a row")
        return found


PRESETS = {
    "debug": LlamaConfig(),
    "llama2-7b": LlamaConfig(32_000, 4096, 32, 32, 32, 0, 11_008),
    "llama3-8b": LlamaConfig(128_256, 4096, 32, 32, 8, 0, 14_336, rope_theta=500_000.0),
    "llama3-70b": LlamaConfig(128_256, 8192, 80, 64, 8, 0, 28_672, rope_theta=500_000.0),
}


class Linear(nn.Linear):
    """nn.Linear without bias, with normal initial weights."""

    def __init__(self, in_features: int, out_features: int, std: float) -> None:
        self.std = std
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class Embedding(nn.Embedding):
    """nn.Embedding with normal initial weights of the given standard deviation."""

    def __init__(self, num_embeddings: int, embedding_dim: int, std: float) -> None:
        self.std = std
        super().__init__(num_embeddings, embedding_dim)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class Attention(nn.Module):
    """Causal self-attention with rotary positions and grouped key/value heads."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.key_width
        queries, keys = config.num_heads * self.head_dim, config.num_kv_heads * self.head_dim
        self.q = Linear(config.width, queries, config.init_std)
        self.k = Linear(config.width, keys, config.init_std)
        self.v = Linear(config.width, keys, config.init_std)
        self.o = Linear(queries, config.width, residual_std(config))

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        # x: (b, s, d) -> (b, s/tp, d). Heads are counted from what the projections return: h/tp of them.
        q, k, v = (
            rearrange(y, "b s (h k) -> b h s k", k=self.head_dim) for y in (self.q(x), self.k(x), self.v(x))
        )
        q, k = rotate(q, rope), rotate(k, rope)
        grouped = q.shape[1] != k.shape[1]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return self.o(rearrange(y, "b h s k -> b s (h k)"))


class FeedForward(nn.Module):
    """SwiGLU (arXiv:2002.05202)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = Linear(config.width, config.ffn_width, config.init_std)
        self.up = Linear(config.width, config.ffn_width, config.init_std)
        self.down = Linear(config.ffn_width, config.width, residual_std(config))

    def forward(self, x: Tensor) -> Tensor:
        # (b, s, d) -> (b, s, f/tp) -> (b, s/tp, d)
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Pre-norm attention and feed-forward on the residual stream."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.width, config.norm_eps)
        self.ffn = FeedForward(config)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        # (b, s/tp, d) -> (b, s/tp, d)
        x = x + self.attention(self.attention_norm(x), rope)
        return x + self.ffn(self.ffn_norm(x))


class Llama(nn.Module):
    """Token ids (b, s) -> logits (b, s, v/tp)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.width, config.init_std)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.width, config.norm_eps)
        self.head = Linear(config.width, config.vocab_size, config.init_std)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        rope = rotary_table(ids.shape[1], self.config.key_width, self.config.rope_theta, ids.device)
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, rope)
        return self.head(self.norm(x))

    def tp_plan(self) -> dict[str, str]:
        """How each module is split over tp, and what it sends (parallel2d/styles.py)."""
        return {
            "embedding": "vocab",
            "blocks.*.attention_norm": "sequence",
            "blocks.*.attention": "gather_sequence",
            "blocks.*.attention.[qkv]": "colwise_local",
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
        not; plus attention's 12 × layers × heads × head size × sequence, causal masking not deducted
        (PaLM, arXiv:2204.02311, appendix B).
        """
        c = self.config
        attention = c.width * c.key_width * (2 * c.num_heads + 2 * c.num_kv_heads)
        per_layer = attention + 3 * c.width * c.ffn_width
        matmul_weights = c.num_layers * per_layer + c.width * c.vocab_size
        return 6 * matmul_weights + 12 * c.num_layers * c.num_heads * c.key_width * seq_len


def residual_std(config: LlamaConfig) -> float:
    """Initial standard deviation of what adds to the residual stream, two terms per layer."""
    return config.init_std / (2 * config.num_layers) ** 0.5


def rotary_table(seq_len: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles, each (s, k), float32 (arXiv:2104.09864).

    Computed anew in each forward: a buffer would have to survive meta, dtype casts and checkpoints.
    """
    frequencies = theta ** -(torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(seq_len, device=device, dtype=torch.float32), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate pairs (i, i + k/2) of each head: (b, h, s, k) -> (b, h, s, k), in at least float32."""
    cos, sin = rope
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)
