"""Save and load a run: weights and optimizer state by DCP, the rest as JSON.

A checkpoint is a folder `step-00000200`. It is written as `step-00000200.tmp` and renamed when all
ranks are done: a folder without `.tmp` is whole.
"""

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel2d.checkpoint.chunks import Chunk
from parallel2d.errors import UserError
from parallel2d.fsdp import reshard

TRAINER_FILE = "trainer.json"
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint on disk."""

    path: Path
    step: int

    def trainer_state(self) -> dict[str, Any]:
        """What the training loop saved beside the tensors."""
        return json.loads((self.path / TRAINER_FILE).read_text())


class CheckpointStore:
    """The checkpoints of one run folder.

    Args:
        folder: holds one folder per checkpoint; other names in it are left alone.
        keep: how many of the newest stay; 0 keeps all.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep

    def all(self) -> list[Checkpoint]:
        """Whole checkpoints, oldest first."""
        if not self.folder.is_dir():
            return []
        found = [Checkpoint(p, int(m[1])) for p in self.folder.iterdir() if (m := _NAME.fullmatch(p.name))]
        return sorted((c for c in found if (c.path / TRAINER_FILE).is_file()), key=lambda c: c.step)

    def latest(self) -> Checkpoint | None:
        return (self.all() or [None])[-1]  # type: ignore[list-item]  # None stands for "there is none"

    def save(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, trainer_state: Mapping[str, Any]
    ) -> Path:
        """Write a checkpoint; all ranks call it. It exists when the call returns, or not at all.

        Every rank writes its own shards. DCP exchanges metadata through rank 0.
        """
        final = self.folder / f"step-{step:08d}"
        if final.exists():
            raise UserError(f"{final} exists: a checkpoint is never overwritten")
        writing = final.with_name(final.name + ".tmp")
        if dist.get_rank() == 0:
            shutil.rmtree(writing, ignore_errors=True)
            writing.mkdir(parents=True)
        dist.barrier()
        dcp.save(_as_chunks(state_tensors(model, optimizer)), checkpoint_id=writing)
        if dist.get_rank() == 0:
            _write_durably(writing / TRAINER_FILE, json.dumps(dict(trainer_state), indent=1))
            _sync_folder(writing)
            writing.rename(final)
            _sync_folder(self.folder)
            self._delete_old()
        dist.barrier()
        return final

    def _delete_old(self) -> None:
        for checkpoint in self.all()[: -self.keep] if self.keep else []:
            # First out of sight, so that a crash in between leaves no half checkpoint behind.
            doomed = checkpoint.path.with_name(checkpoint.path.name + ".tmp")
            checkpoint.path.rename(doomed)
            shutil.rmtree(doomed)

    def remove_leftovers(self) -> None:
        """Delete what an interrupted save or deletion left; for one process, when no save runs."""
        for path in self.folder.glob("step-*.tmp") if self.folder.is_dir() else []:
            if _NAME.fullmatch(path.stem):
                shutil.rmtree(path)


def resume_from(choice: str, out: Path, model_config: Mapping[str, Any]) -> Checkpoint | None:
    """The checkpoint to go on from, or None to start anew.

    Args:
        choice: `auto` (newest of `out`, if any), `never`, or the path of a checkpoint or a run folder.
        out: the run folder to write to; what it holds is never overwritten or mixed with another run.
        model_config: must equal the checkpoint's.
    """
    newest = CheckpointStore(out / "checkpoints", keep=0).latest()
    found = newest if choice == "auto" else None if choice == "never" else _find(Path(choice))
    if newest and (found is None or found.path.resolve() != newest.path.resolve()):
        raise UserError(
            f"{out} holds checkpoints up to step {newest.step}, which a run with "
            f"--checkpoint.resume {choice} would overwrite: use another --out, or --checkpoint.resume auto"
        )
    if found:
        theirs = found.trainer_state()["model"]
        differ = [
            f"{k} {theirs.get(k)} there, {v} here" for k, v in model_config.items() if theirs.get(k) != v
        ]
        if differ:
            raise UserError(f"{found.path} is of another model ({'; '.join(differ)}): use another --out")
    return found


def _find(path: Path) -> Checkpoint:
    if (path / TRAINER_FILE).is_file() and (name := _NAME.fullmatch(path.name)):
        return Checkpoint(path, int(name[1]))
    newest = CheckpointStore(path / "checkpoints", keep=0).latest()
    if newest is None:
        raise UserError(f"{path} is neither a checkpoint (…/step-00000200) nor a run folder that holds one")
    return newest


def load_checkpoint(checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read weights and optimizer state in place, from any mesh onto this one; all ranks call it.

    Names must match both ways. DCP exchanges metadata through rank 0; each rank reads what it needs.
    """
    create_optimizer_state(optimizer)
    state = state_tensors(model, optimizer)
    stored = dcp.FileSystemReader(checkpoint.path).read_metadata().state_dict_metadata
    missing, extra = sorted(state.keys() - stored.keys()), sorted(stored.keys() - state.keys())
    if missing or extra:
        raise UserError(
            f"{checkpoint.path} holds other tensors than this model: "
            f"{len(missing)} missing {missing[:10]}, {len(extra)} unknown {extra[:10]}"
        )
    dcp.load(_as_chunks(state), checkpoint_id=checkpoint.path)


def state_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """{name: tensor} of all weights and buffers (`model.…`) and optimizer state (`optimizer.….exp_avg`).

    Tensors only, under the parameters' own names: hyperparameters come from the recipe, and the
    schedule is a function of the step. A tied parameter appears once.
    """
    reshard(model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    state: dict[str, Tensor] = {f"model.{name}": p.detach() for p, name in names.items()}
    persistent = model.state_dict(keep_vars=True)
    state |= {f"model.{name}": b for name, b in model.named_buffers() if name in persistent}
    for parameter, name in names.items():
        values = optimizer.state.get(parameter, {})
        state |= {f"optimizer.{name}.{key}": value for key, value in values.items()}
    return state


def _as_chunks(state: dict[str, Tensor]) -> dict[str, Any]:
    return {name: Chunk(t) if isinstance(t, DTensor) else t for name, t in state.items()}


@torch.no_grad()
def create_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """AdamW's state before its first step, as tensors to load into."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def _write_durably(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
