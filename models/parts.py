"""What the models share: initialised layers."""

from torch import nn


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


def residual_std(init_std: float, num_layers: int) -> float:
    """Initial standard deviation of what adds to the residual stream, two terms per layer."""
    return init_std / (2 * num_layers) ** 0.5
