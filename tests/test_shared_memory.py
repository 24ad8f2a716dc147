"""Collectives through shared memory: against sums in one process, for every shape that does not fit."""

import torch
import torch.distributed as dist

from parallel2d import launch, shared_memory
from tests.ranks import run_ranks


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
