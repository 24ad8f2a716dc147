"""A traced step is the real one: what it sends, computes and holds, without its values and its peers."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from parallel2d.models.gpt2 import GPT2, GPT2Config
from parallel2d.models.llama import Llama, LlamaConfig
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.profiler import ProfilerActivity, profile

from parallel2d import (
    FsdpPolicy,
    MeshShape,
    Precision,
    UserError,
    build_mesh,
    init_weights,
    launch,
    parallelize,
)
from parallel2d.collectives import all_gather
from parallel2d.ledger import Ledger, Step, expected_step
from parallel2d.loss import VocabShard
from parallel2d.optim import build_optimizer
from parallel2d.planner.allocator import reserved_bytes
from parallel2d.planner.memory_log import Block, Event
from parallel2d.planner.model import ModelShape
from parallel2d.planner.moments import GATHERED
from parallel2d.planner.predict import predict
from parallel2d.planner.setup import ON_CPU, Setup
from parallel2d.planner.trace import Model, Traced, Workload, trace_depth, trace_step
from parallel2d.planner.tracer import tracing
from parallel2d.shards import local_block, share_of
from parallel2d.step import train_step

MIXED = Precision(torch.float32, torch.bfloat16, torch.float32)
# Sizes that no axis divides, wherever it need not.
UNEVEN = LlamaConfig(61, 56, 2, 8, 4, 6, 48)


def llama(config: LlamaConfig) -> Model:
    with torch.device("meta"):
        model = Llama(config)
    return model, model.tp_plan(), list(model.blocks)


def expected(config: LlamaConfig, shape: MeshShape, work: Workload) -> tuple[Ledger, int]:
    """The ledger by formula, and the bytes of rank 0's parameters, of the model that was traced."""
    with launch.imagined_world(shape.world):
        mesh = build_mesh(shape, "cpu")
        model, plan, units = llama(config)
        options = {"precision": work.precision, "fsdp": work.fsdp}
        options |= {"activation_checkpoint": work.activation_checkpoint}
        parallelize(model, mesh, plan=plan, units=units, **options)
        step = Step(
            work.micro_batch,
            work.seq_len,
            config.width,
            work.accumulation,
            work.precision.compute,
            work.precision.reduce,
            work.activation_checkpoint,
            resharding=work.fsdp.resharding,
            gradient_sync=work.gradient_sync,
        )
        shares = [local_block(parameter)[0] for parameter in model.parameters()]
        return expected_step(model, units, mesh, step), sum(s.numel() * s.element_size() for s in shares)


def flops(c: LlamaConfig, shape: MeshShape, work: Workload) -> int:
    """Matrix products and attention of rank 0's shares: once forward, twice and 2.5 times backward.

    Full checkpointing computes a block's forward again up to the input of its last product.
    """
    tokens, k, tp = work.micro_batch * work.seq_len, c.key_width, shape.tp
    queries, keys = c.num_heads // tp * k, max(c.num_kv_heads // tp, 1) * k
    start, stop = share_of(c.vocab_size, tp, 0)
    last = 2 * tokens * c.width * c.ffn_width // tp
    block = 2 * tokens * c.width * (2 * queries + 2 * keys) + 3 * last
    attention = 4 * work.micro_batch * work.seq_len**2 * queries
    again = block + attention - last if work.activation_checkpoint == "full" else 0
    head = 3 * 2 * tokens * c.width * (stop - start)
    return work.accumulation * (c.num_layers * (3 * block + 7 * attention // 2 + again) + head)


SLOW = pytest.mark.slow
CASES = [
    pytest.param(
        MeshShape(1, 4, 2), Workload(2, 8, 61, 1, MIXED, FsdpPolicy("auto"), "none"), id="4×2", marks=SLOW
    ),
    pytest.param(
        MeshShape(1, 2, 4),
        Workload(2, 8, 61, 1, MIXED, FsdpPolicy("always"), "selective"),
        id="2×4",
        marks=SLOW,
    ),
    pytest.param(
        MeshShape(2, 2, 2), Workload(2, 8, 61, 1, Precision(), FsdpPolicy("never"), "full"), id="HSDP"
    ),
    pytest.param(
        MeshShape(1, 8, 1),
        Workload(1, 8, 61, 2, Precision(), FsdpPolicy("auto"), "full", "last"),
        id="8×1",
        marks=SLOW,
    ),
    pytest.param(
        MeshShape(1, 1, 8),
        Workload(2, 8, 61, 1, MIXED, FsdpPolicy("auto"), "selective"),
        id="1×8",
        marks=SLOW,
    ),
]


@pytest.mark.parametrize(("shape", "gathers"), [(MeshShape(1, 2, 2), 6), (MeshShape(1, 2, 4), 4)], ids=str)
def test_auto_keeps_small_blocks_whole_from_forward_to_backward(shape, gathers):
    """By one tp rank's share: 84 and 42 MiB in bfloat16."""
    config = LlamaConfig(61, 2048, 3, 16, 16, 0, 2048)
    traced = trace_step(llama(config), shape, Workload(1, 8, 61, 1, MIXED, FsdpPolicy("auto"), "none"))
    assert traced.ledger["dp_shard", "all_gather"].count == gathers
    ours = predict(ModelShape.of(config), shape, Setup(1, 8), None, ON_CPU)
    assert dict(ours.ledger) == dict(traced.ledger)


@pytest.mark.parametrize(("shape", "work"), CASES)
def test_a_trace_sends_computes_and_holds_what_the_formulas_say(shape, work):
    traced = trace_step(llama(UNEVEN), shape, work)
    ledger, size = expected(UNEVEN, shape, work)
    assert dict(traced.ledger) == dict(ledger)
    assert traced.flops == flops(UNEVEN, shape, work)
    held = traced.phases["update"]
    parameters = sum(1 for _ in llama(UNEVEN)[0].parameters())
    # Two moments, and AdamW counts its steps for each parameter, in float32.
    states = {"parameters": size, "gradients": size, "optimizer": 2 * size + 4 * parameters}
    assert {part: held[part] for part in states} == states
    assert total(held) - total(states) < 1024  # the batch and single numbers
    assert traced.peak_bytes == max(map(total, traced.phases.values()))
    if work.fsdp.reshard_after_forward == "never":
        assert traced.phases["loss"][GATHERED] == ledger["dp_shard", "all_gather"].bytes
    if shape.dp_shard > 1:
        # The root's whole gradients and their copy to be reduced; they come last.
        itemsizes = work.precision.compute.itemsize + work.precision.reduce.itemsize
        root = 2 * -(-61 // shape.tp) * UNEVEN.width * itemsizes
        reduces = traced.phases["backward, before the blocks"]
        assert reduces[GATHERED] >= root > reduces["activations"]


def allocated_by_real_tensors(shape: MeshShape, work: Workload, config: LlamaConfig) -> int:
    """The most that a second step allocates, beyond what it found, on rank 0 of a world without peers."""
    ids = torch.zeros(work.micro_batch, work.seq_len, dtype=torch.int64)
    with launch.imagined_world(shape.world):
        mesh = build_mesh(shape, "cpu")
        model, plan, units = llama(config)
        options = {"precision": work.precision, "activation_checkpoint": work.activation_checkpoint}
        parallelize(model, mesh, plan=plan, units=units, **options)
        init_weights(model, torch.device("cpu"), 0)
        optimizer = build_optimizer(model, 1e-3, (0.9, 0.95), 0.1)
        vocab = VocabShard.of(work.vocab_size, mesh["tp"])

        def step() -> None:
            # What nobody sent may be no number; the peak has been by then.
            with suppress(FloatingPointError):
                train_step(model, [(ids, ids)], optimizer, vocab, mesh, 1.0)
            optimizer.zero_grad()

        step()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            step()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda e: e.start_ns())]
    assert sum(changes) == 0
    return max(accumulate(changes))


# Few logits: a CPU's kernels cast those in bfloat16 into a tensor of their own, which no dispatcher sees.
SELECTIVE = Workload(2, 64, 100, precision=MIXED, activation_checkpoint="selective")
REAL = [
    pytest.param(MeshShape(), Workload(2, 64, 1000), marks=SLOW),
    pytest.param(MeshShape(1, 2, 2), Workload(2, 64, 1000), marks=SLOW),
    pytest.param(MeshShape(1, 4, 2), SELECTIVE, marks=SLOW),
    (MeshShape(2, 2, 2), replace(SELECTIVE, activation_checkpoint="full")),
]


@pytest.mark.parametrize(("shape", "work"), REAL, ids=["1×1", "2×2", "4×2", "4×2 HSDP"])
def test_the_traced_peak_is_that_of_real_memory(shape, work):
    config = LlamaConfig(work.vocab_size, 128, 3, 8, 4, 0, 256)
    real = allocated_by_real_tensors(shape, work, config)
    traced = trace_step(llama(config), shape, work)
    before = sum(traced.parts[part] for part in ("parameters", "optimizer", "other"))
    # Attention's own workspace, of some kB, is no tensor that torch's dispatcher sees.
    assert real == pytest.approx(traced.peak_bytes - before, rel=1e-2)


class Stack(nn.Module):
    """As little as has depth."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(61, 12), nn.Linear(12, 61)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.ReLU()) for _ in range(depth))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x).tanh()


def stack(depth: int) -> Model:
    with torch.device("meta"):
        model = Stack(depth)
    return model, {}, list(model.blocks)


def llama_of_depth(depth: int) -> Model:
    return llama(replace(UNEVEN, num_layers=depth))


@pytest.mark.parametrize(
    ("build", "shape"),
    [(stack, MeshShape(2, 2, 1)), pytest.param(llama_of_depth, MeshShape(1, 2, 2), marks=SLOW)],
)
def test_depth_is_affine(build, shape):
    work = Workload(2, 8, 61)
    deep, whole = trace_depth(build, 7, shape, work), trace_step(build(7), shape, work)
    assert (deep.ledger, deep.flops, deep.peak_bytes) == (whole.ledger, whole.flops, whole.peak_bytes)
    assert deep.phases.items() <= whole.phases.items()
    assert deep.reserved_bytes is None and whole.reserved_bytes


@SLOW
def test_size_costs_nothing():
    """Llama 3.1 405B on 4,096 ranks."""
    config = LlamaConfig(128_256, 16_384, 126, 128, 8, 0, 53_248)
    work = Workload(1, 8192, 128_256, 1, MIXED, activation_checkpoint="full")
    shape = MeshShape(4, 128, 8)
    traced = trace_depth(lambda layers: llama(replace(config, num_layers=layers)), 126, shape, work)
    assert traced.flops == flops(config, shape, work)
    assert dict(traced.ledger) == dict(expected(config, shape, work)[0])
    assert traced.cpu_seconds < 20


def test_another_model_and_torch_as_it_was():
    resize, lock = torch.UntypedStorage.resize_, ShardingPropagator._fake_mode_lock
    with torch.device("meta"):
        model = GPT2(GPT2Config(61, 32, 2, 4, 64, 16))
    traced = trace_step((model, model.tp_plan(), list(model.blocks)), MeshShape(1, 2, 2), Workload(2, 8, 61))
    assert traced.ledger["dp_shard", "reduce_scatter"].count == 3
    assert (torch.UntypedStorage.resize_, ShardingPropagator._fake_mode_lock) == (resize, lock)


def test_what_cannot_be_traced_is_refused():
    model = nn.Linear(2, 2)
    with pytest.raises(UserError, match=r"build it under torch\.device\('meta'\).*weight, bias"):
        trace_step((model, {}, [model]), MeshShape(), Workload(1, 8, 61))
    with pytest.raises(UserError, match="31 logits per token on rank 0, for vocab_size 99"):
        trace_step(llama(UNEVEN), MeshShape(1, 1, 2), Workload(1, 8, 99))


def test_what_a_tracer_sees():
    """Shares and not wholes, a waited-for result once, values of real tensors only."""
    real = torch.tensor([5])
    with launch.imagined_world(4):
        mesh = build_mesh(MeshShape(1, 1, 4), "cpu")["tp"]
        with tracing() as tracer:
            share = DTensor.from_local(torch.zeros(8, 8), mesh, [Shard(0)], run_check=False)
            zeros = torch.zeros_like(share)
            assert max(map(total, tracer.memory.peaks(0).values())) == 2 * 8 * 8 * 4
            gathered = all_gather(zeros.to_local(), mesh.get_group())
            assert gathered.shape == (4, 8, 8)
            assert max(map(total, tracer.memory.peaks(0).values())) == (2 + 4) * 8 * 8 * 4
            assert (gathered.sum().item(), share.to_local().long()[0, 0].item()) == (1.0, 1)
            with unset_fake_temporarily():
                assert real.item() == 5
            del share, zeros, gathered
            torch.zeros(1)
            assert total(tracer.memory.peaks(len(tracer.memory.events) - 2)["between steps"]) == 4


def total(parts: Mapping[str, int]) -> int:
    return sum(parts.values())


def events(*sizes: tuple[str, int]) -> list[Event]:
    """(name, size): a block of that name is allocated; with size 0 it is freed."""
    blocks: dict[str, Block] = {}
    found = []
    for name, size in sizes:
        block = blocks.setdefault(name, Block("other", stream="compute" if name != "s" else "side"))
        found.append(Event(block, block.bytes, size, ""))
        block.bytes = size
    return found


MIB = 2**20


@pytest.mark.parametrize(
    ("stream", "reserved_mib"),
    [
        ([("a", 1), ("b", 1000)], 2),  # both from one small segment
        ([("a", 3 * MIB), ("b", 9 * MIB)], 20),  # both from one of 20 MiB
        ([("a", 11 * MIB - 1), ("b", 30 * MIB)], 42),  # each its own, in steps of 2 MiB
        ([("a", 30 * MIB), ("a", 0), ("b", 12 * MIB), ("c", 18 * MIB)], 30),  # split
        ([("a", 12 * MIB), ("a", 0), ("s", 12 * MIB)], 24),  # another stream's is not taken
        ([("a", 30 * MIB), ("a", 0), ("b", 29.5 * MIB), ("c", 2 * MIB)], 50),  # ½ MiB over is not split off
        (  # b and c join again; a stays in the way of what is larger
            [("a", 4 * MIB), ("b", 4 * MIB), ("c", 4 * MIB), ("b", 0), ("c", 0), ("d", 16 * MIB)],
            20,
        ),
        ([("a", 4 * MIB), ("b", 4 * MIB), ("a", 0), ("c", 12 * MIB), ("d", 14 * MIB)], 34),
        ([("a", 12 * MIB), ("b", 16 * MIB), ("b", 0), ("a", 0), ("c", 12 * MIB), ("d", 16 * MIB)], 28),
    ],
)
def test_the_allocator_rounds_splits_and_joins(stream, reserved_mib):
    assert reserved_bytes(events(*((name, int(size)) for name, size in stream))) == reserved_mib * MIB


def test_the_peaks_of_phases_are_by_part():
    traced = Traced({}, 0, {"a": {"logits": 3}, "b": {"logits": 2, "other": 2}}, None, 0.0)
    assert (traced.peak_phase, traced.peak_bytes, traced.parts) == ("b", 4, {"logits": 2, "other": 2})
