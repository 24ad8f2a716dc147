"""Which checkpoints of a run stay."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from parallel2d.checkpoint.find import Checkpoint

VAL_LOSS = "val_loss"  # in the trainer state, of the saved weights


@dataclass(frozen=True)
class Retention:
    """A checkpoint stays if any of these wants it.

    Args:
        last: how many of the newest; 0 keeps all.
        every: those at multiples of so many steps; 0: none.
        best: how many of the lowest validation loss, of those whose weights were validated.
    """

    last: int = 0
    every: int = 0
    best: int = 0

    def expendable(self, checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
        """Those that may go, of all that are whole, given oldest first. Never the newest."""
        if not self.last:
            return []
        validated = [c for c in checkpoints if _val_loss(c) < math.inf]
        best = sorted(validated, key=lambda c: (_val_loss(c), c.step))[: self.best]
        kept = {c.path for c in (*checkpoints[-self.last :], *best)}
        kept |= {c.path for c in checkpoints if self.every and c.step % self.every == 0}
        return [c for c in checkpoints if c.path not in kept]


def _val_loss(checkpoint: Checkpoint) -> float:
    loss = checkpoint.manifest.trainer.get(VAL_LOSS)
    return loss if isinstance(loss, float) and math.isfinite(loss) else math.inf
