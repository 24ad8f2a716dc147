"""The shape of a GPT-2, its rules and its presets: data, without torch."""

from dataclasses import dataclass

from .rules import indivisible, negative, not_positive, rowless


@dataclass(frozen=True)
class GPT2Config:
    """Shape of a GPT-2.

    Args:
        vocab_size: number of token ids.
        width: size of the residual stream.
        num_layers: number of blocks.
        num_heads: attention heads, of width / num_heads each.
        ffn_width: hidden size of the feed-forward layers.
        max_positions: rows of the table of positions, and so the longest sequence.
        norm_eps: epsilon of the layer norms.
        init_std: standard deviation of the initial weights.
        embedding_dropout: of the sum of token and position embeddings.
        residual_dropout: of what attention and feed-forward add to the residual stream.
        attention_dropout: of the attention probabilities.
    """

    vocab_size: int = 256
    width: int = 128
    num_layers: int = 2
    num_heads: int = 8
    ffn_width: int = 512
    max_positions: int = 1024
    norm_eps: float = 1e-5
    init_std: float = 0.02
    embedding_dropout: float = 0.0
    residual_dropout: float = 0.0
    attention_dropout: float = 0.0

    def problems(self, tp: int) -> list[str]:
        """What this shape has against itself and against tp; empty if nothing."""
        sizes = ("vocab_size", "width", "num_layers", "num_heads", "ffn_width", "max_positions")
        found = not_positive("model", self, *sizes) + negative("model", self, "init_std", "norm_eps")
        found += [
            f"model.{name} {rate} is not in [0, 1)"
            for name in ("embedding_dropout", "residual_dropout", "attention_dropout")
            if not 0 <= (rate := getattr(self, name)) < 1
        ]
        if found:
            return found
        if self.width % self.num_heads:
            found.append(f"model.width {self.width} is not divisible by model.num_heads {self.num_heads}")
        found += indivisible(self, tp, "num_heads", "ffn_width")
        return found + rowless(self, tp, "vocab_size", "max_positions")


PRESETS = {
    "debug": GPT2Config(),
    "gpt2": GPT2Config(50_257, 768, 12, 12, 3072, 1024),
    "gpt2-medium": GPT2Config(50_257, 1024, 24, 16, 4096, 1024),
    "gpt2-large": GPT2Config(50_257, 1280, 36, 20, 5120, 1024),
    "gpt2-xl": GPT2Config(50_257, 1600, 48, 25, 6400, 1024),
}
