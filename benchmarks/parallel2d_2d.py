"""This project's step, for train.py: the parts of recipes/llama_2d.py in the recipe's order.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 8 benchmarks/parallel2d_2d.py --dp 4 --tp 2

Each step is written to the console (here: nowhere), TensorBoard and metrics.jsonl; `--curves 0` does without.
"""

import argparse
import contextlib
import os
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from meter import MESH, SIZES, ffn_width, measure, with_arguments
from parallel2d.models.llama import Llama, LlamaConfig

from parallel2d import MeshShape, build_mesh, launch, parallelize
from parallel2d.data import Corpus, RankData, load_tokens
from parallel2d.init import init_weights
from parallel2d.loss import VocabShard
from parallel2d.mesh import dp_rank
from parallel2d.metrics import Monitor, Run
from parallel2d.optim import build_optimizer, set_learning_rate
from parallel2d.step import seed_step, train_step

LR = 8e-4


def main() -> None:
    parser = with_arguments(__doc__, MESH, SIZES)
    parser.add_argument("--curves", type=int, choices=(0, 1), default=1)
    sizes = parser.parse_args()
    shape = MeshShape(1, sizes.dp, sizes.tp)
    with launch.world(shape.world, "cpu", 600) as device, tempfile.TemporaryDirectory() as folder:
        train(sizes, shape, device, Path(folder))


def train(sizes: argparse.Namespace, shape: MeshShape, device: torch.device, folder: Path) -> None:
    config = LlamaConfig(
        vocab_size=sizes.vocab_size,
        width=sizes.width,
        num_layers=sizes.layers,
        num_heads=sizes.heads,
        num_kv_heads=sizes.heads,
        ffn_width=ffn_width(sizes.width),
        rope_theta=500_000.0,
    )
    with torch.device("meta"):
        model = Llama(config)
    mesh = build_mesh(shape, device.type)
    parallelize(model, mesh, plan=model.tp_plan(), units=list(model.blocks))
    init_weights(model, device, seed=0)
    optimizer = build_optimizer(model, LR, (0.9, 0.95), 0.1)
    vocab = VocabShard.of(config.vocab_size, mesh["tp"])
    corpus = Corpus(load_tokens(None), sizes.seq_len, config.vocab_size, 0.1, seed=0)
    micro_batch = sizes.global_batch // shape.dp
    data = RankData(corpus, sizes.global_batch, micro_batch, dp_rank(mesh), shape.dp, device)
    flops = model.flops_per_token(sizes.seq_len)
    run = Run(0, sizes.warm_up + sizes.steps, flops, device, shape.world)
    rank = dist.get_rank() if sizes.curves else -1
    monitor = Monitor(folder, run, every=1, config_text="", rank=rank)
    launch.settle()

    outside: list[float] = []

    def step(number: int) -> float:
        began = time.perf_counter()
        monitor.begin_step()
        set_learning_rate(optimizer, LR)
        seed_step(0, number, data.rank)
        batches = data.train_step(number * sizes.global_batch)
        before = time.perf_counter()
        stats = train_step(model, batches, optimizer, vocab, mesh, max_norm=1.0)
        after = time.perf_counter()
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            monitor.end_step(number + 1, stats, LR, (number + 1) * sizes.global_batch * sizes.seq_len)
        outside.append(before - began + time.perf_counter() - after)
        return stats.loss

    measure(sizes, step, outside)
    monitor.close()


if __name__ == "__main__":
    launch.run(main)
