"""Composable 2D parallel training for PyTorch: FSDP2 × tensor parallelism on one DeviceMesh."""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_HOMES = {
    "errors": ("UserError",),
    "freeze": ("freeze",),
    "fsdp": ("FsdpPolicy", "Precision", "set_gradient_sync"),
    "init": ("init_weights",),
    "mesh": ("MeshShape", "build_mesh"),
    "optim": ("clip_gradients", "gradient_norm"),
    "parallelize": ("parallelize",),
}


def __getattr__(name: str) -> Any:
    """Imported when first asked for: torch takes seconds, and `parallel2d plan` needs none of it."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"parallel2d.{home}"), name)
    raise AttributeError(f"module 'parallel2d' has no attribute {name!r}")


class _Package(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        """Importing the module `freeze` or `parallelize` must not hide the function of that name."""
        if not (name in __all__ and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
