"""What the models share: initialised layers."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class Linear(nn.Linear):
    """nn.Linear with normal initial weights; its bias, if any, starts at zero."""

    def __init__(self, in_features: int, out_features: int, std: float, bias: bool = False) -> None:
        self.std = std
        super().__init__(in_features, out_features, bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """nn.Embedding with normal initial weights of the given standard deviation."""

    def __init__(self, num_embeddings: int, embedding_dim: int, std: float) -> None:
        self.std = std
        super().__init__(num_embeddings, embedding_dim)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm (arXiv:1910.07467), which has a kernel on GPUs; on a CPU its backward takes fewer passes."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps)

    def forward(self, x: Tensor) -> Tensor:
        exact = x.dtype in (torch.float32, torch.float64) and x.dtype == self.weight.dtype
        # What torch refuses, it shall refuse with its own words.
        plain = x.shape[-1:] == self.weight.shape
        if x.is_cpu and exact and plain and not torch.compiler.is_compiling():
            return _RMSNorm.apply(x, self.weight, self.eps)
        return super().forward(x)


class _RMSNorm(torch.autograd.Function):
    """y = r x w with r = 1 / sqrt(mean(x²) + eps) of each row; a pass over memory is what costs here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        r = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, r)
        return torch.mul(x, r).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        # dy/dw: the sum over rows of r g x. dy/dx: r g w - x r³ mean(g w x).
        x, weight, r = ctx.saved_tensors
        products = (grad * x).reshape(-1, x.shape[-1])
        of_weight = products.t().mv(r.reshape(-1))
        slope = products.mv(weight).view_as(r).mul_(r).mul_(r).mul_(r).div_(-x.shape[-1])
        return torch.mul(grad, r).mul_(weight).addcmul_(x, slope), of_weight, None


def residual_std(init_std: float, num_layers: int) -> float:
    """Initial standard deviation of what adds to the residual stream, two terms per layer."""
    return init_std / (2 * num_layers) ** 0.5
