"""The sizes of the mesh axes, checked, and which part of a dim falls to which rank: arithmetic, no torch."""

from collections.abc import Callable
from dataclasses import dataclass

from parallel2d.errors import UserError

AXES = ("dp_replicate", "dp_shard", "tp")


@dataclass(frozen=True)
class MeshShape:
    """Sizes of the three mesh axes; their product is the world.

    tp varies fastest with the rank: tp peers are neighbours, so that on a cluster they share a node.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1

    @property
    def dp(self) -> int:
        """All data-parallel ranks: replicas × shards."""
        return self.dp_replicate * self.dp_shard

    @property
    def world(self) -> int:
        return self.dp * self.tp

    def __str__(self) -> str:
        if self.dp_replicate == 1:
            return f"{self.dp}×{self.tp}"
        return f"{self.dp}×{self.tp} (dp_replicate {self.dp_replicate})"


def choose_mesh(
    dp: int, tp: int, dp_replicate: int, world: int, problems: Callable[[MeshShape], list[str]]
) -> MeshShape:
    """The mesh asked for, or one UserError with every rule it breaks and the meshes that would work.

    Args:
        dp: all data-parallel ranks; -1 takes what tp leaves of the world.
        tp: tensor-parallel ranks.
        dp_replicate: how many of the dp ranks are replicas (HSDP).
        world: number of processes.
        problems: what else (model, batch, sequence) has against a shape.
    """
    found = _problems_of_sizes(dp, tp, dp_replicate, world)
    shape = None
    if not found:
        shape = MeshShape(dp_replicate, world // tp // dp_replicate, tp)
        found = problems(shape)
    if shape is None or found:
        works = [str(other) for other in mesh_shapes(world) if not problems(other)]
        hint = f"meshes (dp×tp) of {world} processes that work: {', '.join(works)}"
        raise UserError("\n".join([*found, hint] if works else found))
    return shape


def _problems_of_sizes(dp: int, tp: int, dp_replicate: int, world: int) -> list[str]:
    found = []
    if tp < 1:
        found.append(f"tp {tp} is not a positive number")
    if dp_replicate < 1:
        found.append(f"dp_replicate {dp_replicate} is not a positive number")
    if dp < 1 and dp != -1:
        found.append(f"dp {dp} is neither a positive number nor -1 (what tp leaves)")
    if found:
        return found
    if dp == -1 and world % tp:
        return [f"tp {tp} does not divide the world of {world} processes"]
    dp = world // tp if dp == -1 else dp
    if dp * tp != world:
        found.append(f"dp {dp} × tp {tp} = {dp * tp} is not the world of {world} processes")
    if dp % dp_replicate:
        found.append(f"dp {dp} is not divisible by dp_replicate {dp_replicate}")
    return found


def mesh_shapes(world: int) -> list[MeshShape]:
    """Every dp × tp of a world, without replicas."""
    return [MeshShape(1, world // tp, tp) for tp in range(1, world + 1) if world % tp == 0]


def share_of(size: int, parts: int, index: int) -> tuple[int, int]:
    """[start, stop) of one part of a dim, as DTensor and FSDP split it: ⌈size/parts⌉ while it lasts."""
    share = -(-size // parts)
    start = min(index * share, size)
    return start, min(start + share, size)
