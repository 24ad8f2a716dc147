"""Rotary position embeddings (arXiv:2104.09864), pairs (i, i + k/2) of a head of size k."""

import math

import torch
from torch import Tensor

from .llama_config import RopeScaling as RopeScaling


def rotary_table(
    seq_len: int, head_dim: int, theta: float, scaling: RopeScaling, device: torch.device
) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles, each (s, k), float32."""
    index = torch.arange(seq_len, device=device, dtype=torch.float32)
    angles = torch.outer(index, _frequencies(head_dim, theta, scaling, device))
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


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
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)
