"""Mesh sizes: what is asked for, or one error that says what would work."""

import pytest
import torch.distributed as dist

from parallel2d import MeshShape, UserError, build_mesh, launch
from parallel2d.mesh import choose_mesh, dp_rank, dp_size, mesh_shapes
from tests.ranks import run_ranks


def no_problems(shape: MeshShape) -> list[str]:
    return []


def test_dp_takes_what_tp_leaves():
    assert choose_mesh(-1, 2, 1, 8, no_problems) == MeshShape(1, 4, 2)
    assert choose_mesh(4, 2, 2, 8, no_problems) == MeshShape(2, 2, 2)
    assert choose_mesh(1, 1, 1, 1, no_problems) == MeshShape()


@pytest.mark.parametrize(
    ("dp", "tp", "dp_replicate", "message"),
    [
        (3, 2, 1, "dp 3 × tp 2 = 6 is not the world of 8 processes"),
        (-1, 3, 1, "tp 3 does not divide the world of 8 processes"),
        (4, 2, 3, "dp 4 is not divisible by dp_replicate 3"),
        (0, 2, 1, "dp 0 is neither a positive number nor -1"),
        (4, 0, 1, "tp 0 is not a positive number"),
        (4, 2, 0, "dp_replicate 0 is not a positive number"),
    ],
)
def test_sizes_that_cannot_be(dp, tp, dp_replicate, message):
    with pytest.raises(UserError) as caught:
        choose_mesh(dp, tp, dp_replicate, 8, lambda s: ["tp too large"] if s.tp > 2 else [])
    assert message in str(caught.value)
    assert "meshes (dp×tp) of 8 processes that work: 8×1, 4×2" in str(caught.value)


def test_every_problem_is_listed_at_once():
    with pytest.raises(UserError) as caught:
        choose_mesh(1, 8, 1, 8, lambda s: [f"first {s}", "second"])
    assert str(caught.value).splitlines()[:2] == ["first 1×8", "second"]
    assert "that work" not in str(caught.value)


def test_shapes_of_a_world():
    assert [str(s) for s in mesh_shapes(6)] == ["6×1", "3×2", "2×3", "1×6"]


def places() -> tuple[int, int, int, int]:
    with launch.world(8, "cpu", 60):
        mesh = build_mesh(MeshShape(2, 2, 2), "cpu")
        return dist.get_rank(), dp_size(mesh), dp_rank(mesh), mesh["tp"].get_local_rank()


def test_tp_peers_are_neighbours_and_share_a_dp_rank():
    assert run_ranks(8, places) == [(rank, 4, rank // 2, rank % 2) for rank in range(8)]
