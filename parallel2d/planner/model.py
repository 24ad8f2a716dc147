"""A Llama-like transformer as data: its weights, and the FLOPs of a step.

Symbols, as in docs/planner.md: L layers, d width, q and k the widths of queries and of keys (as of values),
f feed-forward width, v vocabulary, s sequence length, b sequences per micro-batch, t tensor-parallel ranks.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from parallel2d.mesh_shape import share_of
from parallel2d.traffic import Weight


@dataclass(frozen=True)
class ModelShape:
    """What the formulas must know of a model; the field names are those of `LlamaConfig`.

    gated: three matrices per feed-forward layer (SwiGLU) and not two.
    """

    vocab_size: int
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_width: int
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    ffn_bias: bool = False
    qk_norm: bool = False
    sliding_window: int = 0
    gated: bool = True

    @classmethod
    def of(cls, config: Any) -> "ModelShape":
        """Of a `LlamaConfig`, or of what has its fields and tells the size of a head as `key_width`."""
        same = {f.name: getattr(config, f.name) for f in dataclasses.fields(cls) if f.name in vars(config)}
        return cls(**{**same, "head_dim": config.key_width})

    @property
    def query_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Of the keys; the values' is the same."""
        return self.num_kv_heads * self.head_dim

    @property
    def parameters(self) -> int:
        of_block = sum(w.numel for w in self.block(1))
        return self.num_layers * of_block + sum(w.numel for w in self.root(1))

    @property
    def layer_matrices(self) -> int:
        """Elements of one block's matrices."""
        ffn = (3 if self.gated else 2) * self.width * self.ffn_width
        return 2 * self.width * (self.query_width + self.key_width) + ffn

    def key_width_of(self, tp: int) -> int:
        """Of the keys that one rank computes: at least one head's."""
        return max(self.key_width // tp, self.head_dim)

    def groups(self, tp: int) -> list[list[Weight]]:
        """What FSDP gathers at once: each block, and last the root; as `Llama.tp_plan()` splits them."""
        return [self.block(tp)] * self.num_layers + [self.root(tp)]

    def root(self, tp: int) -> list[Weight]:
        table = Weight((self.vocab_size, self.width), 0)
        return [table, Weight((self.width,))] + [table] * (not self.tie_embeddings)

    def block(self, tp: int) -> list[Weight]:
        d, q, k, f = self.width, self.query_width, self.key_width, self.ffn_width
        # Key/value heads fewer than tp stay whole, and neighbours compute the same head.
        keys_dim = 0 if self.num_kv_heads % tp == 0 else None
        shapes: list[tuple[tuple[int, ...], int | None]] = [((d,), None), ((q, d), 0)]
        shapes += [((k, d), keys_dim)] * 2 + [((d, q), 1), ((d,), None)]
        shapes += [((f, d), 0)] * (2 if self.gated else 1) + [((d, f), 1)]
        if self.qkv_bias:
            shapes += [((q,), 0), ((k,), keys_dim), ((k,), keys_dim)]
        if self.o_bias:
            shapes.append(((d,), None))
        if self.ffn_bias:
            shapes += [((f,), 0)] * (2 if self.gated else 1) + [((d,), None)]
        if self.qk_norm:
            shapes += [((self.head_dim,), None)] * 2
        return [Weight(shape, tp_dim) for shape, tp_dim in shapes]


def flops_per_token(shape: ModelShape, seq_len: int) -> int:
    """Of the model, for MFU: 6 per weight of a matrix product, and attention without causal discount.

    PaLM (arXiv:2204.02311), appendix B; as `Llama.flops_per_token`.
    """
    weights = shape.num_layers * shape.layer_matrices + shape.width * shape.vocab_size
    seen = min(seq_len, shape.sliding_window or seq_len)
    return 6 * weights + 12 * shape.num_layers * shape.query_width * seen


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of one rank in one forward and backward, what is computed again included.

    matmul: of the blocks' matrices; attention: all s × s scores, as they are counted; head: its product.
    """

    matmul: int
    attention: int
    head: int

    @property
    def total(self) -> int:
        return self.matmul + self.attention + self.head


def step_flops(
    shape: ModelShape,
    micro_batch: int,
    seq_len: int,
    tp: int,
    checkpoint: str,
    *,
    tp_index: int = 0,
    compile: bool = False,
    keeps_all_products: bool = True,
) -> Flops:
    """What torch's FlopCounterMode counts: 2·m·n·k per product, twice that in backward.

    Attention's backward is five products to the forward's two (it computes the scores again,
    arXiv:2205.14135). `selective` keeps all products. `full` computes all of a block again but the last
    product, whose result nothing in backward asks for; a compiled block is one piece, and that with it.
    Without keeps_all_products `selective` computes every second product again.
    """
    tokens, d, f = micro_batch * seq_len, shape.width, shape.ffn_width // tp
    layer = 2 * d * shape.query_width // tp + 2 * d * shape.key_width_of(tp)
    layer += (3 if shape.gated else 2) * d * f
    scores = 4 * seq_len * shape.query_width // tp
    is_full = checkpoint == "full"
    again = is_full * (layer - (0 if compile else d * f))
    if checkpoint == "selective" and not keeps_all_products:
        again = d * shape.key_width_of(tp) + d * shape.query_width // tp + d * f
    start, stop = share_of(shape.vocab_size, tp, tp_index)
    layers = shape.num_layers * tokens
    return Flops(
        matmul=layers * (6 * layer + 2 * again),
        attention=layers * (scores * 7 // 2 + is_full * scores),
        head=6 * tokens * d * (stop - start),
    )
