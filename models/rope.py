"""Rotary position embeddings (arXiv:2104.09864), pairs (i, i + k/2) of a head of size k."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .llama_config import RopeScaling as RopeScaling


def rotary_table(
    seq_len: int, head_dim: int, theta: float, scaling: RopeScaling, device: torch.device
) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles, float32: cos (s, k), each half the same, and sin (s, k/2)."""
    index = torch.arange(seq_len, device=device, dtype=torch.float32)
    angles = torch.outer(index, _frequencies(head_dim, theta, scaling, device))
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), sin


def _frequencies(head_dim: int, theta: float, scaling: RopeScaling, device: torch.device) -> Tensor:
    """Radians per position of each pair: (k/2,), float32."""
    even = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32)
    frequencies = theta ** -(even / head_dim)
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        # By how often a pair turns within the original context: kept above the high factor, divided
        # below the low one, blended on a line in between.
        turns = scaling.original_context * frequencies / (2 * math.pi)
        kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        kept = kept.clamp(0, 1)
        return frequencies * (kept + (1 - kept) / scaling.factor)
    return frequencies


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head by its position's angles: (b, h, s, k) -> (b, h, s, k), in at least float32."""
    return _Rotate.apply(x, cos, sin)


class _Rotate(torch.autograd.Function):
    """The gradient is the rotation back, which autograd would find in more passes over memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grad, cos, sin, -1), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    turned = x * cos
    into_first, into_second = turned.chunk(2, dim=-1)
    into_first.addcmul_(second, sin, value=-direction)
    into_second.addcmul_(first, sin, value=direction)
    return turned.to(x.dtype)
