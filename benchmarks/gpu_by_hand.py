"""What benchmarks/gpu.py compares with: FSDP2 by hand, as PyTorch's tutorial for it does.

https://docs.pytorch.org/tutorials/intermediate/FSDP_tutorial.html: fully_shard per block, torch's own
cross-entropy, clipping and fused AdamW, and nothing of parallel2d but the model, which is plain PyTorch.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from parallel2d.models.llama import Llama, LlamaConfig
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import create_selective_checkpoint_contexts

# What parallel2d's selective checkpointing keeps, so that both compute the same a second time.
KEPT = [
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
]


def build(
    config: LlamaConfig, device: torch.device, compute: torch.dtype, checkpointing: str, compile: bool
) -> Callable[[Tensor, Tensor], None]:
    """A function that trains one step on ids and targets (b, s)."""
    with torch.device("meta"):
        model = Llama(config)
    mesh = init_device_mesh(device.type, (1,))
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for index, block in enumerate(model.blocks):
        block = with_checkpointing(block, checkpointing)
        if compile:
            block = torch.compile(block, fullgraph=True)
        model.blocks[index] = fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(ids: Tensor, targets: Tensor) -> None:
        logits = model(ids)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def with_checkpointing(block: nn.Module, checkpointing: str) -> nn.Module:
    if checkpointing == "none":
        return block
    if checkpointing == "full":
        return checkpoint_wrapper(block)
    return checkpoint_wrapper(block, context_fn=partial(create_selective_checkpoint_contexts, KEPT))
