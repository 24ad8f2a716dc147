"""Loading reads what it needs, once, in little memory, and puts every number where it belongs."""

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from parallel2d.models.llama import LlamaConfig
from torch import nn

from parallel2d import MeshShape, Precision, build_mesh, init_weights, launch, parallelize
from parallel2d.checkpoint import exchange, manifest
from parallel2d.checkpoint.exchange import Exchange, Need, RankPlan, Read
from parallel2d.checkpoint.files import StoredBlocks
from parallel2d.checkpoint.find import open_checkpoint
from parallel2d.checkpoint.load import load_checkpoint
from parallel2d.checkpoint.manifest import Manifest, Piece
from parallel2d.checkpoint.state import shares_of, state_tensors
from parallel2d.checkpoint.store import CheckpointStore
from parallel2d.shards import Box
from tests.ranks import run_ranks
from tests.test_checkpoint import build, whole


def use_small_pieces(piece: int, of_round: int) -> None:
    """Many pieces and rounds at small size, in this process."""
    manifest.piece_rows.__defaults__ = (piece,)
    Manifest.__init__.__defaults__ = (piece, manifest.FORMAT, "")  # type: ignore[misc]
    exchange.ROUND_BYTES = of_round


@dataclass
class Traffic:
    """What one rank did in a load."""

    read: int = 0
    sent: list[int] = field(default_factory=list)  # by round
    received: list[int] = field(default_factory=list)


@contextmanager
def observed() -> Iterator[Traffic]:
    traffic = Traffic()
    read, exchanged = StoredBlocks._read, dist.all_to_all_single

    def count_read(self, name, start, into):
        done = read(self, name, start, into)
        traffic.read += done
        return done

    def count_exchange(output, input, *sizes):
        traffic.sent.append(input.nbytes)
        traffic.received.append(output.nbytes)
        return exchanged(output, input, *sizes)

    StoredBlocks._read, dist.all_to_all_single = count_read, count_exchange  # type: ignore[method-assign]
    try:
        yield traffic
    finally:
        StoredBlocks._read, dist.all_to_all_single = read, exchanged  # type: ignore[method-assign]


class Odd(nn.Module):
    """Layers of random sizes, and buffers of other dtypes, one without a dim."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__()
        sizes = [4 * dice.randint(1, 10) for _ in range(4)] + [
            dice.randint(1, 40)
        ]  # tp divides the first ones
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        self.register_buffer("scale", torch.zeros(()))
        self.register_buffer("counts", torch.zeros(7, dtype=torch.int64))
        self.register_buffer("mask", torch.zeros(2, 3, dtype=torch.bool))

    def reset_parameters(self) -> None:
        self.scale.fill_(0.5)
        self.counts.copy_(torch.arange(7))
        self.mask.copy_(torch.eye(2, 3))


def odd(shape: MeshShape, seed: int, dtype: torch.dtype, init: int):
    dice = random.Random(seed)
    with torch.device("meta"):
        model = Odd(dice)
    plan = {f"layers.{i}": dice.choice(["colwise", "rowwise"]) for i in range(3)}
    precision = Precision(dtype, dtype, dtype)
    parallelize(model, build_mesh(shape, "cpu"), plan=plan, units=[model.layers[0]], precision=precision)
    init_weights(model, torch.device("cpu"), init)
    if init:
        for buffer in model.buffers():
            buffer.zero_()
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


SHAPES_OF_4 = [
    MeshShape(*sizes) for sizes in ((1, 4, 1), (1, 2, 2), (1, 1, 4), (2, 2, 1), (2, 1, 2), (4, 1, 1))
]


def save_and_load_odd(folder: str, seeds: range) -> list[tuple[str, Traffic, int]]:
    """Random models from a random mesh to another; (meshes, what this rank did, stored bytes)."""
    use_small_pieces(256, 1000)
    found = []
    with launch.world(4, "cpu", 60):
        for seed in seeds:
            dice = random.Random(seed)
            source, target = dice.choice(SHAPES_OF_4), dice.choice(SHAPES_OF_4)
            dtype = dice.choice([torch.float64, torch.float32, torch.bfloat16])
            model, optimizer = odd(source, seed, torch.float64, init=0)
            for parameter in model.parameters():
                parameter.grad = parameter.detach().clone()
            optimizer.step()
            store = CheckpointStore(Path(folder) / str(seed))
            store.save(1, model, optimizer, {})
            saved = whole(model, optimizer)
            model, optimizer = odd(target, seed, dtype, init=1)
            dist.barrier()
            with observed() as traffic:
                load_checkpoint(store.latest(), model, optimizer)
            loaded = whole(model, optimizer)
            assert loaded.keys() == saved.keys() and {"model.scale", "model.mask"} < loaded.keys()
            for name, tensor in loaded.items():
                assert torch.equal(tensor, saved[name].to(tensor.dtype)), (seed, name)
            stored = sum(tensor.bytes for tensor in store.latest().manifest.tensors.values())
            found.append((f"{source} to {target}", traffic, stored))
    return found


@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, 24), marks=pytest.mark.slow)], ids=str)
def test_random_sizes_meshes_and_dtypes_bit_for_bit(tmp_path, seeds):
    for of_ranks in zip(*run_ranks(4, save_and_load_odd, str(tmp_path), seeds), strict=True):
        meshes, stored = of_ranks[0][0], of_ranks[0][2]
        traffic = [of_rank[1] for of_rank in of_ranks]
        assert sum(t.read for t in traffic) == stored, meshes
        for one in traffic:
            # A piece of 256 bytes goes to 3 others at most.
            assert max([*one.sent, *one.received], default=0) <= 1000, meshes
            assert len(one.sent) == len(traffic[0].sent)


LLAMA = LlamaConfig(vocab_size=509, width=120, num_layers=2, num_heads=8, num_kv_heads=8, ffn_width=248)


def save_llama(folder: str, shape: MeshShape) -> None:
    with launch.world(shape.world, "cpu", 120):
        use_small_pieces(32 * 2**10, 64 * 2**10)
        model, optimizer = build(shape, LLAMA)
        for parameter in model.parameters():
            parameter.grad = parameter.detach().clone()
        optimizer.step()
        CheckpointStore(Path(folder)).save(1, model, optimizer, {})


def load_llama(folder: str, shape: MeshShape, partial: bool) -> tuple[Traffic, int]:
    """What this rank did, and the bytes of its shares."""
    with launch.world(shape.world, "cpu", 120):
        use_small_pieces(32 * 2**10, 64 * 2**10)
        model, optimizer = build(shape, LLAMA)
        checkpoint = open_checkpoint(Path(folder) / "step-00000001")
        with observed() as traffic:
            load_checkpoint(checkpoint, model, optimizer, partial=partial)
        held = state_tensors(model, None if partial else optimizer)
        return traffic, sum(share.nbytes for share in shares_of(held).values())


def traffic_of(folder: Path, source: MeshShape, target: MeshShape, partial: bool = False):
    if not folder.exists():
        run_ranks(source.world, save_llama, str(folder), source)
    found = run_ranks(target.world, load_llama, str(folder), target, partial)
    stored = open_checkpoint(folder / "step-00000001").manifest.tensors
    needed = sum(t.bytes for name, t in stored.items() if not partial or name.startswith("model."))
    return [traffic for traffic, _ in found], needed


PAIRS = [((1, 2, 1), (1, 1, 2)), ((1, 1, 1), (2, 1, 1)), ((1, 2, 1), (1, 2, 1))]
OF_8 = [((4, 2), (8, 1)), ((8, 1), (1, 8)), ((1, 1), (8, 1)), ((2, 4), (4, 2))]
PAIRS_OF_8 = [tuple((1, *sizes) for sizes in pair) for pair in OF_8] + [((1, 8, 1), (4, 2, 1))]


@pytest.mark.parametrize(
    ("source", "target"), [*PAIRS, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in PAIRS_OF_8)]
)
def test_every_stored_byte_is_read_once(tmp_path, source, target):
    source, target = MeshShape(*source), MeshShape(*target)
    traffic, needed = traffic_of(tmp_path / "saved", source, target)
    read = sum(one.read for one in traffic)
    print(f"{source} to {target}: {read / needed:.3f} of {needed:,} bytes, {len(traffic[0].sent)} rounds")
    assert needed <= read <= 1.1 * needed
    assert max(one.read for one in traffic) <= 1.5 * needed / min(source.world, target.world) + 2**20
    if source == target:
        # 12-byte step counts and the like are on all ranks; nothing that is sharded is exchanged.
        assert sum(sum(one.sent) for one in traffic) < 0.01 * needed


def test_what_is_not_wanted_is_not_read(tmp_path):
    """The weights alone: a third of it."""
    traffic, needed = traffic_of(tmp_path / "saved", MeshShape(), MeshShape(1, 2, 1), partial=True)
    assert needed <= sum(one.read for one in traffic) <= 1.1 * needed


def grid(dice: random.Random, shape: tuple[int, ...]) -> list[Box]:
    """A tensor cut in each dim at random places."""
    boxes = [Box((), ())]
    for size in shape:
        cuts = sorted({0, size, *(dice.randrange(size) for _ in range(dice.randrange(3)))})
        spans = list(itertools.pairwise(cuts))
        boxes = [Box((*b.offsets, a), (*b.sizes, c - a)) for b in boxes for a, c in spans]
    return boxes


class Awaited:
    """What the ranks of a plan need; `deliver` ticks it off."""

    def __init__(self) -> None:
        self.left: list[torch.Tensor] = []  # by item: 1 where a number is still awaited
        self.needs: list[Need] = []

    def add(self, rank: int, box: Box) -> None:
        self.needs.append(Need(rank, len(self.left), box))
        self.left.append(torch.ones(box.sizes, dtype=torch.int))

    def deliver(self, read: Read) -> None:
        for part in read.parts:
            assert part.box.intersection(read.piece.box) == part.box and part.bytes == part.box.numel * 8
            assert self.needs[part.item].rank == part.rank
            part.box.within(self.needs[part.item].box).cut(self.left[part.item]).sub_(1)


def random_plans(dice: random.Random, awaited: Awaited) -> list[RankPlan]:
    plans = Exchange(dice.randint(1, 9))
    for tensor in range(5):
        shape = tuple(dice.randint(1, 12) for _ in range(dice.randint(0, 3)))
        first = len(awaited.needs)
        for rank in range(len(plans.plans)):
            boxes = grid(dice, shape)
            for box in dice.sample(boxes, dice.randint(0, min(3, len(boxes)))):
                awaited.add(rank, box)
        for box in grid(dice, shape):
            plans.add(Piece(f"{tensor}", 0, box.numel * 8, box, ""), "float64", 8, awaited.needs[first:])
    return plans.plans


@pytest.mark.parametrize("seed", range(20))
def test_exchange_delivers_every_byte_once_and_in_order(seed, monkeypatch):
    monkeypatch.setattr(exchange, "ROUND_BYTES", 300)
    awaited = Awaited()
    plans = random_plans(random.Random(seed), awaited)
    for rank, plan in enumerate(plans):
        for read in plan.own:
            assert {part.rank for part in read.parts} == {rank}
            awaited.deliver(read)
    for of_round in zip(*(plan.rounds for plan in plans), strict=True):
        arriving: dict[int, list[Read]] = {}
        for sender, one in enumerate(of_round):
            for read in one.reads:
                awaited.deliver(read)
                for rank in {part.rank for part in read.parts} - {sender}:
                    arriving.setdefault(rank, []).append(read)
            sent = [part for read in one.reads for part in read.parts if part.rank != sender]
            assert sum(part.bytes for part in sent) <= 300 or len(one.reads) == 1
            for rank, other in enumerate(of_round):
                received = [part for _, part in other.receives.get(sender, [])]
                assert received == [part for part in sent if part.rank == rank]
        for rank, one in enumerate(of_round):
            received = [part for of_sender in one.receives.values() for _, part in of_sender]
            assert sum(part.bytes for part in received) <= 300 or len(arriving[rank]) == 1
    assert all((left == 0).all() for left in awaited.left)


BIG = LlamaConfig(vocab_size=2000, width=512, num_layers=4, num_heads=8, num_kv_heads=8, ffn_width=1366)


def save_big(folder: str) -> None:
    with launch.world(2, "cpu", 120):
        model, optimizer = build(MeshShape(1, 2, 1), BIG)
        for parameter in model.parameters():
            parameter.grad = parameter.detach().clone()
        optimizer.step()
        CheckpointStore(Path(folder)).save(1, model, optimizer, {})


def memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def load_big(folder: str, shape: MeshShape) -> tuple[int, int]:
    """Bytes of this rank's shares, and the peak of its memory besides them."""
    with launch.world(shape.world, "cpu", 120):
        model, optimizer = build(shape, BIG)
        checkpoint = open_checkpoint(Path(folder) / "step-00000001")
        dist.barrier()
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
        before = memory("VmRSS")
        load_checkpoint(checkpoint, model, optimizer)
        weights, all_of_it = (
            sum(t.nbytes for t in shares_of(state_tensors(model, o)).values()) for o in (None, optimizer)
        )
        return all_of_it, memory("VmHWM") - before - (all_of_it - weights)


@pytest.mark.slow
@pytest.mark.parametrize("target", [(1, 2, 1), (1, 1, 2), (2, 1, 1), (4, 1, 1), (1, 1, 1)])
def test_loading_takes_64_mib_besides_the_shares(tmp_path, target):
    run_ranks(2, save_big, str(tmp_path))
    shape = MeshShape(*target)
    for share, extra in run_ranks(shape.world, load_big, str(tmp_path), shape):
        print(f"{shape}: a share of {share / 2**20:.0f} MiB, {extra / 2**20:.1f} MiB besides")
        assert extra <= 64 * 2**20
