"""The shape of a Llama, its rules and its presets: data, which `parallel2d plan` reads without torch."""

from dataclasses import dataclass, field
from typing import Literal

from .rules import indivisible, negative, not_positive, rowless


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are lowered for contexts longer than those of pretraining.

    Args:
        kind: linear divides all frequencies by factor; llama3 only those whose wavelength is long.
        factor: divisor.
        low_freq_factor: llama3: wavelengths above original_context / low_freq_factor are divided in full.
        high_freq_factor: llama3: wavelengths below original_context / high_freq_factor stay.
        original_context: llama3: context length of pretraining.
    """

    kind: Literal["none", "linear", "llama3"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192

    def problems(self) -> list[str]:
        positive = ("factor", "low_freq_factor", "original_context")
        found = not_positive("model.rope_scaling", self, *positive)
        if self.kind == "none" and self != RopeScaling():
            found.append("model.rope_scaling has values but kind none: use kind linear or llama3")
        if self.high_freq_factor <= self.low_freq_factor:
            found.append(
                f"model.rope_scaling.high_freq_factor {self.high_freq_factor} is not above "
                f"low_freq_factor {self.low_freq_factor}"
            )
        return found


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
        rope_scaling: how they are lowered for long contexts.
        norm_eps: epsilon of the RMS norms.
        init_std: standard deviation of the initial weights.
        tie_embeddings: one matrix for the embedding and the output head.
        qkv_bias: biases of the query, key and value projections.
        o_bias: bias of the attention's output projection.
        ffn_bias: biases of the feed-forward layers.
        qk_norm: an RMS norm of each query and key head.
        sliding_window: a position sees itself and this many less one before it; 0: all.
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
    qkv_bias: bool = False
    o_bias: bool = False
    ffn_bias: bool = False
    qk_norm: bool = False
    sliding_window: int = 0
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)

    @property
    def key_width(self) -> int:
        """Size of one head, whether given or derived."""
        return self.head_dim or self.width // max(self.num_heads, 1)  # no head at all is told by `problems`

    def problems(self, tp: int) -> list[str]:
        """What this shape has against itself and against tp; empty if nothing."""
        sizes = ("vocab_size", "width", "num_layers", "num_heads", "num_kv_heads", "ffn_width")
        found = not_positive("model", self, *sizes, "rope_theta")
        found += negative("model", self, "head_dim", "init_std", "norm_eps", "sliding_window")
        found += self.rope_scaling.problems()
        if found:
            return found
        if not self.head_dim and self.width % self.num_heads:
            found.append(f"model.width {self.width} is not divisible by model.num_heads {self.num_heads}")
        if self.key_width % 2:
            found.append(f"head size {self.key_width} is odd: rotary embeddings need an even one")
        if self.num_heads % self.num_kv_heads:
            found.append(f"num_heads {self.num_heads} is not divisible by num_kv_heads {self.num_kv_heads}")
        return found + self._problems_of_tp(tp)

    def _problems_of_tp(self, tp: int) -> list[str]:
        found = indivisible(self, tp, "num_heads", "ffn_width")
        # Fewer key/value heads than ranks are shared by neighbours, each head by equally many.
        if self.num_kv_heads % tp and tp % self.num_kv_heads:
            sizes = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            fits = ", ".join(
                str(n) for n in sizes if self.num_kv_heads % n == 0 or n % self.num_kv_heads == 0
            )
            found.append(
                f"num_kv_heads {self.num_kv_heads} neither divides tp {tp} nor is divisible by it: "
                f"use tp {fits}"
            )
        return found + rowless(self, tp, "vocab_size")


PRESETS = {
    "debug": LlamaConfig(),
    "llama2-7b": LlamaConfig(32_000, 4096, 32, 32, 32, 0, 11_008),
    "llama3-8b": LlamaConfig(128_256, 4096, 32, 32, 8, 0, 14_336, rope_theta=500_000.0),
    "llama3-70b": LlamaConfig(128_256, 8192, 80, 64, 8, 0, 28_672, rope_theta=500_000.0),
    "llama3-405b": LlamaConfig(128_256, 16_384, 126, 128, 8, 0, 53_248, rope_theta=500_000.0),
}
