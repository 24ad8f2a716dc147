"""Load a checkpoint, from any mesh onto this one; go on at the newest that is intact."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from parallel2d.checkpoint.find import (
    Checkpoint,
    checkpoints_in,
    checkpoints_of_run,
    is_checkpoint,
    newest_path,
    open_checkpoint,
    set_aside,
    step_in_name,
)
from parallel2d.checkpoint.intact import DamagedCheckpoint
from parallel2d.checkpoint.manifest import WEIGHTS
from parallel2d.checkpoint.mismatch import mismatches
from parallel2d.checkpoint.reader import CheckpointReader
from parallel2d.checkpoint.state import as_chunks, create_optimizer_state, shares_of, state_tensors
from parallel2d.errors import UserError


def load_checkpoint(
    checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer, *, partial: bool = False
) -> str:
    """Read weights and optimizer state in place; all ranks call it. Returns what `partial` left, or "".

    Strict: a tensor that is missing, unexpected or of another shape is one UserError, the same on every
    rank, before a number changes. `partial` reads the weights that fit, and no optimizer state. Nor is
    there any to read in a checkpoint of weights only. Numbers are cast to the dtypes of this run.

    DCP exchanges plans through rank 0; each stored byte is read by one rank and sent to those that
    need it (`reader.py`). DamagedCheckpoint, on all ranks, if a piece is not what was written: the
    tensors then hold nothing of use.
    """
    stored = checkpoint.manifest.tensors
    weights_only = partial or not checkpoint.manifest.optimizer
    if weights_only:
        stored = {name: tensor for name, tensor in stored.items() if name.startswith(WEIGHTS)}
    else:
        _require_optimizer(checkpoint, optimizer)
        create_optimizer_state(model, optimizer, stored)
    state = state_tensors(model, None if weights_only else optimizer)
    ours = {name: tuple(tensor.shape) for name, tensor in state.items()}
    left = mismatches(ours, {name: tensor.shape for name, tensor in stored.items()})
    if left and not partial:
        raise UserError("\n".join([f"{checkpoint.path} holds other tensors than this model", *left]))
    fitting = {n: t for n, t in state.items() if n in stored and stored[n].shape == ours[n]}
    try:
        dcp.load(
            as_chunks(fitting, shares_of(fitting)),
            storage_reader=CheckpointReader(checkpoint.path, checkpoint.manifest),
        )
    except CheckpointException as caught:
        damage = [error for error, _ in caught.failures.values() if isinstance(error, DamagedCheckpoint)]
        if not damage:
            raise
        raise damage[0] from None
    return "\n".join(left)


def _require_optimizer(checkpoint: Checkpoint, optimizer: torch.optim.Optimizer) -> None:
    theirs, ours = checkpoint.manifest.optimizer, type(optimizer).__name__
    if theirs != ours:
        raise UserError(f"{checkpoint.path} has the state of {theirs}, and this run uses {ours}")


@dataclass(frozen=True)
class Resume:
    """Where a run may go on.

    Args:
        candidates: checkpoints, newest first; not empty.
        damaged: those that are passed over, and why.
        partial: read the weights that fit and begin anew with them.
        began_from: the path of another run's with which this run begins or once began, or "".
    """

    candidates: tuple[Checkpoint, ...]
    damaged: Mapping[Path, str]
    partial: bool
    began_from: str

    @property
    def step(self) -> int:
        """Updates already done; 0 where only weights are taken."""
        newest = self.candidates[0]
        return 0 if self.partial or not newest.manifest.optimizer else newest.step

    @property
    def steps(self) -> list[int]:
        """Of all candidates."""
        return [checkpoint.step for checkpoint in self.candidates]


@dataclass(frozen=True)
class Resumed:
    """Where a run went on; `notes` are lines for people on what was passed over or left.

    With `weights_only` the run begins anew, at step 0, with these weights.
    """

    checkpoint: Checkpoint
    weights_only: bool
    notes: tuple[str, ...]
    began_from: str

    def __str__(self) -> str:
        if self.weights_only:
            return f"step 0, with the weights of {self.checkpoint.path}"
        return f"after step {self.checkpoint.step} of {self.checkpoint.path}"


def resume_from(
    choice: str, out: Path, model_config: Mapping[str, Any], *, partial: bool = False
) -> Resume | None:
    """Where to go on, or None to start anew. Reads no numbers: those are checked by `load_newest`.

    Args:
        choice: `auto` (newest of `out`, if any), `never`, or the path of a checkpoint or a run folder, with
            which a run begins; where it has begun with it, the same as `auto`.
        out: the run folder to write to; what it holds is never overwritten or mixed with another run.
        model_config: must equal the checkpoint's, but for `partial`.
        partial: of `choice`, a path, take the weights that fit.
    """
    own = out / "checkpoints"
    whole, damaged = checkpoints_in(own)
    if (
        choice not in ("auto", "never")
        and whole
        and whole[-1].manifest.began_from == str(Path(choice).resolve())
    ):
        choice, partial = "auto", False  # the same command again, which has come further since
    if choice == "auto":
        resume = _newest_of(own, whole, damaged, partial)
    else:
        resume = None if choice == "never" else _at(Path(choice), partial)
    goes_on = resume and whole and resume.candidates[0].path.resolve() == whole[-1].path.resolve()
    # With its weights alone a run begins at step 0, and comes to the steps that are there already.
    if (whole or damaged) and not (resume and goes_on and resume.step == whole[-1].step):
        newest = newest_path(whole, damaged)
        remedy = "" if choice == "auto" else ", or --checkpoint.resume auto"
        raise UserError(
            f"{out} holds checkpoints up to {newest.name}, which a run with --checkpoint.resume {choice} "
            f"would overwrite: use another --out{remedy}"
        )
    if resume and not partial:
        _require_same_model(resume.candidates[0], model_config)
    return resume


def _at(path: Path, partial: bool) -> Resume:
    """A checkpoint itself, or a run folder's."""
    if is_checkpoint(path):
        return Resume((open_checkpoint(path),), {}, partial, str(path.resolve()))
    found = _newest_of(*checkpoints_of_run(path), partial)
    assert found, "a folder without any was refused"
    return replace(found, began_from=str(path.resolve()))


def _newest_of(
    folder: Path, whole: list[Checkpoint], damaged: dict[Path, DamagedCheckpoint], partial: bool
) -> Resume | None:
    """A folder's checkpoints; None if it has none, and an error if it has damaged ones only."""
    if damaged and not whole:
        raise UserError("\n".join([f"no checkpoint in {folder} is intact:", *map(str, damaged.values())]))
    told = {path: str(error) for path, error in damaged.items()}
    return Resume(tuple(reversed(whole)), told, partial, whole[-1].manifest.began_from) if whole else None


def _require_same_model(checkpoint: Checkpoint, model_config: Mapping[str, Any]) -> None:
    # As JSON has it: a tuple is a list there.
    ours = json.loads(json.dumps(dict(model_config)))
    theirs = checkpoint.manifest.trainer.get("model")
    theirs = theirs if isinstance(theirs, dict) else {}
    differ = [f"{k} {theirs.get(k)} there, {v} here" for k, v in ours.items() if theirs.get(k) != v]
    if differ:
        raise UserError(
            f"{checkpoint.path} is of another model ({'; '.join(differ)}): use another --out, "
            f"or with --checkpoint.resume PATH --checkpoint.partial true take the weights that fit"
        )


def load_newest(resume: Resume, model: nn.Module, optimizer: torch.optim.Optimizer, own: Path) -> Resumed:
    """Load the newest candidate that is intact; all ranks call it. See `load_checkpoint`.

    Damaged checkpoints that are newer than it and lie in the folder `own` are renamed to
    `step-….damaged`, because this run will save those steps again. UserError if none is intact.
    """
    notes = [f"{told}: passed over" for told in resume.damaged.values()]
    passed = list(resume.damaged)
    for checkpoint in resume.candidates:
        try:
            left = load_checkpoint(checkpoint, model, optimizer, partial=resume.partial)
        except DamagedCheckpoint as error:
            notes.append(f"{error}: passed over")
            passed.append(checkpoint.path)
            continue
        notes += [f"left out of {checkpoint.path}:\n{left}"] if left else []
        notes += _set_aside([p for p in passed if p.parent.resolve() == own.resolve()], checkpoint)
        weights_only = resume.partial or not checkpoint.manifest.optimizer
        return Resumed(checkpoint, weights_only, tuple(notes), resume.began_from)
    told = [note.removesuffix(": passed over") for note in notes]
    raise UserError(told[0] if len(told) == 1 else "\n".join(["no checkpoint is intact:", *told]))


def _set_aside(damaged: list[Path], than: Checkpoint) -> list[str]:
    """Lines on what was renamed, on rank 0, which renames."""
    newer = [path for path in damaged if step_in_name(path) > than.step]
    if newer and dist.get_rank() == 0:
        told = [f"{path.name} is now {set_aside(path).name}" for path in newer]
    else:
        told = []
    dist.barrier()
    return told
