"""Save and load a run: weights and optimizer state by DCP, the rest as JSON.

A checkpoint is a folder `step-00000200`. It is written as `step-00000200.tmp` and renamed when all
ranks are done: a folder without `.tmp` is whole.
"""

import json
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
from parallel2d.checkpoint.durable import sync, write_text
from parallel2d.errors import UserError
from parallel2d.fsdp import reshard

TRAINER_FILE = "trainer.json"
_OPTIMIZER = "optimizer"  # its class, in the trainer file
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint on disk."""

    path: Path
    step: int

    def trainer_state(self) -> dict[str, Any]:
        """What the training loop saved beside the tensors."""
        try:
            state = json.loads((self.path / TRAINER_FILE).read_text())
        except ValueError:
            state = None
        if not isinstance(state, dict) or _OPTIMIZER not in state:
            raise UserError(f"{self.path / TRAINER_FILE} is damaged: move the checkpoint away")
        return state


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
        """Whole checkpoints, oldest first; a damaged one is an error, not a reason to start anew."""
        if not self.folder.is_dir():
            return []
        found = [Checkpoint(p, int(m[1])) for p in self.folder.iterdir() if (m := _NAME.fullmatch(p.name))]
        for checkpoint in found:
            if not (checkpoint.path / TRAINER_FILE).is_file():
                raise UserError(f"{checkpoint.path} has no {TRAINER_FILE}: it is damaged, move it away")
        return sorted(found, key=lambda c: c.step)

    def latest(self) -> Checkpoint | None:
        return (self.all() or [None])[-1]  # type: ignore[list-item]  # None stands for "there is none"

    def save(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, trainer_state: Mapping[str, Any]
    ) -> Path:
        """Write a checkpoint; all ranks call it. It exists when the call returns, or not at all.

        Every rank writes its own shards. DCP exchanges metadata through rank 0. Weights that are not
        finite are refused: they would in time push the good checkpoints out.
        """
        _require_finite(model)
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
            facts = {**trainer_state, _OPTIMIZER: type(optimizer).__name__}
            write_text(writing / TRAINER_FILE, json.dumps(facts, indent=1))
            sync(writing)
            writing.rename(final)
            sync(self.folder)
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
                path.unlink() if path.is_file() else shutil.rmtree(path)


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
        theirs = found.trainer_state().get("model", {})
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
    theirs, ours = checkpoint.trainer_state()[_OPTIMIZER], type(optimizer).__name__
    if theirs != ours:
        raise UserError(f"{checkpoint.path} has the state of {theirs}, and this run uses {ours}")
    stored = dcp.FileSystemReader(checkpoint.path).read_metadata().state_dict_metadata
    _create_optimizer_state(model, optimizer, stored)
    state = state_tensors(model, optimizer)
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


def _require_finite(model: nn.Module) -> None:
    """One UserError on all ranks if a weight is NaN or infinite. One all-reduce of one number."""
    reshard(model)
    shards = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    finite = torch.stack([torch.isfinite(shard).all() for shard in shards]).all().int()
    dist.all_reduce(finite, op=dist.ReduceOp.MIN)
    if not finite:
        raise UserError(
            "weights are not finite, and were not saved: go on from the last checkpoint, lower lr"
        )


def _as_chunks(state: dict[str, Tensor]) -> dict[str, Any]:
    return {name: Chunk(t) if isinstance(t, DTensor) else t for name, t in state.items()}


@torch.no_grad()
def _create_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, stored: Mapping[str, Any]
) -> None:
    """Tensors to load into, for every entry of optimizer state that the checkpoint has for a parameter.

    An entry of the parameter's shape is sharded like it; others (step counts) are the same everywhere.
    """
    reshard(model)
    trained = {p for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        prefix = f"optimizer.{name}."
        for key in (k.removeprefix(prefix) for k in stored if k.startswith(prefix) and parameter in trained):
            entry = stored[prefix + key]
            optimizer.state[parameter][key] = (
                torch.zeros_like(parameter)
                if entry.size == parameter.shape
                else torch.zeros(entry.size, dtype=entry.properties.dtype, device=parameter.device)
            )
