"""What is about to run, in the numbers that decide how."""

import torch
import torch.distributed as dist
from torch import nn

from parallel2d.data import Corpus
from parallel2d.mesh import MeshShape


def summary(
    model: nn.Module,
    shape: MeshShape,
    device: torch.device,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    corpus: Corpus,
    global_batch: int,
    micro_batch: int,
) -> str:
    """Lines for people. `dtypes`: of the weights, to compute in, to reduce in; batches in sequences."""
    param, compute, reduce = (str(dtype).removeprefix("torch.") for dtype in dtypes)
    parameters = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    accumulation = global_batch // micro_batch // shape.dp
    lines = [
        f"mesh      dp×tp = {shape}; {shape.world} ranks, {dist.get_backend()} on {device.type}",
        f"model     {parameters:,} parameters, {trained:,} trained; "
        f"weights {param}, compute {compute}, reduction {reduce}",
        f"data      {len(corpus.tokens):,} tokens; {corpus.num_train:,} training sequences an epoch",
        f"batch     {global_batch} sequences of {corpus.seq_len} = dp {shape.dp} × "
        f"micro-batch {micro_batch} × accumulation {accumulation}",
        f"baseline  {corpus.unigram_loss():.4f} nats per token for a model that knows only their frequencies",
    ]
    if param == "bfloat16":
        lines.append("note      bfloat16 weights and Adam moments: updates below 1/256 of a weight are lost")
    return "\n".join(lines)
