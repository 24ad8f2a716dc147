"""What the models share: initialised layers, and the rules of what tp can split."""

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


def not_positive(section: str, config: object, *names: str) -> list[str]:
    """A line for each of these that is zero, less, or no number."""
    return [
        f"{section}.{name} {value} is not positive"
        for name in names
        if not (value := getattr(config, name)) > 0
    ]


def negative(section: str, config: object, *names: str) -> list[str]:
    """A line for each of these that is below zero, or no number."""
    return [
        f"{section}.{name} {value} is negative or no number"
        for name in names
        if not (value := getattr(config, name)) >= 0
    ]


def indivisible(config: object, tp: int, *names: str) -> list[str]:
    """A line for each of these sizes that tp does not divide, with the tps that do."""
    found = []
    for name in names:
        size = getattr(config, name)
        if size % tp:
            fits = ", ".join(str(n) for n in range(1, min(size, 64) + 1) if size % n == 0)
            found.append(f"{name} {size} is not divisible by tp {tp}: use tp {fits}")
    return found


def rowless(config: object, tp: int, *names: str) -> list[str]:
    """A line for each table of so many rows that would leave a rank without one, by the ⌈rows/tp⌉ split."""
    return [
        f"{name} {rows} leaves ranks of tp {tp} without a row"
        for name in names
        if -(-(rows := getattr(config, name)) // tp) * (tp - 1) >= rows
    ]


def residual_std(init_std: float, num_layers: int) -> float:
    """Initial standard deviation of what adds to the residual stream, two terms per layer."""
    return init_std / (2 * num_layers) ** 0.5
