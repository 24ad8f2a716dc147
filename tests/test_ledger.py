"""What a step sends is what the formula says: counts and bytes, per axis and kind."""

from dataclasses import dataclass, replace

import pytest
import torch
from parallel2d.models.llama import Llama, LlamaConfig

from parallel2d import FsdpPolicy, MeshShape, Precision, build_mesh, freeze, init_weights, launch, parallelize
from parallel2d.ledger import Ledger, Observer, Step, Traffic, expected_step, table
from parallel2d.loss import VocabShard
from parallel2d.optim import build_optimizer
from parallel2d.step import train_step
from tests.ranks import run_ranks, run_recipe
from tests.training import BUT_LAST

MESHES = [MeshShape(), MeshShape(1, 2, 1), MeshShape(1, 1, 2), MeshShape(1, 3, 2), MeshShape(2, 2, 2)]


@dataclass(frozen=True)
class Case:
    layers: int = 2
    accumulation: int = 1
    checkpoint: str = "none"
    tied: bool = False
    sync: str = "every"
    policy: FsdpPolicy = BUT_LAST
    reduce: torch.dtype = torch.float32
    output: torch.dtype | None = None
    frozen: tuple[str, ...] = ()
    relative: bool = False  # one key/value head, biases everywhere, QK-norm


def both(shape: MeshShape, cases: list[Case]) -> list[tuple[Ledger, Ledger]]:
    with launch.world(shape.world, "cpu", 60) as device:
        mesh = build_mesh(shape, "cpu")
        return [one(mesh, device, case) for case in cases]


def one(mesh, device, case: Case) -> tuple[Ledger, Ledger]:
    """Expected and observed, of a model with sizes that no axis divides."""
    config = LlamaConfig(61, 36, case.layers, 6, 6, 0, 50, tie_embeddings=case.tied)
    if case.relative:
        biases = {"qkv_bias": True, "o_bias": True, "ffn_bias": True}
        config = replace(config, num_kv_heads=1, qk_norm=True, **biases)
    with torch.device("meta"):
        model = Llama(config)
    freeze(model, case.frozen)
    units = list(model.blocks)
    precision = Precision(torch.float32, torch.bfloat16, case.reduce, case.output)
    parallelize(
        model,
        mesh,
        plan=model.tp_plan(),
        units=units,
        precision=precision,
        fsdp=case.policy,
        activation_checkpoint=case.checkpoint,
    )
    init_weights(model, device, 0)
    optimizer = build_optimizer(model, 1e-3, (0.9, 0.95), 0.1)
    vocab = VocabShard.of(61, mesh["tp"])
    batch = (torch.zeros(2, 8, dtype=torch.int64), torch.zeros(2, 8, dtype=torch.int64))
    step = Step(2, 8, 36, case.accumulation, precision.compute, precision.reduce, case.checkpoint)
    kind = {"resharding": case.policy.resharding, "gradient_sync": case.sync}
    step = replace(step, **kind, output=case.output)
    with Observer(mesh) as observer:
        train_step(model, [batch] * case.accumulation, optimizer, vocab, mesh, 1.0, case.sync)
    return expected_step(model, units, mesh, step), observer.ledger


def check(shape: MeshShape, *cases: Case) -> list[Ledger]:
    """Observed is expected, on every rank; what rank 0 observed in each case."""
    ranks = run_ranks(shape.world, both, shape, list(cases))
    for results in ranks:
        for case, (expected, observed) in zip(cases, results, strict=True):
            assert dict(observed) == dict(expected), case
    return [observed for _, observed in ranks[0]]


@pytest.mark.parametrize("shape", [*MESHES[:-1], pytest.param(MESHES[-1], marks=pytest.mark.slow)], ids=str)
def test_depths_and_modes_of_accumulation(shape):
    syncs = ("every", "last", "replicas_last")
    check(shape, Case(), Case(relative=True), *(Case(sync=sync, accumulation=2) for sync in syncs))


@pytest.mark.slow
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_five_layers(shape):
    check(shape, Case(layers=5), Case(layers=5, relative=True))


@pytest.mark.slow
def test_what_each_mode_of_accumulation_saves():
    """Five layers and the root reduce; twice, once, or once over the replicas only."""
    syncs = ("every", "last", "replicas_last")
    seen = check(MeshShape(2, 2, 2), *(Case(layers=5, accumulation=2, sync=sync) for sync in syncs))
    counts = [
        tuple(ledger[key].count for key in (("dp_shard", "reduce_scatter"), ("dp_replicate", "all_reduce")))
        for ledger in seen
    ]
    assert counts == [(12, 12), (6, 6), (12, 6)]
    # The norm weights of each unit and of the root, with each micro-batch.
    assert [ledger["tp", "all_reduce"].count for ledger in seen] == [12, 12, 12]


@pytest.mark.parametrize(
    "case",
    [Case(accumulation=3, checkpoint="full"), Case(checkpoint="selective"), Case(accumulation=2, tied=True)],
    ids=str,
)
def test_accumulation_checkpointing_and_ties(case):
    check(MeshShape(1, 2, 2), case, replace(case, sync="last"))


@pytest.mark.parametrize(
    "shape", [MeshShape(1, 3, 2), pytest.param(MeshShape(2, 2, 2), marks=pytest.mark.slow)], ids=str
)
def test_each_reshard_policy(shape):
    policies = [FsdpPolicy(choice) for choice in ("auto", "but_last", "always", "never")]
    seen = check(shape, *(Case(layers=5, accumulation=2, policy=policy) for policy in policies))
    # Per micro-batch six in forward; in backward four (not the last block, not the root), six, none.
    assert [ledger["dp_shard", "all_gather"].count for ledger in seen] == [12, 20, 24, 12]


@pytest.mark.parametrize("shape", [MeshShape(1, 4, 1), MeshShape(2, 4, 1)], ids=str)
def test_resharding_to_a_part_of_the_shards(shape):
    seen = check(shape, Case(layers=3, policy=FsdpPolicy(2)))[0]
    assert (seen["dp_shard", "all_gather"].count, seen["dp_shard/2", "all_gather"].count) == (4, 2)


def test_prefetch_moves_gathers_and_adds_none():
    deep = FsdpPolicy("but_last", forward_prefetch=3, backward_prefetch=2)
    plain, ahead = check(MeshShape(1, 2, 1), Case(layers=5), Case(layers=5, policy=deep))
    assert plain == ahead


FREEZES = [
    ("embedding*",),
    ("*", "!*norm*"),
    ("embedding*", "blocks.0.*"),
    ("embedding*", "blocks.[01].*", "blocks.2.attention*"),
    ("embedding*", "*norm*"),
    ("*", "!blocks.1.ffn.down*", "!blocks.2*"),
    ("*", "!norm*"),
    ("*", "!head*"),
]


_DEEP = FsdpPolicy("always", backward_prefetch=2)
FROZEN = [
    *(Case(layers=4, frozen=frozen) for frozen in FREEZES),
    *(Case(3, 2, sync="last", policy=_DEEP, frozen=FREEZES[i]) for i in (1, 2)),
    *(Case(4, checkpoint="full", frozen=FREEZES[i]) for i in (1, 3)),
]


@pytest.mark.parametrize("shape", [MeshShape(1, 2, 1), MeshShape(1, 1, 2)], ids=str)
def test_what_is_frozen_is_not_reduced_and_backward_ends_above_it(shape):
    seen = check(shape, *FROZEN)
    if shape.dp_shard > 1:
        # Blocks below the first trained parameter are gathered in forward only.
        gathers = [ledger["dp_shard", "all_gather"].count for ledger in seen]
        assert gathers[: len(FREEZES)] == [8, 8, 7, 6, 8, 7, 5, 5]


@pytest.mark.slow
def test_what_is_frozen_with_replicas():
    check(MeshShape(2, 2, 2), *FROZEN[1:4], FROZEN[-3])


def test_the_dtype_of_the_reduction_shows_in_its_bytes_and_that_of_the_output_in_the_loss():
    key = ("dp_shard", "reduce_scatter")
    plain, narrow = check(MeshShape(1, 2, 1), Case(), Case(reduce=torch.bfloat16))
    assert (narrow[key].count, 2 * narrow[key].bytes) == (plain[key].count, plain[key].bytes)
    plain, wide = check(MeshShape(1, 1, 2), Case(), Case(output=torch.float64))
    assert wide["tp", "all_gather"] == plain["tp", "all_gather"] + Traffic(0, 2 * 16 * 2 * 4)


def test_one_process_sends_nothing():
    assert check(MeshShape(), Case()) == [{}]


def test_the_recipe_prints_the_table_once(tmp_path):
    flags = ("--dp", "2", "--tp", "2", "--ledger", "true", "--steps", "2", "--data.seq_len", "32")
    flags += ("--log.val_batches", "1", "--log.sample_tokens", "0", "--out", str(tmp_path / "run"))
    flags += ("--fsdp.gradient_sync", "last", "--fsdp.reshard_after_forward", "never", "--freeze", "[embed*]")
    flags += ("--precision.output", "float64", "--precision.compute", "bfloat16")
    outcome = run_recipe(4, *flags, "--activation_checkpoint", "full", "--data.micro_batch", "4")[0]
    assert outcome.exitcode == 0, outcome.stderr
    assert outcome.stdout.count("axis          collective") == 1
    assert "tp            reduce_scatter" in outcome.stdout and "differs" not in outcome.stdout


def test_the_table_of_one_process_is_empty_and_a_long_number_moves_its_columns():
    assert table({}, {}).splitlines() == [table({}, {})]
    long = {("tp", "all_gather"): Traffic(483, 517_545_656_320_000)}
    assert " 517,545,656,320,000 " in table(long, long)
