"""A published run as the planner sees it: what it predicts, and how far from that the measurement is."""

import dataclasses
import statistics
from dataclasses import dataclass

from planner_rows import CHECKPOINTING, GPUS, Row, is_set, number, ran_out_of_memory, size

from parallel2d.mesh_shape import MeshShape
from parallel2d.planner.calibrate import Measured, predicted
from parallel2d.planner.hardware import GIB, Cluster, find_gpu
from parallel2d.planner.memory import FRAGMENTATION, memory, verdict
from parallel2d.planner.model import ModelShape
from parallel2d.planner.setup import Program, Setup

# What these programs keep, where it is not what ours keeps: DTensor's loss_parallel has a fourth float32
# copy of the logits, and selective checkpointing keeps every second product. Over tp each of their
# operations passes DTensor's dispatch, about 0.1 ms of the host's time.
PUBLISHED = Program(
    logit_bytes=12, logit_bytes_tp=16, loss_chunk=0, keeps_all_products=False, dispatch_s=(2e-3, 14e-3)
)
# Runs whose notes say so have other kernels (a loss in place, for one): their speed is compared, their
# memory is not.
_OTHER_KERNELS = "FSDP1"


def shape_of(row: Row) -> ModelShape:
    """The columns leave open how large a head is, and whether feed-forward is gated and the head tied: what
    comes closest to the stated number of parameters."""
    width, heads = size(row, "dim"), size(row, "n_heads")
    base = ModelShape(
        vocab_size=size(row, "vocab"),
        width=width,
        num_layers=size(row, "n_layers"),
        num_heads=heads,
        num_kv_heads=size(row, "n_kv_heads", heads),
        head_dim=width // heads,
        ffn_width=size(row, "ffn_dim"),
    )
    stated = number(row, "params_b") * 1e9
    if not stated:
        return base
    choices = [
        dataclasses.replace(base, head_dim=head_dim, gated=gated, tie_embeddings=tied)
        for head_dim in dict.fromkeys((width // heads, 128))
        for gated in (True, False)
        for tied in (False, True)
    ]
    return min(choices, key=lambda shape: abs(shape.parameters - stated))


@dataclass(frozen=True)
class Case:
    """A row that is compared; `setups` are averaged (every second layer checkpointed is half of each)."""

    row: Row
    shape: ModelShape
    mesh: MeshShape
    setups: tuple[Setup, ...]
    cluster: Cluster

    @classmethod
    def of(cls, row: Row) -> "Case":
        """Of a row that no rule excludes."""
        setup = Setup(
            size(row, "local_batch"),
            size(row, "seq_len"),
            compile=is_set(row, "compile"),
            float8=is_set(row, "float8"),
            async_tp=is_set(row, "async_tp"),
        )
        setups = [dataclasses.replace(setup, checkpoint=c) for c in CHECKPOINTING[row["ac"].lower()]]
        mesh = MeshShape(size(row, "dp_replicate"), size(row, "dp_shard"), size(row, "tp"))
        gpu = find_gpu(row["gpu"], GPUS)
        assert gpu is not None  # a rule
        return cls(row, shape_of(row), mesh, tuple(setups), Cluster.of(gpu))

    @property
    def measured_tps(self) -> float:
        return number(self.row, "tps_per_gpu")

    @property
    def measured_gib(self) -> float:
        return number(self.row, "peak_mem_gib")

    def memory_gib(self, fragmentation: float = FRAGMENTATION) -> float:
        """Reserved, as these programs' logs tell it."""
        stays, transient = self._held()
        return (stays + (1 + fragmentation) * transient) / GIB

    def fragmentation(self) -> float:
        """With which this row's memory would be met."""
        stays, transient = self._held()
        return (self.measured_gib * GIB - stays) / transient - 1

    def _held(self) -> tuple[float, float]:
        """Bytes that stay, and the most of what comes and goes."""
        found = [memory(self.shape, self.mesh, s, PUBLISHED) for s in self.setups]
        return statistics.mean(m.stays for m in found), statistics.mean(m.transient for m in found)

    def verdict(self) -> str:
        return verdict(self.memory_gib(), self.cluster.gpu.memory_gib)

    def verdict_is_wrong(self) -> bool:
        if _OTHER_KERNELS in self.row["notes"]:
            return False
        return self.verdict() == ("fit" if ran_out_of_memory(self.row) else "no")

    def measured(self) -> list[Measured]:
        return [Measured(self.shape, self.mesh, s, self.measured_tps, PUBLISHED) for s in self.setups]

    def tokens_per_s(self, cluster: Cluster | None = None) -> float:
        rates = [predicted(run, cluster or self.cluster) for run in self.measured()]
        return len(rates) / sum(1 / rate for rate in rates)

    def memory_error(self, fragmentation: float = FRAGMENTATION) -> float | None:
        return self.memory_gib(fragmentation) / self.measured_gib - 1 if self.measured_gib else None

    def throughput_error(self, cluster: Cluster | None = None) -> float | None:
        return self.tokens_per_s(cluster) / self.measured_tps - 1 if self.measured_tps else None
