"""One step of the real code on a mesh that does not exist: what rank 0 sends, computes and holds.

One process, the fake process group, fake tensors: no values and no peers, but the mesh, the parallelized
model and `train_step` of a run.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallel2d import launch
from parallel2d.errors import UserError
from parallel2d.fsdp import FsdpPolicy, GradientSync, Precision, inference
from parallel2d.ledger import Ledger, Observer, Traffic
from parallel2d.loss import VocabShard
from parallel2d.mesh import MeshShape, build_mesh
from parallel2d.optim import build_optimizer
from parallel2d.parallelize import ActivationCheckpoint, parallelize
from parallel2d.planner.allocator import reserved_bytes
from parallel2d.planner.moments import PARTS
from parallel2d.planner.phases import Phases
from parallel2d.planner.tracer import tracing
from parallel2d.step import Batch, train_step
from parallel2d.tensor_parallel import Plan
from parallel2d.ties import to_empty

Model = tuple[nn.Module, Plan, Sequence[nn.Module]]


@dataclass(frozen=True)
class Workload:
    """What a rank does in a step, besides the model and the mesh.

    Args:
        micro_batch: sequences per forward.
        seq_len: tokens per sequence.
        vocab_size: number of token ids, those of all tp ranks together.
        accumulation: forwards per step.
        precision: as given to `parallelize`.
        fsdp: likewise.
        activation_checkpoint: likewise.
        gradient_sync: as given to `train_step`.
    """

    micro_batch: int
    seq_len: int
    vocab_size: int
    accumulation: int = 1
    precision: Precision = field(default_factory=Precision)
    fsdp: FsdpPolicy = field(default_factory=FsdpPolicy)
    activation_checkpoint: ActivationCheckpoint = "none"
    gradient_sync: GradientSync = "every"


@dataclass(frozen=True)
class Traced:
    """What one step takes on rank 0.

    Args:
        ledger: collectives, as an `Observer` counts them.
        flops: of matrix products and attention, forward, backward and what is computed again, as
            torch.utils.flop_counter counts them: causal attention in full.
        phases: {phase: {part: bytes}} at the phase's largest moment; the parts are memory_log.PARTS.
        reserved_bytes: what CUDA's caching allocator would hold for the tensors of two steps; None if
            the depth was extrapolated.
        cpu_seconds: of the trace itself.
    """

    ledger: Ledger
    flops: int
    phases: Mapping[str, Mapping[str, int]]
    reserved_bytes: int | None
    cpu_seconds: float

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))

    @property
    def parts(self) -> Mapping[str, int]:
        """What memory holds at the peak, in bytes."""
        return self.phases[self.peak_phase]

    @property
    def peak_bytes(self) -> int:
        """Most bytes of tensors alive at once. CUDA's own (context, workspaces, NCCL) are not among them."""
        return sum(self.parts.values())


def trace_step(model: Model, shape: MeshShape, work: Workload) -> Traced:
    """One `train_step` of the model on a mesh of any size, in this process alone.

    The first of two steps makes the optimizer's state, the second is read. Costs CPU seconds by the
    number of units, whatever their width and the world. Whatever the host reads of a tensor is one, so
    that a model whose shapes depend on values cannot be traced.

    Args:
        model: (module on meta, plan, units), as `parallelize` takes them. It is parallelized in place.

    Raises UserError if the model is not on meta, and what `parallelize` raises.
    """
    began = time.process_time()
    module, plan, units = model
    _require_meta(module)
    with launch.imagined_world(shape.world):
        mesh = build_mesh(shape, "cpu")
        parallelize(
            module,
            mesh,
            plan=plan,
            units=units,
            precision=work.precision,
            fsdp=work.fsdp,
            activation_checkpoint=work.activation_checkpoint,
        )
        ledger, flops, phases, reserved = _trace(module, units, mesh, work)
    return Traced(ledger, flops, phases, reserved, time.process_time() - began)


def _require_meta(module: nn.Module) -> None:
    real = [
        name for name, tensor in (*module.named_parameters(), *module.named_buffers()) if not tensor.is_meta
    ]
    if real:
        raise UserError(
            f"a model is traced without its values: build it under torch.device('meta') "
            f"({len(real)} of its tensors have values: {', '.join(real[:3])}{', …' if len(real) > 3 else ''})"
        )


def _trace(
    module: nn.Module, units: Sequence[nn.Module], mesh: DeviceMesh, work: Workload
) -> tuple[Ledger, int, Mapping[str, Mapping[str, int]], int]:
    with tracing() as tracer:
        memory = tracer.memory
        to_empty(module, "cpu")
        optimizer = build_optimizer(module, 1e-3, (0.9, 0.95), 0.1)
        size = (work.micro_batch, work.seq_len)
        batch = (torch.zeros(size, dtype=torch.int64), torch.zeros(size, dtype=torch.int64))
        vocab = _vocab_of(module, batch, work.vocab_size, mesh)
        Phases(memory, _edge(work)).watch(module, units, optimizer)

        def step() -> None:
            train_step(module, [batch] * work.accumulation, optimizer, vocab, mesh, 1.0, work.gradient_sync)

        step()
        first_event, first_flops = len(memory.events), tracer.flops
        with Observer(mesh) as observer:
            step()
        # Last of all, because shards that need no cast also pass as what FSDP gathers.
        memory.name("parameters", module.parameters())
        memory.name("optimizer", (v for state in optimizer.state.values() for v in state.values()))
        flops, events = tracer.flops - first_flops, list(memory.events)
    return observer.ledger, flops, memory.peaks(first_event), reserved_bytes(events)


def _vocab_of(module: nn.Module, batch: Batch, vocab_size: int, mesh: DeviceMesh) -> VocabShard:
    """Whether the model returns this rank's share of the logits or all of them."""
    shard = VocabShard.of(vocab_size, mesh["tp"])
    with inference(module):
        width = module(batch[0]).shape[-1]
    if width == shard.stop - shard.start:
        return shard
    if width == vocab_size:
        return VocabShard.whole(vocab_size)
    raise UserError(f"the model returns {width} logits per token on rank 0, for vocab_size {vocab_size}")


def _edge(work: Workload) -> int:
    """Units at either end of the model whose memory may differ from that of those between."""
    return 2 + max(work.fsdp.forward_prefetch, work.fsdp.backward_prefetch)


def trace_depth(build: Callable[[int], Model], depth: int, shape: MeshShape, work: Workload) -> Traced:
    """As trace_step of build(depth), from two models of a few units: each unit more adds the same.

    So it is of collectives, operations and each phase's peak; the largest of these is the peak. What the
    allocator reserves is not extrapolated.
    """
    shallow = 2 * _edge(work)
    if depth <= shallow + 1:
        return trace_step(build(depth), shape, work)
    one, other = (trace_step(build(units), shape, work) for units in (shallow, shallow + 1))
    more = depth - shallow

    def at_depth(low: int, high: int) -> int:
        return low + (high - low) * more

    ledger = {
        key: Traffic(
            at_depth(one.ledger[key].count, traffic.count), at_depth(one.ledger[key].bytes, traffic.bytes)
        )
        for key, traffic in other.ledger.items()
    }
    phases = {
        phase: {part: at_depth(parts[part], other.phases[phase][part]) for part in PARTS}
        for phase, parts in one.phases.items()
    }
    seconds = one.cpu_seconds + other.cpu_seconds
    return Traced(ledger, at_depth(one.flops, other.flops), phases, None, seconds)
