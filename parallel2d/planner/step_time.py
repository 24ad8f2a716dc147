"""Seconds of a step, by formula: arithmetic, memory traffic, tensor-parallel traffic, and what of the
data-parallel traffic the arithmetic does not hide.

Symbols as in model.py. The constants of `HAND` are one set for all programs and GPUs; the fitted ones
belong to a cluster (hardware.yaml).
"""

from dataclasses import dataclass

from parallel2d.mesh_shape import MeshShape
from parallel2d.planner.hardware import Cluster
from parallel2d.planner.memory import states
from parallel2d.planner.model import ModelShape, flops_per_token, step_flops
from parallel2d.planner.setup import OURS, Program, Setup, whole_reach
from parallel2d.traffic import moves_of_stream


@dataclass(frozen=True)
class ByHand:
    """Set by hand, once, before anything was fitted; they change the accuracy little (docs/planner.md).

    ffn, width, queries, vocabulary: bytes that elementwise operations move per token and number, in forward
    and backward of a block (of the loss: vocabulary).
    again: how much of them activation checkpointing adds; selective half of it.
    compiled: how much of them remains in a compiled block.
    copies: times that a gathered or scattered tensor is copied besides.
    casts: bytes per number that float8 adds to the products' operands.
    update: bytes of the update per weight.
    contention: how much of hidden data-parallel traffic still shows.
    latency_s: of one hop of a ring.
    async_shown: how much of tp's traffic an asynchronous tp shows.
    issued: how much the host issues of a compiled block's operations.
    """

    ffn: float = 30
    width: float = 200
    queries: float = 60
    vocabulary: float = 30
    again: float = 0.3
    compiled: float = 0.5
    copies: float = 1.5
    casts: float = 9
    update: float = 40
    contention: float = 0.15
    latency_s: float = 5e-6
    async_shown: float = 0.5
    issued: float = 0.3


HAND = ByHand()


@dataclass(frozen=True)
class Seconds:
    """Of one micro-batch on one rank, and the update's, each divided as the table shows it."""

    matmul: float
    attention: float
    elementwise: float
    tp_traffic: float
    dp_traffic: float
    update: float
    host: float
    accumulation: int

    @property
    def step(self) -> float:
        """The GPU waits for the host where that takes longer."""
        parts = self.matmul + self.attention + self.elementwise + self.tp_traffic + self.dp_traffic
        return max(parts, self.host) * self.accumulation + self.update

    @property
    def limit(self) -> str:
        """What takes the most of it."""
        parts = {
            "arithmetic": self.matmul + self.attention,
            "memory": self.elementwise,
            "tp traffic": self.tp_traffic,
            "dp traffic": self.dp_traffic,
        }
        if self.host > sum(parts.values()):
            return "host"
        return max(parts, key=lambda part: parts[part])


def seconds(
    shape: ModelShape, mesh: MeshShape, setup: Setup, cluster: Cluster, program: Program = OURS
) -> Seconds:
    """Prediction for a rank in the middle of a run."""
    gpu, reached = cluster.gpu, cluster.gpu.reached
    flops = step_flops(
        shape,
        setup.micro_batch,
        setup.seq_len,
        mesh.tp,
        setup.checkpoint,
        compile=setup.compile,
        keeps_all_products=program.keeps_all_products,
    )
    rate = gpu.flops * reached.arithmetic
    in_blocks = gpu.flops_float8 * reached.float8 if setup.float8 else rate
    matmul = flops.matmul / in_blocks + flops.head / rate
    # A causal kernel computes half of the scores.
    attention = flops.attention / 2 / (gpu.flops * reached.attention)
    memory_rate = gpu.bandwidth * reached.bandwidth
    elementwise = _moved_bytes(shape, mesh, setup) / memory_rate
    tp_traffic = _tp_seconds(shape, mesh, setup, cluster)
    busy = matmul + attention + elementwise + tp_traffic
    dp_traffic = _dp_seconds(shape, mesh, setup, cluster, busy)
    update = HAND.update * states(shape, mesh, 1)[0] / memory_rate
    host = _host_seconds(shape, mesh, setup, program)
    return Seconds(matmul, attention, elementwise, tp_traffic, dp_traffic, update, host, setup.accumulation)


def tokens_per_s_per_gpu(mesh: MeshShape, setup: Setup, step_s: float) -> float:
    return setup.tokens * setup.accumulation / mesh.tp / step_s


def mfu(shape: ModelShape, setup: Setup, tokens_per_s: float, peak_flops: float) -> float:
    """Of the model's FLOPs, without what is computed again, at a rate per GPU."""
    return tokens_per_s * flops_per_token(shape, setup.seq_len) / peak_flops


def _host_seconds(shape: ModelShape, mesh: MeshShape, setup: Setup, program: Program) -> float:
    issued = HAND.issued if setup.compile else 1.0
    return shape.num_layers * program.dispatch_s[mesh.tp > 1] * (1 + _again(setup)) * issued


def _again(setup: Setup) -> float:
    """What checkpointing adds to operations other than products, as a part of them."""
    return {"none": 0.0, "selective": HAND.again / 2, "full": HAND.again}[setup.checkpoint]


def _moved_bytes(shape: ModelShape, mesh: MeshShape, setup: Setup) -> float:
    """Of elementwise operations, copies around collectives, and float8's casts."""
    T, t, L, d = setup.tokens, mesh.tp, shape.num_layers, shape.width
    gates = 3 if shape.gated else 2
    heads = shape.query_width + shape.key_width / 2
    left = HAND.compiled if setup.compile else 1.0
    per_token = HAND.ffn * shape.ffn_width * gates / 3 + HAND.width * d + HAND.queries * heads
    moved = T / t * left * (L * per_token * (1 + _again(setup)) + HAND.vocabulary * shape.vocab_size)
    if t > 1:
        # Copied around the collectives, and the sums of gradients that the gathered stream collects.
        gathers, scatters = moves_of_stream(L, setup.step(shape), whole_reach(shape))
        moved += T * d * HAND.copies * left * (4 * (gathers + scatters) + 18 * L)
    if setup.float8:
        operands = 5 * d + 2 * shape.query_width + 2 * shape.key_width + gates * shape.ffn_width
        moved += HAND.casts * L * T * operands / t + 8 * L * shape.layer_matrices / t
    return moved


def _tp_seconds(shape: ModelShape, mesh: MeshShape, setup: Setup, cluster: Cluster) -> float:
    """All of it shows: each block waits for its sequence. On a ring a rank sends (t-1)/t of a tensor."""
    t = mesh.tp
    if t == 1:
        return 0.0
    gathers, scatters = moves_of_stream(shape.num_layers, setup.step(shape), whole_reach(shape))
    # What is gathered for a float8 product is gathered in float8.
    gathered = gathers * (1 if setup.float8 else setup.formats.compute.itemsize)
    stream = setup.tokens * shape.width * (gathered + scatters * setup.formats.compute.itemsize)
    within = t <= cluster.gpus_per_node
    rate = cluster.gpu.node_bandwidth if within else cluster.net_bandwidth
    shown = HAND.async_shown if setup.async_tp else 1.0
    return shown * stream * (t - 1) / t / (rate * cluster.gpu.reached.network)


def _dp_seconds(shape: ModelShape, mesh: MeshShape, setup: Setup, cluster: Cluster, busy: float) -> float:
    """What shows of gathering and reducing weights: what exceeds the rest, a part of what it hides, and the
    root's, which come first and last."""
    t, L = mesh.tp, shape.num_layers
    compute = 1 if setup.float8 else setup.formats.compute.itemsize
    gathers = {"never": L, "always": 2 * L}.get(str(setup.resharding(shape, t)), 2 * L - 1)
    block = shape.layer_matrices / t
    root = sum(w.numel for w in shape.root(t)) / t
    blocks_s = _over_shards(block * compute, mesh, cluster) * gathers
    blocks_s += L * _reduction(block * setup.formats.reduce.itemsize, mesh, cluster)
    shown = max(0.0, blocks_s - busy) + HAND.contention * min(blocks_s, busy)
    first = _over_shards(root * setup.formats.compute.itemsize, mesh, cluster)
    return shown + first + _reduction(root * setup.formats.reduce.itemsize, mesh, cluster)


def _reduction(size: float, mesh: MeshShape, cluster: Cluster) -> float:
    """Over the shards, and of each shard over the replicas, twice the way of a gather."""
    over_replicas = 2 * _over(size / mesh.dp_shard, mesh.dp_replicate, mesh.tp * mesh.dp_shard, cluster)
    return _over_shards(size, mesh, cluster) + over_replicas


def _over_shards(size: float, mesh: MeshShape, cluster: Cluster) -> float:
    return _over(size, mesh.dp_shard, mesh.tp, cluster)


def _over(size: float, ranks: int, stride: int, cluster: Cluster) -> float:
    """Seconds to gather or scatter `size` bytes over ranks that are `stride` apart.

    Those of one node share its links, and their ways to other nodes work side by side.
    """
    if ranks == 1:
        return 0.0
    here = max(1, min(ranks, cluster.gpus_per_node // stride))
    nodes = -(-ranks // here)
    network = cluster.gpu.reached.network
    within = size * (here - 1) / here / (cluster.gpu.node_bandwidth * network)
    between = size * (nodes - 1) / nodes / (here * cluster.net_bandwidth * network)
    return max(within, between) + HAND.latency_s * (ranks - 1)
