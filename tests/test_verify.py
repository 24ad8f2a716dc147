"""verify: right plans agree, wrong ones are caught and named."""

import functools
import json
import math
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parallel2d import MeshShape, build_mesh, launch
from parallel2d.cli.main import main
from parallel2d.local_weights import distribute
from parallel2d.styles import Rowwise, Shard, Vocab
from parallel2d.verify.compare import verify
from parallel2d.verify.report import TOLERANCE, Report
from parallel2d.verify.trial import Trial, make_template
from tests.ranks import ROOT, run_ranks, try_ranks


class Attention(nn.Module):
    """Three heads of four, counted from the configuration instead of from what arrives."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(12, 12) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (rearrange(y(x), "b s (h k) -> b h s k", h=3) for y in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(rearrange(y, "b h s k -> b s (h k)"))


class Ffn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 20), nn.Linear(20, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(31, 12), nn.Linear(12, 31, bias=False)
        self.norm1, self.attention = nn.LayerNorm(12), Attention()
        self.norm2, self.ffn = nn.LayerNorm(12), Ffn()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        x = x + self.attention(self.norm1(x))
        return self.head(x + self.ffn(self.norm2(x)))


# tp 2 does not divide the three heads: attention stays whole, behind a gather of its own input.
MEGATRON = {"ffn.up": "colwise", "ffn.down": "rowwise"}
SEQUENCE = {
    "embedding": "vocab",
    "norm1": "sequence",
    "attention": "gather_sequence",
    "attention.[qkv]": "colwise_local",
    "attention.o": "rowwise_scatter",
    "norm2": "sequence",
    "ffn": "gather_sequence",
    "ffn.up": "colwise_local",
    "ffn.down": "rowwise_scatter",
    "head": "vocab_head",
}


class NoAttention(Tiny):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        return self.head(x + self.ffn(self.norm2(x)))


class WithoutSum(Rowwise):
    """A reduction forgotten."""

    def forward(self, module: nn.Linear, mesh: DeviceMesh, x: Tensor) -> Tensor:
        return F.linear(x, module.weight) + module.bias


class WithoutOffset(Vocab):
    """Every rank takes its rows for the first of the vocabulary."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute(module, device_mesh, weight=Shard(0))
        rows = module.weight.to_local().shape[0]
        module.forward = functools.partial(self.forward, module, device_mesh, (0, rows))
        return module


def make(model_class: type[nn.Module], plan: dict) -> tuple[nn.Module, dict, list[nn.Module]]:
    model = model_class()
    return model, plan, [model.ffn]


def report_of(model_class: type[nn.Module], plan: dict, steps: int = 2) -> Report:
    shape = MeshShape(1, 2, 2)
    with launch.world(shape.world, "cpu", 60):
        draw = torch.Generator().manual_seed(0)
        batches = [
            (torch.randint(31, (4, 6), generator=draw), torch.randint(31, (4, 6), generator=draw))
            for _ in range(steps)
        ]
        made: Callable = functools.partial(make, model_class, plan)
        return verify(Trial(make_template(made), batches, options={}), build_mesh(shape, "cpu"), "2×2")


NO_ATTENTION = {k: v for k, v in SEQUENCE.items() if "norm1" not in k}
NO_ATTENTION |= {"attention.[qkvo]": "replicated", "norm1": "replicated"}
del NO_ATTENTION["attention"], NO_ATTENTION["attention.[qkv]"], NO_ATTENTION["attention.o"]


@pytest.mark.parametrize(
    ("model_class", "plan"), [(Tiny, MEGATRON), (NoAttention, NO_ATTENTION)], ids=["megatron", "sequence"]
)
def test_a_right_plan_agrees(model_class, plan):
    for report in run_ranks(4, report_of, model_class, plan):
        assert report.same, str(report)
        assert len(report.parameters) == len(list(model_class().parameters()))
        assert 0 < report.worst("gradient")[0] < TOLERANCE  # rounding shows that something was compared


@pytest.mark.parametrize(
    ("model_class", "plan", "place", "named"),
    [
        (
            Tiny,
            {**MEGATRON, "ffn.down": WithoutSum()},
            "the first that differs is that of ffn.down (plan entry 'ffn.down': WithoutSum)",
            "ffn.down.weight",
        ),
        (
            Tiny,
            {**MEGATRON, "ffn.down": "colwise"},
            "forward fails in ffn.down (plan entry 'ffn.down': colwise): mat1 and mat2 shapes",
            None,
        ),
        (
            NoAttention,
            {**NO_ATTENTION, "norm2": "replicated"},
            "forward agrees; gradients agree from the loss back to ffn.up "
            "(plan entry 'ffn.up': colwise_local); the first that differs "
            "is in norm2 (plan entry 'norm2': replicated)",
            "norm2.weight",
        ),
        (
            NoAttention,
            {**NO_ATTENTION, "embedding": WithoutOffset()},
            "outputs the first that differs is that of embedding (plan entry 'embedding': WithoutOffset)",
            "embedding.weight",
        ),
        (
            Tiny,
            SEQUENCE,
            "agree up to attention.v (plan entry 'attention.[qkv]': colwise_local); the first that differs "
            "is that of attention.o (plan entry 'attention.o': rowwise_scatter); the fault is there, or "
            "in what the model does between the two (a split of heads, a chunk)",
            "attention.q.weight",
        ),
    ],
    ids=["missing reduction", "rowwise as colwise", "norm not reduced", "vocabulary offset", "head split"],
)
def test_a_wrong_plan_is_caught_and_named(model_class, plan, place, named):
    for report in run_ranks(4, report_of, model_class, plan):
        assert not report.same
        assert place in report.place, report.place
        assert named is None or named in {p.parameter for p in report.differing}
        assert "NOT the same numbers" in str(report)


def test_only_the_wrong_gradient_is_named():
    plan = {**NO_ATTENTION, "norm2": "replicated"}
    report = run_ranks(4, report_of, NoAttention, plan, 1)[0]
    assert {p.parameter for p in report.differing} == {"norm2.weight", "norm2.bias"}


class ZeroLinear(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


class ZeroInit(NoAttention):
    """Starts as if it had no feed-forward: its norm has no gradient in step 1."""

    def __init__(self) -> None:
        super().__init__()
        self.ffn.down = ZeroLinear(20, 12)


def make_on_meta(plan: dict) -> tuple[nn.Module, dict, list[nn.Module]]:
    with torch.device("meta"):
        return make(ZeroInit, plan)


def on_meta(plan: dict) -> Report:
    """One step with targets and one in which nothing counts."""
    with launch.world(2, "cpu", 60):
        ids = torch.arange(24).view(4, 6)
        batches = [(ids, ids + 1), (ids, torch.full_like(ids, -100))]
        trial = Trial(make_template(functools.partial(make_on_meta, plan)), batches, options={})
        return verify(trial, build_mesh(MeshShape(tp=2), "cpu"), "1×2")


def test_weights_of_zero_and_a_step_without_targets_hide_nothing():
    assert run_ranks(2, on_meta, NO_ATTENTION)[0].same
    report = run_ranks(2, on_meta, {**NO_ATTENTION, "norm2": "replicated"})[0]
    assert {p.parameter for p in report.differing if p.gradient > 1e-3} == {"norm2.weight", "norm2.bias"}


def test_a_nan_is_a_difference():
    report = Report("1×2", 1, math.inf, 0.0, [])
    assert not report.same and json.loads(json.dumps(report.as_dict(), allow_nan=False))["loss"] is None


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.ffn = nn.BatchNorm1d(6), Ffn()

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return ids, ids


def make_batch_norm() -> tuple[nn.Module, dict, list[nn.Module]]:
    return make(Pair, {})


def make_tuple() -> tuple[nn.Module, dict, list[nn.Module]]:
    model = Pair()
    model.norm = nn.Identity()
    return model, {}, [model.ffn]


def make_no_triple() -> nn.Module:
    return Tiny()


def far_targets(step: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(2, 4, dtype=torch.int64), torch.full((2, 4), 31)


def test_a_plan_that_breaks_a_rule_is_a_mistake_of_input():
    outcome = try_ranks(4, report_of, NoAttention, {"ffn.downn": "rowwise"})[0]
    assert "plan entry 'ffn.downn' matches no module" in outcome.stderr


def make_tiny() -> tuple[nn.Module, dict, list[nn.Module]]:
    return make(Tiny, MEGATRON)


def make_wrong() -> tuple[nn.Module, dict, list[nn.Module]]:
    return make(Tiny, {**MEGATRON, "ffn.down": WithoutSum()})


def command(*arguments: str) -> None:
    sys.argv = ["parallel2d", *arguments]
    main()


FLOATS = ("--batch", "floats:4,6")
OWN = ("--batch", "tokens:4,6,31", "--steps", "1", "--json")


@pytest.mark.parametrize(("name", "status"), [("make_tiny", 0), ("make_wrong", 1)])
def test_the_command_on_ones_own_module(name, status):
    outcome = try_ranks(1, command, "verify", f"tests.test_verify:{name}", *OWN, "--dp", "1", "--tp", "2")[0]
    assert outcome.exitcode == status, outcome.stderr
    found = json.loads(outcome.stdout)
    assert found["same"] == (status == 0) and found["steps"] == 1
    assert bool(found["parameters"]) == (status == 1)


def test_replicas_reach_the_mesh():
    mesh = ("--dp", "2", "--dp_replicate", "2", "--tp", "1")
    outcome = try_ranks(2, command, "verify", "tests.test_verify:make_tiny", *OWN, *mesh)[0]
    assert outcome.exitcode == 0, outcome.stderr
    assert json.loads(outcome.stdout)["mesh"] == "2×1 (dp_replicate 2)"


def test_a_second_file_wins_over_the_first(tmp_path):
    (tmp_path / "more.yaml").write_text("data: {seq_len: 30}\ntp: 4\n")
    files = ("--config", str(ROOT / "recipes" / "llama_2d.yaml"), "--config", str(tmp_path / "more.yaml"))
    outcome = try_ranks(1, command, "verify", *files)[0]
    assert outcome.exitcode == 2 and "data.seq_len 30 is not divisible by tp 4" in outcome.stderr


def test_the_command_on_a_recipe():
    """The recipe's flags are heard: the batch, the accumulation, the depth."""
    flags = ("--data.seq_len", "16", "--data.global_batch", "4", "--data.micro_batch", "1")
    flags += ("--model.num_layers", "1", "--model.num_kv_heads", "1", "--activation_checkpoint", "full")
    config = str(ROOT / "recipes" / "llama_2d.yaml")
    mesh = ("--dp", "2", "--tp", "2", "--steps", "2")
    outcome = try_ranks(4, command, "verify", "--config", config, *mesh, *flags)[0]
    assert outcome.exitcode == 0, outcome.stderr
    assert "weights after step 2" in outcome.stdout and "same numbers" in outcome.stdout
    assert "2×2 against one process, float64" in outcome.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("verify",), "give --config FILE, --hf DIR or one MODULE:CALLABLE, not neither"),
        (("verify", "tests.test_verify:make_tiny"), "your own model needs --batch"),
        (("verify", "nowhere:make", *OWN), "there is no module 'nowhere'"),
        (("verify", "tests.test_verify:nothing", *OWN), "is not MODULE:CALLABLE of something that exists"),
        (("verify", "tests.test_verify:OWN", *OWN), "is a tuple, not a callable"),
        (
            ("verify", "tests.test_verify:make_tiny", "--batch", "tokens:4,6"),
            "is neither tokens:BATCH,LENGTH",
        ),
        (("verify", "tests.test_verify:make_batch_norm", *FLOATS), "norm: BatchNorm1d takes its statistics"),
        (("verify", "tests.test_verify:make_tuple", *FLOATS), "the model returns tuple, not one tensor"),
        (("verify", "tests.test_verify:make_no_triple", *FLOATS), "returns Tiny, not (model, plan, units)"),
        (
            ("verify", "tests.test_verify:make_tiny", "--batch", "tests.test_verify:far_targets"),
            "targets from 31 to 31 are not classes of an output of 31",
        ),
        (("verify", "--config", "nowhere.yaml"), "--config 'nowhere.yaml' is not a file"),
        (("verify", "--config", str(ROOT / "recipes" / "llama_2d.yaml"), "--tp", "3"), "use tp 1, 2, 4, 8"),
        (("verify", "--steps", "0", "--config", "x"), "--steps 0 is not positive"),
        (("verify", *OWN, "--config", "x"), "--batch does not go with this form"),
        (("verify", "tests.test_verify:make_tiny", *OWN, "--tp", "0"), "tp 0 is not a positive number"),
    ],
)
def test_mistakes_are_told_at_once(arguments, message):
    outcome = try_ranks(1, command, *arguments)[0]
    assert outcome.exitcode == 2
    assert message in outcome.stderr and "Traceback" not in outcome.stderr
