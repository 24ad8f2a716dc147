"""Rotary position embeddings (arXiv:2104.09864), pairs (i, i + k/2) of a head of size k."""

import math

import torch
from torch import Tensor

from .llama_config import RopeScaling as RopeScaling


def rotary_table(
    seq_len: int, head_dim: int, theta: float, scaling: RopeScaling, device: torch.device
) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles, each (s, k), float32; the first half of sin is negated."""
    index = torch.arange(seq_len, device=device, dtype=torch.float32)
    angles = torch.outer(index, _frequencies(head_dim, theta, scaling, device))
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


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
    # A pair's other half lies half a head away, in both directions.
    other = x.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(x * cos, other, sin).to(x.dtype)
