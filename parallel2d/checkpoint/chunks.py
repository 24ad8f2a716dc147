"""How DCP sees a sharded tensor: its whole shape, this rank's block, and the block's place."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from parallel2d.shards import local_box


class Chunk(Tensor):
    """Stands for a DTensor in a DCP state dict, with the right offsets for shards of uneven size.

    DCP asks the three double-underscore methods for what to write and read
    (torch.distributed._checkpointable) and never computes with the tensor. Replicas of a block have
    one index, and DCP writes it once.
    """

    local: Tensor
    metadata: ChunkStorageMetadata

    @staticmethod
    def __new__(cls, tensor: DTensor, local: Tensor) -> "Chunk":
        """`local`: this rank's share, or a copy of it."""
        box = local_box(tensor)
        if tuple(local.shape) != box.sizes:
            raise ValueError(f"a rank's share has shape {tuple(local.shape)}, and {box.sizes} was expected")
        chunk = Tensor._make_wrapper_subclass(cls, tensor.shape, dtype=local.dtype, device=local.device)
        chunk.local = local
        chunk.metadata = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
        return chunk

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # torch's own stub is of an instance method
        raise NotImplementedError(f"{func} on a Chunk: it is only for DCP to save and load")

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self.metadata] if self.local.numel() or 0 in self.shape else []

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties.create_from_tensor(self.local),
                    size=self.size(),
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.local
