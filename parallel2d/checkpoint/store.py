"""Save a run: weights and optimizer state by DCP, the rest as JSON; in the background; keep some.

A checkpoint is a folder `step-00000200`. It is written as `step-00000200.tmp` and renamed when all
ranks are done: a folder without `.tmp` is whole.
"""

import json
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from parallel2d.checkpoint.files import write_error
from parallel2d.checkpoint.find import Checkpoint, checkpoints_in, delete, name_of
from parallel2d.checkpoint.load import Resumed
from parallel2d.checkpoint.manifest import Manifest, versions
from parallel2d.checkpoint.retention import Retention
from parallel2d.checkpoint.state import (
    HostCopies,
    as_chunks,
    mesh_of,
    shares_of,
    split_of,
    state_tensors,
)
from parallel2d.checkpoint.writer import CheckpointWriter
from parallel2d.errors import UserError
from parallel2d.fsdp import class_of
from parallel2d.launch import say


@dataclass(frozen=True)
class Saved:
    """How a save ended: `error` is "" or why there is no checkpoint; seconds from the call to the rename.

    `note`: what else went wrong, on rank 0.
    """

    path: Path
    seconds: float
    error: str
    note: str


class CheckpointStore:
    """Saves the checkpoints of one run folder; all ranks make the same calls. Use it as a context.

    A save that fails is told, and the run goes on with the checkpoints that it has; only if the last
    save before the end failed, that raises there. At most one save is under way.

    Args:
        folder: holds one folder per checkpoint; other names in it are left alone.
        retention: which checkpoints stay.
        background: copy what is to be saved and write it in a thread, over a process group of its own.
        tell: gets a line for each save that ended, on every rank, when the store is next called;
            by default rank 0 prints it.
        resumed: where the run went on: that checkpoint is never deleted.
    """

    def __init__(
        self,
        folder: Path,
        retention: Retention | None = None,
        *,
        background: bool = False,
        tell: Callable[[str], None] = say,
        resumed: Resumed | None = None,
    ) -> None:
        self.folder, self.retention, self.tell = folder, retention or Retention(), tell
        self._resumed_from = resumed.checkpoint.path.resolve() if resumed else None
        self._began_from = resumed.began_from if resumed else ""
        self._copies = HostCopies() if background else None
        self._thread = ThreadPoolExecutor(1, "checkpoint") if background else None
        # The thread's collectives must not meet those of training.
        self._group = dist.new_group(backend="gloo") if background else None
        self._pending: Future[Saved] | None = None
        self._reserved: Future[None] | None = None
        self._last_error = ""
        self._entered = False

    def __enter__(self) -> "CheckpointStore":
        self._entered = True
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._finish()
        except BaseException:
            # A failure of the run is told rather than one of the save, which was waited for in any case.
            if kind is None:
                raise
        finally:
            if self._thread:
                self._thread.shutdown()
        if kind is None and self._last_error:
            raise UserError(f"the last checkpoint was not saved: {self._last_error}")

    def latest(self) -> Checkpoint | None:
        """The newest whole checkpoint."""
        whole, _ = checkpoints_in(self.folder)
        return whole[-1] if whole else None

    def reserve(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Get the memory for copies while training goes on, so that the first save need not wait for it.

        To be called when the optimizer has its state, after the first update. No communication.
        """
        if self._thread and self._copies:
            shares = shares_of(state_tensors(model, optimizer))
            self._reserved = self._thread.submit(self._copies.reserve, shares)

    def save(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, trainer_state: Mapping[str, Any]
    ) -> float:
        """Write a checkpoint, or begin to; seconds for which the caller was held up.

        Every rank writes its own shards. Weights that are not finite are refused: they would in time
        push the good checkpoints out. DCP exchanges plans through rank 0.
        """
        if self._thread and not self._entered:
            raise RuntimeError("a store that saves in the background is a context: nothing else waits for it")
        began = time.perf_counter()
        self._finish()
        final = self.folder / name_of(step)
        if final.exists():
            raise UserError(f"{final} exists: a checkpoint is never overwritten")
        state = state_tensors(model, optimizer)
        facts = Manifest(
            step=step,
            mesh=mesh_of(model),
            versions=versions(),
            model=class_of(model).__name__,
            optimizer=type(optimizer).__name__,
            # As it will be read back, where keys are strings; and not to change while it is written.
            trainer=json.loads(json.dumps(dict(trainer_state))),
            files={},
            tensors={},
            began_from=self._began_from,
        )
        shares = shares_of(state)
        if self._thread and self._copies:
            if self._reserved:
                self._reserved.result()
            shares = self._copies.take(shares)
            self._pending = self._thread.submit(self._write, final, facts, state, shares, began)
        else:
            self._ended(self._write(final, facts, state, shares, began))
        return time.perf_counter() - began

    def poll(self) -> None:
        """Tell of a save that has ended since the last call. No communication."""
        if self._pending and self._pending.done():
            self._finish()

    def _finish(self) -> None:
        """Wait for the save that is under way."""
        if self._pending:
            pending, self._pending = self._pending, None
            self._ended(pending.result())

    def _ended(self, saved: Saved) -> None:
        self._last_error = saved.error
        if saved.error:
            self.tell(f"NOT saved  {saved.path}: {saved.error}; the run goes on with the checkpoints it has")
        else:
            self.tell(f"saved {saved.path} in {saved.seconds:.1f} s{saved.note}")

    def _write(
        self,
        final: Path,
        facts: Manifest,
        state: Mapping[str, Tensor],
        shares: Mapping[str, Tensor],
        began: float,
    ) -> Saved:
        """Write, commit, delete what is old. The same outcome on all ranks."""
        writing = final.with_name(final.name + ".tmp")
        splits = {name: split_of(tensor) for name, tensor in state.items()}
        # Not buffers: a causal mask is full of infinities.
        weights = [shares[name] for name, tensor in state.items() if isinstance(tensor, nn.Parameter)]
        writer = CheckpointWriter(writing, final, facts, splits, must_be_finite=weights)
        error, note = "", ""
        try:
            dcp.save(as_chunks(state, shares), storage_writer=writer, process_group=self._group)
        except CheckpointException as caught:
            if dist.get_rank() == 0:
                # First, for what is then told to be free.
                shutil.rmtree(writing, ignore_errors=True)
            error = self._why(caught, state)
        if dist.get_rank() == 0 and not error:
            note = self._delete_old(final)
        return Saved(final, time.perf_counter() - began, error, note)

    def _why(self, caught: CheckpointException, state: Mapping[str, Tensor]) -> str:
        """One line on the first rank's failure; what is no failure of the disk or of the weights is a bug."""
        error, _ = caught.failures[min(caught.failures)]
        if isinstance(error, OSError):
            return write_error(self.folder, error, sum(tensor.nbytes for tensor in state.values()))
        if isinstance(error, UserError):
            return str(error)
        raise caught

    def _delete_old(self, newest: Path) -> str:
        """Returns "" or why something stayed, which is no reason to end a run."""
        try:
            found, _ = checkpoints_in(self.folder)
            for checkpoint in self.retention.expendable(found):
                if checkpoint.path != newest and checkpoint.path.resolve() != self._resumed_from:
                    delete(checkpoint.path)
        except (OSError, UserError) as error:
            return f"; an older one cannot be deleted ({error})"
        return ""
