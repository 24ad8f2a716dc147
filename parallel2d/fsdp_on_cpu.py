"""What FSDP sends over gloo groups, by this project's collectives. They return when they are done."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

# Not exported, but what set_custom_all_gather and set_custom_reduce_scatter are documented to take.
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from parallel2d.collectives import all_gather_into, reduce_scatter


class _Plain:
    """Buffers from the usual allocator."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class AllGatherOnCpu(_Plain, AllGather):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        all_gather_into(output_tensor, input_tensor, group)


class ReduceScatterOnCpu(_Plain, ReduceScatter):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        reduce_scatter(output_tensor, input_tensor, group, mean=op == dist.ReduceOp.AVG)
