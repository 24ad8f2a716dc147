"""Each exchange of a step by itself: through gloo's sockets, and through shared memory.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 8 benchmarks/collectives.py --dp 4 --tp 2

The sizes are those of train.py's model (width 256, 6 layers, 8 sequences of 256 a step). Numbers are CPU
milliseconds of all ranks together, so of all groups that do the same at a time.
"""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from meter import MESH, with_arguments

from parallel2d import MeshShape, build_mesh, launch, shared_memory
from parallel2d.collectives import (
    all_gather_into,
    all_reduce_,
    gather_sequence,
    reduce_scatter,
    scatter_sequence,
)

REPEATS = 100
SEQUENCES, LENGTH, WIDTH, WEIGHTS_OF_A_BLOCK = 8, 256, 256, 851_968
Exchanges = dict[str, Callable[[], object]]


def main() -> None:
    sizes = with_arguments(__doc__, MESH).parse_args()
    shape = MeshShape(1, sizes.dp, sizes.tp)
    with launch.world(shape.world, "cpu", 600):
        most = shared_memory._MOST_RANKS
        shared_memory._MOST_RANKS = 0  # no group is connected
        by_gloo = {name: cpu_ms(exchange) for name, exchange in exchanges(shape).items()}
        shared_memory._MOST_RANKS = most
        shared_memory._of_group.clear()
        by_memory = {name: cpu_ms(exchange) for name, exchange in exchanges(shape).items()}
        if dist.get_rank() == 0:
            print("| | gloo, CPU ms | shared memory |\n|---|---|---|")
            for name, gloo in by_gloo.items():
                print(f"| {name} | {gloo:.1f} | {by_memory[name]:.1f} |")


def exchanges(shape: MeshShape) -> Exchanges:
    mesh = build_mesh(shape, "cpu")
    tp, dp = mesh["tp"], mesh["dp_shard"].get_group()
    batch = SEQUENCES // shape.dp
    part, whole = torch.randn(batch, LENGTH // shape.tp, WIDTH), torch.randn(batch, LENGTH, WIDTH)
    norms = torch.randn(2 * WIDTH)
    shard = torch.randn(WEIGHTS_OF_A_BLOCK // shape.world)
    weights = torch.randn(len(shard) * shape.dp)
    numbers = torch.randn(3, dtype=torch.float64)
    over_tp: Exchanges = {
        "a gather over tp": lambda: gather_sequence(part, tp),
        "a scatter over tp": lambda: scatter_sequence(whole, tp),
        "a sum of two norms' gradients over tp": lambda: all_reduce_(norms, tp.get_group()),
    }
    over_dp: Exchanges = {
        "a block's weights gathered over dp": lambda: all_gather_into(weights, shard, dp),
        "its gradients reduced over dp": lambda: reduce_scatter(shard, weights, dp),
    }
    return {
        **(over_tp if shape.tp > 1 else {}),
        **(over_dp if shape.dp > 1 else {}),
        "a sum of three numbers over all": lambda: all_reduce_(numbers),
    }


def cpu_ms(exchange: Callable[[], object]) -> float:
    for _ in range(5):
        exchange()
    dist.barrier()
    began = time.process_time()
    for _ in range(REPEATS):
        exchange()
    spent = torch.tensor(time.process_time() - began, dtype=torch.float64)
    dist.all_reduce(spent)
    return 1000 * float(spent) / REPEATS


if __name__ == "__main__":
    launch.run(main)
