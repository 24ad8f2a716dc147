"""DCP's storage interface for saving: each rank writes one file, rank 0 the manifest and the name.

https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

import dataclasses
import errno
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from parallel2d.checkpoint.files import DataFile, commit
from parallel2d.checkpoint.manifest import Manifest, StoredTensor
from parallel2d.errors import UserError


class CheckpointWriter(StorageWriter):
    """Writes `writing` and, when every rank is done, renames it to `final`; a failure removes it.

    DCP gathers what every step returns or raises, so that all ranks succeed or all fail.

    Args:
        facts: the manifest, without files and tensors.
        splits: for each tensor {mesh axis: dim}.
        must_be_finite: this rank's shares of the weights; UserError on all ranks if one is not.
    """

    def __init__(
        self,
        writing: Path,
        final: Path,
        facts: Manifest,
        splits: Mapping[str, Mapping[str, int]],
        must_be_finite: Sequence[Tensor],
    ) -> None:
        self.writing, self.final, self.facts, self.splits = writing, final, facts, splits
        self.must_be_finite = must_be_finite

    def reset(self, checkpoint_id: Any = None) -> None:
        """DCP calls it where it is given another place than ours."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        # The largest of absolute values is not finite if one of them is not. An empty share has none.
        weights = [t for t in self.must_be_finite if t.is_floating_point() and t.numel()]
        if weights and not all(math.isfinite(norm) for norm in torch._foreach_norm(weights, torch.inf)):
            raise UserError("weights are not finite: go on from the last checkpoint with a lower lr")
        if is_coordinator:
            if self.writing.exists():
                shutil.rmtree(self.writing)
            self.writing.mkdir(parents=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On rank 0, which knows how much there is to write: refuse before the disk is full."""
        needed = sum(item.tensor_storage_size() or 0 for plan in plans for item in plan.items)
        if needed > shutil.disk_usage(self.writing).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """This rank's blocks, in one file; none if it has none."""
        done: Future[list[WriteResult]] = Future()
        if not plan.items:
            done.set_result([])
            return done
        name = f"__{dist.get_rank()}_0.distcp"
        blocks = []
        with DataFile(self.writing / name) as file:
            for item in plan.items:
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, torch.Tensor) and item.tensor_data
                blocks.append((item.index, file.add(tensor, tuple(item.tensor_data.chunk.offsets))))
            stored = file.close()
        done.set_result([WriteResult(index, block.item[1], (block, stored)) for index, block in blocks])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0, after all have written: name what there is, and commit it."""
        files, blocks = {}, {name: [] for name in metadata.state_dict_metadata}  # type: ignore[var-annotated]
        for result in (result for of_rank in results for result in of_rank):
            block, stored = result.storage_data
            files[block.file] = stored
            blocks[result.index.fqn].append(block)
        tensors = {
            name: StoredTensor(
                str(entry.properties.dtype).removeprefix("torch."),  # type: ignore[union-attr]  # tensors only
                tuple(entry.size),  # type: ignore[union-attr]
                self.splits[name],
                tuple(blocks[name]),
            )
            for name, entry in metadata.state_dict_metadata.items()
        }
        commit(self.writing, self.final, dataclasses.replace(self.facts, files=files, tensors=tensors))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return isinstance(checkpoint_id, str | Path)
