"""The yardstick of train.py: FSDP2 and tensor parallelism by hand, the way PyTorch's tutorials put them.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 8 benchmarks/baseline_2d.py --dp 4 --tp 2

torch's own parallel styles, whose activations and weights are DTensors in forward and backward, its
loss_parallel, clip_grad_norm_ and fused AdamW. Nothing of this project is used.

https://docs.pytorch.org/tutorials/intermediate/TP_tutorial.html
"""

import argparse
import glob
import sysconfig
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from meter import MESH, SIZES, ffn_width, measure, with_arguments
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))

    def rotate(self, x: Tensor, turns: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turns).flatten(3)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (w(x).view(b, s, -1, self.head_dim) for w in (self.wq, self.wk, self.wv))
        q, k = self.rotate(q, turns), self.rotate(k, turns)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(b, s, -1))


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = ffn_width(width)
        self.w1, self.w3 = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(width, heads), FeedForward(width)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(width, 1e-5), nn.RMSNorm(width, 1e-5)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), turns)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self, sizes: argparse.Namespace) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(sizes.vocab_size, sizes.width)
        self.layers = nn.ModuleList(Block(sizes.width, sizes.heads) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width, 1e-5)
        self.output = nn.Linear(sizes.width, sizes.vocab_size, bias=False)

    def forward(self, ids: Tensor, turns: Tensor) -> Tensor:
        x = self.tok_embeddings(ids)
        for layer in self.layers:
            x = layer(x, turns)
        return self.output(self.norm(x))


def init_weights(model: nn.Module) -> None:
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.ones_(parameter)
        elif "embed" in name:
            nn.init.normal_(parameter)
        else:
            nn.init.trunc_normal_(parameter, std=0.02)


def parallelize(model: Llama, mesh: DeviceMesh) -> None:
    if mesh["tp"].size() > 1:
        split_over_tp(model, mesh["tp"])
    if mesh["dp"].size() > 1:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])


def split_over_tp(model: Llama, tp: DeviceMesh) -> None:
    outer = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, tp, outer)
    whole = Replicate()
    of_layer = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(whole, None)),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "ffn_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(whole,)),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w3": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
    }
    for layer in model.layers:
        parallelize_module(layer, tp, of_layer)


def rotations(seq_len: int, head_dim: int) -> Tensor:
    """(1, s, 1, k/2), complex."""
    frequencies = 1.0 / (500_000 ** (torch.arange(0, head_dim, 2).float() / head_dim))
    angles = torch.outer(torch.arange(seq_len), frequencies)
    return torch.polar(torch.ones_like(angles), angles)[None, :, None, :]


def standard_library() -> np.ndarray:
    """Its source text, byte by byte: the data of recipes/llama_2d.py, too."""
    files = sorted(glob.glob(sysconfig.get_paths()["stdlib"] + "/*.py"))
    text = b"".join(Path(file).read_bytes() for file in files)
    return np.frombuffer(text, dtype=np.uint8).astype(np.int64)


def main() -> None:
    sizes = with_arguments(__doc__, MESH, SIZES).parse_args()
    torch.set_num_threads(1)
    distributed = sizes.dp * sizes.tp > 1
    model = Llama(sizes)
    init_weights(model)
    if distributed:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (sizes.dp, sizes.tp), mesh_dim_names=("dp", "tp"))
        parallelize(model, mesh)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=8e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    turns = rotations(sizes.seq_len, sizes.width // sizes.heads)
    tokens, length = standard_library() % sizes.vocab_size, sizes.seq_len + 1
    share = sizes.global_batch // sizes.dp
    dp_rank = mesh.get_local_rank("dp") if distributed else 0

    def batch(number: int) -> tuple[Tensor, Tensor]:
        first = number * sizes.global_batch + dp_rank * share
        starts = [i * length % (len(tokens) - length) for i in range(first, first + share)]
        rows = torch.from_numpy(np.stack([tokens[start : start + length] for start in starts]))
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def step(number: int) -> float:
        ids, targets = batch(number)
        optimizer.zero_grad()
        with loss_parallel() if sizes.tp > 1 else nullcontext():
            loss = F.cross_entropy(model(ids, turns).flatten(0, 1).float(), targets.flatten())
            loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        mean = (loss.detach().full_tensor() if isinstance(loss, DTensor) else loss.detach()).clone()
        if sizes.dp > 1:
            dist.all_reduce(mean, group=mesh["dp"].get_group())
        float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        return float(mean) / sizes.dp

    measure(sizes, step)
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
