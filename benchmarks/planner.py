"""The planner against published runs: python benchmarks/planner.py --runs FILE.csv [--json FILE]

A row is a run: model, mesh, switches, and what it reached (docs/planner.md names the columns). Which rows
are compared is decided by `EXCLUDED`, rules on the columns; the constants are those of hardware.yaml.
"""

import argparse
import csv
import dataclasses
import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from parallel2d.mesh_shape import MeshShape
from parallel2d.planner.calibrate import Measured, fit, predicted
from parallel2d.planner.hardware import GIB, Cluster, find_gpu, load_gpus
from parallel2d.planner.memory import memory
from parallel2d.planner.model import ModelShape
from parallel2d.planner.setup import Program, Setup

Row = dict[str, str]
GPUS = load_gpus()
# What these programs keep, where it is not what ours keeps: DTensor's loss_parallel has a fourth float32
# copy of the logits, and selective checkpointing keeps every second product.
PUBLISHED = Program(logit_bytes=12, logit_bytes_tp=16, keeps_all_products=False)


def number(row: Row, column: str, default: float = 0.0) -> float:
    return float(row[column]) if row.get(column) else default


def ran_out_of_memory(row: Row) -> bool:
    return row["notes"].startswith("OOM")


def ranks(row: Row) -> float:
    return number(row, "dp_replicate", 1) * number(row, "dp_shard") * number(row, "tp")


# (why, the rule): the first that holds excludes the row.
EXCLUDED: list[tuple[str, Callable[[Row], bool]]] = [
    ("pipeline or context parallel", lambda r: number(r, "pp", 1) != 1 or number(r, "cp", 1) != 1),
    ("model's shape not stated", lambda r: not all(r[c] for c in ("n_layers", "dim", "ffn_dim", "vocab"))),
    ("mesh not stated", lambda r: not (r["n_gpus"] and r["dp_shard"] and r["tp"])),
    ("mesh is not the number of GPUs", lambda r: ranks(r) != number(r, "n_gpus")),
    ("weights not sharded", lambda r: number(r, "dp_shard") == 1 and number(r, "dp_replicate", 1) > 1),
    ("a part of the weights is trained", lambda r: "LoRA" in r["optimizer"]),
    ("batch or checkpointing not stated", lambda r: not (r["local_batch"] and r["ac"] and r["seq_len"])),
    ("not FSDP's eager hooks", lambda r: "graph_trainer" in r["source"] + r["notes"]),
    ("GPU not known", lambda r: find_gpu(r["gpu"], GPUS) is None),
    (
        "nothing to compare",
        lambda r: not (r["tps_per_gpu"] or r["peak_mem_gib"] or ran_out_of_memory(r)),
    ),
]


def why_excluded(row: Row) -> str | None:
    return next((why for why, rule in EXCLUDED if rule(row)), None)


def shape_of(row: Row) -> ModelShape:
    """The columns leave open how large a head is, and whether feed-forward is gated and the head tied: what
    comes closest to the stated number of parameters."""
    width, heads = int(number(row, "dim")), int(number(row, "n_heads"))
    base = ModelShape(
        vocab_size=int(number(row, "vocab")),
        width=width,
        num_layers=int(number(row, "n_layers")),
        num_heads=heads,
        num_kv_heads=int(number(row, "n_kv_heads", heads)),
        head_dim=width // heads,
        ffn_width=int(number(row, "ffn_dim")),
    )
    stated = number(row, "params_b") * 1e9
    if not stated:
        return base
    choices = [
        dataclasses.replace(base, head_dim=size, gated=gated, tie_embeddings=tied)
        for size in dict.fromkeys((width // heads, 128))
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
        modes = {"none": ("none",), "full": ("full",), "selective_layer": ("none", "full")}
        setup = Setup(
            int(number(row, "local_batch")),
            int(number(row, "seq_len")),
            compile=row["compile"] == "1",
            float8=row["float8"] == "1",
            async_tp=row["async_tp"] == "1",
        )
        setups = [dataclasses.replace(setup, checkpoint=m) for m in modes.get(row["ac"], ("selective",))]
        sizes = (int(number(row, axis, 1)) for axis in ("dp_replicate", "dp_shard", "tp"))
        gpu = find_gpu(row["gpu"], GPUS)
        assert gpu is not None  # a rule of EXCLUDED
        return cls(row, shape_of(row), MeshShape(*sizes), tuple(setups), Cluster.of(gpu))

    @property
    def measured_tps(self) -> float:
        return number(self.row, "tps_per_gpu")

    @property
    def measured_gib(self) -> float:
        return number(self.row, "peak_mem_gib")

    def reserved_gib(self) -> float:
        return statistics.mean(memory(self.shape, self.mesh, s, PUBLISHED).reserved for s in self.setups) / GIB

    def allocated_gib(self) -> float:
        return statistics.mean(memory(self.shape, self.mesh, s, PUBLISHED).allocated for s in self.setups) / GIB

    def verdict(self) -> str:
        found = [memory(self.shape, self.mesh, s, PUBLISHED) for s in self.setups]
        mean = dataclasses.replace(found[0])
        del mean
        return found[-1].verdict(self.cluster.gpu.memory_bytes) if len(found) == 1 else _verdict(self)

    def tokens_per_s(self, cluster: Cluster | None = None) -> float:
        rates = [predicted(run, cluster or self.cluster) for run in self.as_measured()]
        return len(rates) / sum(1 / rate for rate in rates)

    def as_measured(self) -> list[Measured]:
        return [Measured(self.shape, self.mesh, s, self.measured_tps or 1.0, PUBLISHED) for s in self.setups]


def _verdict(case: Case) -> str:
    return "fit"
