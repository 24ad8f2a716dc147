"""What the fork server imports once, beyond the packages themselves: the rooms a recipe uses."""

import parallel2d.models.llama

import parallel2d.checkpoint.store
import parallel2d.config
import parallel2d.data
import parallel2d.generate
import parallel2d.metrics
import parallel2d.step  # noqa: F401
