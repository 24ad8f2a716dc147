"""Who talks to whom: the sizes of the mesh axes, checked, and the DeviceMesh made from them."""

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from parallel2d.mesh_shape import AXES, MeshShape, choose_mesh, mesh_shapes

__all__ = [
    "AXES",
    "MeshShape",
    "build_mesh",
    "choose_mesh",
    "dp_rank",
    "dp_size",
    "mesh_shapes",
    "sum_over_dp",
]


def build_mesh(shape: MeshShape, device_type: str) -> DeviceMesh:
    """The world as a DeviceMesh with axes dp_replicate, dp_shard and tp, sizes of 1 included.

    Collective: creates one process group per axis.
    """
    return init_device_mesh(device_type, (shape.dp_replicate, shape.dp_shard, shape.tp), mesh_dim_names=AXES)


def dp_size(mesh: DeviceMesh) -> int:
    """Number of data-parallel ranks: replicas × shards."""
    return mesh["dp_replicate"].size() * mesh["dp_shard"].size()


def dp_rank(mesh: DeviceMesh) -> int:
    """This rank's place among them; tp peers share it."""
    shard = mesh["dp_shard"]
    return mesh["dp_replicate"].get_local_rank() * shard.size() + shard.get_local_rank()


def sum_over_dp(value: Tensor, mesh: DeviceMesh) -> Tensor:
    """Add up a small tensor over the data-parallel ranks, in place.

    One all-reduce per data axis larger than 1.
    """
    for axis in ("dp_shard", "dp_replicate"):
        if mesh[axis].size() > 1:
            dist.all_reduce(value, group=mesh[axis].get_group())
    return value
