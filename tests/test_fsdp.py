"""Each FSDP policy does what its name says, and none changes the numbers."""

import pytest
import torch
from parallel2d.models.llama import Llama
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from parallel2d import (
    FsdpPolicy,
    MeshShape,
    Precision,
    UserError,
    build_mesh,
    init_weights,
    launch,
    parallelize,
)
from parallel2d.loss import VocabShard, cross_entropy_sum
from tests.ranks import run_ranks, run_recipe
from tests.training import Case, Run, assert_same, curves

SYNCS = [Case(sync=sync) for sync in ("every", "last", "replicas_last")]
POLICIES = [
    FsdpPolicy("always"),
    FsdpPolicy("auto", forward_prefetch=1),
    FsdpPolicy(forward_prefetch=2, backward_prefetch=2),
]


@pytest.fixture(scope="module")
def alone():
    return curves(MeshShape(), Case())[0]


@pytest.mark.parametrize(
    ("shape", "cases"),
    [
        (MeshShape(1, 2, 2), [Case(policy) for policy in POLICIES]),
        (MeshShape(1, 4, 1), [Case(FsdpPolicy(2))]),
        (MeshShape(2, 2, 2), SYNCS[1:]),
        pytest.param(MeshShape(1, 2, 2), SYNCS, marks=pytest.mark.slow),
        pytest.param(MeshShape(2, 2, 2), SYNCS[:1], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_policies_and_modes_of_accumulation_change_no_number(alone, shape, cases):
    for ours in curves(shape, *cases):
        assert_same(ours, alone)


def held_after_forward(choice: str | int) -> tuple[list[str], list[str]]:
    """What blocks and root hold after a forward, and after `reshard` and a whole step."""
    with launch.world(4, "cpu", 60):
        run = Run.begin(build_mesh(MeshShape(1, 4, 1), "cpu"), Case(FsdpPolicy(choice), layers=3))
        run.model(torch.zeros(1, 8, dtype=torch.int64)).sum().backward()
        run.model(torch.zeros(1, 8, dtype=torch.int64))
        after_forward = held(run.model)
        run.train(0, 1)
        return after_forward, held(run.model)


def held(model: Llama) -> list[str]:
    weights = [*(block.ffn.gate.weight for block in model.blocks), model.head.weight]
    return ["whole" if not isinstance(w, DTensor) else f"1/{w.device_mesh.size(-1)}" for w in weights]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("auto", ["whole"] * 4),
        ("but_last", ["1/4", "1/4", "whole", "whole"]),
        ("always", ["1/4"] * 4),
        ("never", ["whole"] * 4),
        (2, ["1/2", "1/2", "whole", "whole"]),
    ],
)
def test_what_is_held_between_forward_and_backward(choice, expected):
    assert run_ranks(4, held_after_forward, choice) == [(expected, ["1/4"] * 4)] * 4


class Gathers(TorchDispatchMode):
    """Counts FSDP's all-gathers."""

    seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += func._opname == "all_gather_"
        return func(*args, **(kwargs or {}))


def gathers_before(policy: FsdpPolicy) -> tuple[list[int], list[int]]:
    """All-gathers issued when each block's forward begins, and, of backward's, when its backward begins."""
    with launch.world(2, "cpu", 60):
        run = Run.begin(build_mesh(MeshShape(1, 2, 1), "cpu"), Case(policy, layers=5))
        forward, backward = [], []
        with Gathers() as gathers:
            for block in run.model.blocks:
                block.attention_norm.register_forward_pre_hook(lambda *_: forward.append(gathers.seen))
                block.ffn.register_full_backward_pre_hook(lambda *_: backward.append(gathers.seen))
            loss = run.model(torch.zeros(1, 8, dtype=torch.int64)).sum()
            in_forward = gathers.seen
            loss.backward()
        return forward, [seen - in_forward for seen in backward]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        # The root's gather comes first; the last block is not gathered again in backward.
        (FsdpPolicy(), ([2, 3, 4, 5, 6], [0, 0, 0, 0, 0])),
        (FsdpPolicy("but_last"), ([2, 3, 4, 5, 6], [1, 2, 3, 4, 4])),
        (FsdpPolicy("but_last", forward_prefetch=1), ([3, 4, 5, 6, 6], [1, 2, 3, 4, 4])),
        (FsdpPolicy("but_last", forward_prefetch=3), ([5, 6, 6, 6, 6], [1, 2, 3, 4, 4])),
        (FsdpPolicy(backward_prefetch=1), ([2, 3, 4, 5, 6], [1, 2, 3, 4, 4])),
        (FsdpPolicy(backward_prefetch=2), ([2, 3, 4, 5, 6], [2, 3, 4, 4, 4])),
        (FsdpPolicy("always", backward_prefetch=3), ([2, 3, 4, 5, 6], [5, 6, 6, 6, 6])),
    ],
    ids=str,
)
def test_prefetch_gathers_so_many_blocks_ahead(policy, expected):
    assert run_ranks(2, gathers_before, policy) == [expected] * 2


class Pair(nn.Module):
    """A model with a second entry."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 4)
        self.seen: dict[str, torch.dtype] = {}

    def encode(self, x: Tensor) -> Tensor:
        self.seen["input"] = x.dtype
        y = self.first(x.to(self.first.weight.dtype))
        self.seen["inside"] = y.dtype
        return y

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.encode(x))


def pair(shape: MeshShape, policy: FsdpPolicy, precision: Precision) -> Pair:
    with torch.device("meta"):
        model = Pair()
    plan = {"first": "colwise", "second": "rowwise"}
    parallelize(model, build_mesh(shape, "cpu"), plan=plan, units=[], fsdp=policy, precision=precision)
    init_weights(model, torch.device("cpu"), 0, offload=True)
    return model


def encoded(shape: MeshShape) -> tuple[bool, bool, str]:
    """Whether a registered `encode` has the right result and gradient, and what an unregistered one does."""
    with launch.world(shape.world, "cpu", 60):
        plain, x = Pair(), torch.arange(12.0).view(2, 6)
        model = pair(shape, FsdpPolicy(forward_methods=("encode",)), Precision())
        for name, parameter in plain.named_parameters():
            parameter.data = model.get_parameter(name).full_tensor().detach()
        whole = plain.encode(x)
        whole.square().sum().backward()
        mine = whole.chunk(shape.tp, dim=-1)[torch.distributed.get_rank() % shape.tp]
        y = model.encode(x)
        y.square().sum().backward()
        same_gradient = torch.allclose(model.first.weight.grad.full_tensor(), plain.first.weight.grad)
        try:
            unregistered = f"{tuple(pair(shape, FsdpPolicy(), Precision()).encode(x).shape)}"
        except RuntimeError as error:
            unregistered = str(error)
        return torch.allclose(y, mine), same_gradient, unregistered


@pytest.mark.parametrize("shape", [MeshShape(1, 2, 1), MeshShape(1, 2, 2)], ids=str)
def test_a_registered_method_runs_on_sharded_weights(shape):
    """Any other meets DTensors, which is an error of torch's."""
    results = run_ranks(shape.world, encoded, shape)
    assert [result[:2] for result in results] == [(True, True)] * shape.world
    assert "mixed torch.Tensor and DTensor" in results[0][2]


def dtypes(shape: MeshShape, precision: Precision) -> dict[str, str]:
    with launch.world(shape.world, "cpu", 60):
        model = pair(shape, FsdpPolicy(), precision)
        output = model(torch.ones(2, 6))
        output.sum().backward()
        gradients = {p.grad.dtype for p in model.parameters()} | {p.dtype for p in model.parameters()}
        seen = {**model.seen, "output": output.dtype}
        return {k: str(v)[6:] for k, v in seen.items()} | {"rest": str(*gradients)[6:]}


@pytest.mark.parametrize("shape", [MeshShape(), MeshShape(1, 2, 2)], ids=str)
def test_dtypes_seen_inside_forward(shape):
    mixed = Precision(torch.float32, torch.bfloat16, torch.float32)
    wide = Precision(torch.float32, torch.bfloat16, torch.float32, torch.float32)
    uncast = Precision(torch.float32, torch.bfloat16, torch.float32, None, cast_inputs=False)
    expected = {"input": "bfloat16", "inside": "bfloat16", "output": "bfloat16", "rest": "float32"}
    for precision, differs in (
        (mixed, {}),
        (wide, {"output": "float32"}),
        (uncast, {"input": "float32"}),
    ):
        assert run_ranks(shape.world, dtypes, shape, precision)[0] == expected | differs


def test_norms_compute_in_float32_whatever_they_are_given():
    """As the float32 norm, rounded once."""
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).bfloat16() * 30
    norm = nn.RMSNorm(96, 1e-5)
    nn.init.normal_(norm.weight)
    norm.bfloat16()
    wide = nn.functional.rms_norm(x.float(), (96,), norm.weight.float(), 1e-5)
    ulp = torch.finfo(torch.bfloat16).eps * wide.abs()
    assert ((norm(x).float() - wide).abs() <= ulp).all()


def losses() -> tuple[float, float, float]:
    with launch.world(1, "cpu", 60):
        vocab = VocabShard.of(4096, build_mesh(MeshShape(), "cpu")["tp"])
        logits = 5 * torch.randn(4, 16, 4096, generator=torch.Generator().manual_seed(0))
        narrow, targets = logits.bfloat16().requires_grad_(), torch.arange(64).view(4, 16)
        loss = cross_entropy_sum(narrow, targets, vocab)
        loss.backward()
        exact = narrow.detach().double().requires_grad_()
        cross_entropy_sum(exact, targets, vocab).backward()
        error = (narrow.grad.double() - exact.grad).abs() / exact.grad.abs()
        of_float = cross_entropy_sum(narrow.detach().float(), targets, vocab)
        return loss.item(), of_float.item(), error.max().item()


def test_the_loss_computes_in_float32_whatever_it_is_given():
    of_bfloat16, of_float32, gradient_error = run_ranks(1, losses)[0]
    assert of_bfloat16 == of_float32
    assert gradient_error < 2**-8 + 1e-4  # rounded once


@pytest.mark.parametrize(
    ("policy", "dp_shard", "tp", "message"),
    [
        (
            FsdpPolicy(3),
            4,
            1,
            "3 is no group within dp_shard 4: use auto, but_last, always, never, 2",
        ),
        (FsdpPolicy(4), 4, 1, "reshard_after_forward 4 is no group within dp_shard 4"),
        (FsdpPolicy(1), 4, 1, "reshard_after_forward 1 is no group within dp_shard 4"),
        (FsdpPolicy(2), 4, 2, "with tp 2 use auto, but_last, always or never"),
        (FsdpPolicy("alwys"), 4, 2, "reshard_after_forward 'alwys' is unknown"),
        (FsdpPolicy(offload=True), 4, 2, "offload true: on a CPU"),
        (FsdpPolicy(forward_prefetch=-1), 4, 2, "forward_prefetch -1 is below 0"),
        (FsdpPolicy(backward_prefetch=-2), 4, 2, "backward_prefetch -2 is below 0"),
        (FsdpPolicy("never", backward_prefetch=1), 4, 2, "backward gathers nothing: use backward_prefetch 0"),
        (FsdpPolicy(forward_methods=("encod",)), 4, 2, "Pair has no public method 'encod' (it has: encode)"),
    ],
    ids=str,
)
def test_what_cannot_work(policy, dp_shard, tp, message):
    (problem,) = policy.problems(Pair, dp_shard, tp, "cpu")
    assert message in problem


def test_what_can_work():
    assert FsdpPolicy(2, offload=True, forward_methods=("encode",)).problems(Pair, 4, 1, "cuda") == []


def refused() -> str:
    with launch.world(1, "cpu", 60), pytest.raises(UserError) as caught:
        pair(MeshShape(), FsdpPolicy(2, offload=True, forward_methods=("encod",)), Precision())
    return str(caught.value)


def test_parallelize_tells_all_at_once():
    assert run_ranks(1, refused)[0].count("\n") == 2


def test_the_recipe_tells_all_at_once_and_before_it_starts(tmp_path):
    flags = ("--tp", "2", "--fsdp.reshard_after_forward", "2", "--fsdp.offload", "true")
    flags += ("--fsdp.forward_methods", "[encode]", "--fsdp.forward_prefetch", "-1")
    flags += ("--fsdp.backward_prefetch", "-2")
    outcome = run_recipe(2, *flags, "--device", "cpu", "--out", str(tmp_path / "run"))[0]
    assert outcome.exitcode == 2 and outcome.stdout == "" and not (tmp_path / "run").exists()
    for message in (
        "fsdp.reshard_after_forward 2: torch's FSDP cannot",
        "fsdp.offload true",
        "fsdp.forward_methods: Llama has no public method 'encode' (it has: flops_per_token, tp_plan)",
        "fsdp.forward_prefetch -1",
        "fsdp.backward_prefetch -2",
    ):
        assert message in outcome.stderr
