"""Composable 2D parallel training for PyTorch: FSDP2 × tensor parallelism on one DeviceMesh."""

from parallel2d.errors import UserError
from parallel2d.freeze import freeze
from parallel2d.fsdp import FsdpPolicy, Precision, set_gradient_sync
from parallel2d.init import init_weights
from parallel2d.mesh import MeshShape, build_mesh
from parallel2d.optim import clip_gradients, gradient_norm
from parallel2d.parallelize import parallelize

__all__ = [
    "FsdpPolicy",
    "MeshShape",
    "Precision",
    "UserError",
    "build_mesh",
    "clip_gradients",
    "freeze",
    "gradient_norm",
    "init_weights",
    "parallelize",
    "set_gradient_sync",
]
