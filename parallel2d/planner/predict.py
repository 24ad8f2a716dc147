"""One mesh and one way to run on it: everything that the formulas say."""

from dataclasses import dataclass

from parallel2d.mesh_shape import MeshShape
from parallel2d.planner.hardware import Cluster
from parallel2d.planner.memory import Memory, memory
from parallel2d.planner.model import Flops, ModelShape, step_flops
from parallel2d.planner.setup import OURS, Program, Setup, whole_reach
from parallel2d.planner.step_time import Seconds, mfu, seconds, tokens_per_s_per_gpu
from parallel2d.traffic import Ledger, expected_traffic

# Half the width of what is printed beside a predicted speed, as a part of it: for a cluster whose constants
# were fitted on runs, and for one whose constants are a guess. docs/planner.md says how often they hold.
SPEED_INTERVAL = 0.15
SPEED_INTERVAL_OVER_TP = 0.25
SPEED_INTERVAL_OF_A_GUESS = 0.30


@dataclass(frozen=True)
class Speed:
    """Of a step. `interval`: half its width, as a part of it."""

    seconds: Seconds
    tokens_per_s_per_gpu: float
    mfu: float
    interval: float


@dataclass(frozen=True)
class Prediction:
    """Memory, traffic and FLOPs of one rank; for a known GPU its speed, and whether it fits."""

    shape: ModelShape
    mesh: MeshShape
    setup: Setup
    memory: Memory
    speed: Speed | None
    verdict: str | None

    @property
    def ledger(self) -> Ledger:
        """Per axis and kind: what parallel2d/ledger.py expects of the step, and observes."""
        groups, step = self.shape.groups(self.mesh.tp), self.setup.step(self.shape)
        return expected_traffic(groups, self.mesh, step, whole_reach(self.shape))

    @property
    def flops(self) -> Flops:
        """Of one micro-batch."""
        s = self.setup
        return step_flops(self.shape, s.micro_batch, s.seq_len, self.mesh.tp, s.checkpoint, compile=s.compile)


def speed_interval(cluster: Cluster, mesh: MeshShape) -> float:
    """Half its width: runs with tp are no part of what constants are fitted to, and are met less well."""
    if not cluster.gpu.fitted_on:
        return SPEED_INTERVAL_OF_A_GUESS
    return SPEED_INTERVAL if mesh.tp == 1 else SPEED_INTERVAL_OVER_TP


def predict(
    shape: ModelShape, mesh: MeshShape, setup: Setup, cluster: Cluster | None, program: Program = OURS
) -> Prediction:
    """For a device that hardware.yaml does not know (cluster None) only what does not depend on it."""
    needed = memory(shape, mesh, setup, program)
    if cluster is None:
        return Prediction(shape, mesh, setup, needed, None, None)
    taken = seconds(shape, mesh, setup, cluster, program)
    rate = tokens_per_s_per_gpu(mesh, setup, taken.step)
    speed = Speed(taken, rate, mfu(shape, setup, rate, cluster.gpu.flops), speed_interval(cluster, mesh))
    return Prediction(shape, mesh, setup, needed, speed, needed.verdict(cluster.gpu.memory_bytes))
