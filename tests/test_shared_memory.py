"""Collectives through shared memory: against sums in one process, for every shape that does not fit."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallel2d import MeshShape, build_mesh, launch, shared_memory
from parallel2d.collectives import all_reduce_, reduce_scatter
from parallel2d.ledger import Observer
from tests.ranks import run_ranks
from tests.training import Case, Run


def numbers(rank: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Whole ones, whose sums are exact."""
    return torch.randint(-40, 40, shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def collectives(world: int, slot_bytes: int) -> None:
    shared_memory._SLOT_BYTES = slot_bytes
    with launch.world(world, "cpu", 60):
        rank, memory = dist.get_rank(), shared_memory.shared_memory(dist.group.WORLD)
        assert memory is not None
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64):
            for rows, columns in ((1, 1), (3, 7), (5, 64), (2, 1001), (0, 4), (4, 0)):
                shape = (rows, columns)
                each = [numbers(r, *shape, dtype=dtype) for r in range(world)]
                whole = torch.full((rows, world, columns), 7, dtype=dtype)
                memory.all_gather(whole, each[rank])
                assert torch.equal(whole, torch.stack(each, dim=1))
                each = [numbers(r, rows, world, columns, dtype=dtype) for r in range(world)]
                mine = torch.full(shape, 7, dtype=dtype)
                memory.reduce_scatter(mine, each[rank])
                assert torch.equal(mine, torch.stack(each)[:, :, rank].sum(dim=0, dtype=dtype))
                each = [numbers(r, rows * columns, dtype=dtype) for r in range(world)]
                total = each[rank].clone()
                memory.all_reduce(total)
                assert torch.equal(total, torch.stack(each).sum(dim=0, dtype=dtype))


def test_collectives():
    run_ranks(3, collectives, 3, 2**21)


def test_pieces_smaller_than_a_row_and_than_all_rows():
    run_ranks(2, collectives, 2, 128)


def hurried() -> None:
    """A rank that is ahead must not write where one that is behind still reads."""
    with launch.world(2, "cpu", 60):
        rank, memory = dist.get_rank(), shared_memory.shared_memory(dist.group.WORLD)
        whole, total = torch.empty(1, 2, 2**17), torch.empty(2**17)
        for turn in range(300):
            memory.all_gather(whole, torch.full((1, 2**17), 2.0 * turn + rank))
            assert whole[0, 0].eq(2 * turn).all() and whole[0, 1].eq(2 * turn + 1).all()
            total.fill_(turn + rank)
            memory.all_reduce(total)
            assert total.eq(2 * turn + 1).all()


def test_nobody_overwrites_what_is_still_read():
    run_ranks(2, hurried)


def told() -> str:
    """The error of an all-reduce that this rank begins."""
    try:
        all_reduce_(torch.ones(3))
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def of_another_collective() -> str:
    with launch.world(2, "cpu", 60):
        all_reduce_(torch.ones(1))
        if dist.get_rank() == 1:
            with pytest.raises(RuntimeError, match="32 bytes of b's' here"):
                reduce_scatter(torch.ones(4), torch.ones(8), dist.group.WORLD)
            return ""
        return told()


def test_ranks_that_run_different_collectives_stop():
    expected = "RuntimeError: ranks of a group run different collectives: 12 bytes of b'r' here, "
    assert run_ranks(2, of_another_collective)[0] == expected + "32 of b's' on its rank 1"


def of_a_lost_peer(message: Path) -> None:
    with launch.world(2, "cpu", 60):
        all_reduce_(torch.ones(1))
        if dist.get_rank() == 1:
            os._exit(0)
        message.write_text(told())
        os._exit(0)  # there is nobody to end the world with


def test_a_lost_peer_ends_the_wait_at_once(tmp_path):
    began = time.monotonic()
    run_ranks(2, of_a_lost_peer, tmp_path / "message")
    assert (tmp_path / "message").read_text().startswith("DistNetworkError: rank 1 of a group is gone")
    assert time.monotonic() - began < 30


def of_a_late_peer() -> str:
    with launch.world(2, "cpu", 2):
        all_reduce_(torch.ones(1))
        if dist.get_rank() == 0:
            return told()
        time.sleep(3)
    return ""


def test_the_wait_for_a_peer_ends_with_the_timeout_of_the_group():
    assert run_ranks(2, of_a_late_peer)[0] == (
        "DistNetworkError: rank 1 of a group does not answer within 2 s"
    )


def step_of(apart: bool) -> tuple[list[float], dict[Any, Any], bool]:
    if apart:
        shared_memory._boot_id = lambda: os.environ["RANK"]
    with launch.world(4, "cpu", 60):
        mesh = build_mesh(MeshShape(1, 2, 2), "cpu")
        run = Run.begin(mesh, Case())
        with Observer(mesh) as observer:
            numbers = run.train(0, 1)
        return numbers, observer.ledger, shared_memory.shared_memory(mesh["tp"].get_group()) is not None


def test_ranks_of_several_machines_send_the_same_through_sockets():
    for (ours, ledger, shared), (numbers, expected, fallback) in zip(
        run_ranks(4, step_of, False), run_ranks(4, step_of, True), strict=True
    ):
        assert shared and not fallback
        assert ledger == expected
        assert ours == pytest.approx(numbers, rel=1e-12)
