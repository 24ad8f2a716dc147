"""Each style against the same module on one process: outputs, input gradients, weight gradients."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel2d import MeshShape, UserError, build_mesh, launch
from parallel2d.tensor_parallel import apply_tensor_parallel
from tests.ranks import run_ranks


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor, scale: float) -> Tensor:
        return self.down(torch.tanh(self.up(x) * scale))


class Stream(nn.Module):
    """A residual stream that is split by sequence between the embedding and the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.inner = nn.Embedding(11, 6), nn.LayerNorm(6), Inner()
        self.head = nn.Linear(6, 11)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        return self.head(x + self.inner(self.norm(x), 2.0))


class Scaled(Stream):
    """The model itself owns a parameter, which sees shares of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(1, 2, 6))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) * self.scale
        return self.head(x + self.inner(self.norm(x), 2.0))


STREAM_PLAN = {
    "embedding": "vocab",
    "norm": "sequence",
    "inner": "gather_sequence",
    "inner.up": "colwise_local",
    "inner.down": "rowwise_scatter",
    "head": "vocab_head",
}
CASES: dict[str, tuple[type[nn.Module], dict[str, str], Tensor]] = {
    "mlp": (
        Mlp,
        {"up": "colwise", "down": "rowwise"},
        torch.randn(2, 8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)),
    ),
    "stream": (Stream, STREAM_PLAN, torch.arange(16).view(2, 8) % 11),
    "scaled": (Scaled, {**STREAM_PLAN, "": "sequence"}, torch.arange(16).view(2, 8) % 11),
}


def run_case(name: str, tp: int) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
    """Whole output, whole input gradient, whole weight gradients of sum(output²), without FSDP."""
    with launch.world(tp, "cpu", 60):
        module_class, plan, x = CASES[name]
        torch.manual_seed(0)
        model = module_class().double()
        mesh = build_mesh(MeshShape(tp=tp), "cpu")["tp"]
        apply_tensor_parallel(model, mesh, plan)
        x = x.clone().requires_grad_(x.is_floating_point())
        y = model(x)
        # Replicated outputs give each rank the whole loss; vocabulary shares give it a part.
        y.square().sum().backward()
        gradients = {n: whole(p.grad) for n, p in model.named_parameters()}
        return gather_last(y.detach(), mesh) if name != "mlp" else y.detach(), x.grad, gradients


def whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def gather_last(y: Tensor, mesh) -> Tensor:
    from parallel2d.loss import VocabShard, gather_vocab

    return gather_vocab(y, VocabShard.of(11, mesh))


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(name, tp):
    y, input_gradient, gradients = run_ranks(1, run_case, name, 1)[0]
    for ours in run_ranks(tp, run_case, name, tp):
        torch.testing.assert_close(ours[0], y, rtol=1e-12, atol=1e-12)
        if input_gradient is not None:
            torch.testing.assert_close(ours[1], input_gradient, rtol=1e-12, atol=1e-12)
        assert ours[2].keys() == gradients.keys()
        for parameter, gradient in gradients.items():
            torch.testing.assert_close(
                ours[2][parameter], gradient, rtol=1e-12, atol=1e-12, msg=lambda m, p=parameter: f"{p}: {m}"
            )


def call_with_odd_length() -> str:
    with launch.world(4, "cpu", 60):
        model = Stream()
        apply_tensor_parallel(model, build_mesh(MeshShape(tp=4), "cpu")["tp"], STREAM_PLAN)
        with pytest.raises(UserError) as caught:
            model(torch.zeros(1, 6, dtype=torch.int64))
        return str(caught.value)


def test_a_sequence_that_tp_does_not_divide_is_refused_before_gloo_aborts():
    assert (
        run_ranks(4, call_with_odd_length) == ["sequence length 6 is not divisible by tp 4: pad it to 8"] * 4
    )


def fault_of(plan: dict[str, str], make: Callable[[], nn.Module]) -> str:
    with launch.world(4, "cpu", 60):
        with pytest.raises(UserError) as caught:
            apply_tensor_parallel(make(), build_mesh(MeshShape(tp=4), "cpu")["tp"], plan)
        return str(caught.value)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"up": "colwise", "norm": "rowwise"}, "norm: style Rowwise is for Linear, not for LayerNorm"),
        (
            {"up": "vocab", "norm": "replicated", "down": "replicated"},
            "up: style Vocab is for Embedding, not for Linear",
        ),
        ({"dwon": "rowwise"}, "plan entry 'dwon' matches no module (nearest names: down)"),
        ({"up": "colwise_local"}, "up: style colwise_local needs a gather_sequence around it"),
        ({"up": "columnwise"}, "plan entry 'up': unknown style 'columnwise'"),
        ({"up": "colwise", "u*": "colwise"}, "plan entries 'up' and 'u*' both match 'up'"),
    ],
)
def test_a_wrong_plan_is_named(plan, message):
    assert all(message in fault for fault in run_ranks(4, fault_of, plan, Mlp))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            {k: v for k, v in STREAM_PLAN.items() if k != "norm"},
            "a plan that splits the sequence (as for embedding) must name every module with parameters, as "
            "`sequence` (it sees some positions), `per_head` (some heads) or `replicated` (the same on each "
            "rank), and every dropout, as `sharded_dropout` or `replicated`; it leaves out norm",
        ),
        (
            {**STREAM_PLAN, "inner.up": "colwise"},
            "inner.up: inside a gather_sequence the style is colwise_local",
        ),
        (
            {**STREAM_PLAN, "norm": "gather_sequence"},
            "without parameters of their own, not ['weight', 'bias']",
        ),
    ],
)
def test_a_sequence_plan_that_would_be_silently_wrong_is_refused(plan, message):
    assert all(message in fault for fault in run_ranks(4, fault_of, plan, Stream))


def small() -> nn.Module:
    return nn.ModuleDict({"up": nn.Linear(6, 10)})


def test_features_that_tp_does_not_divide_are_refused():
    message = "up: number of output features 10 is not divisible by tp 4"
    assert run_ranks(4, fault_of, {"up": "colwise"}, small) == [message] * 4


def tied_both_ways(plan: dict[str, str]) -> str:
    with launch.world(2, "cpu", 60):
        model = Stream()
        model.head = nn.Linear(6, 11, bias=False)
        model.head.weight = model.embedding.weight
        try:
            apply_tensor_parallel(model, build_mesh(MeshShape(tp=2), "cpu")["tp"], plan)
        except UserError as error:
            return str(error)
        return str(model.head.weight is model.embedding.weight)


def test_ties_survive_or_are_refused():
    assert run_ranks(2, tied_both_ways, STREAM_PLAN) == ["True"] * 2
    plan = {**STREAM_PLAN, "head": "rowwise"}
    assert all("needs the same split in both" in m for m in run_ranks(2, tied_both_ways, plan))
