"""What is frozen stays bit for bit, and the rest trains as on one process."""

from pathlib import Path

import pytest
import torch
from parallel2d.models.llama import Llama, LlamaConfig

from parallel2d import MeshShape, UserError, build_mesh, freeze, launch
from parallel2d.checkpoint.load import load_checkpoint
from parallel2d.checkpoint.state import state_tensors
from parallel2d.checkpoint.store import CheckpointStore
from tests.ranks import run_ranks, run_recipe
from tests.training import Case, Run, assert_same, curves

NORMS = ("*", "!*norm*")
CASES = [
    Case(frozen=("embedding*",)),
    Case(frozen=NORMS),
    Case(frozen=("embedding*", "blocks.0.*"), sync="last"),
    Case(frozen=("head*",), tied=True),
]


def trained(*globs: str, tied: bool = False) -> list[str]:
    with torch.device("meta"):
        model = Llama(LlamaConfig(tie_embeddings=tied))
    freeze(model, globs)
    return [name for name, p in model.named_parameters() if p.requires_grad]


def test_globs():
    assert len(trained()) == 21
    assert "embedding.weight" not in trained("embedding*") and len(trained("embedding*")) == 20
    assert all("norm" in name for name in trained(*NORMS)) and len(trained(*NORMS)) == 5
    assert trained("*", "!norm*", "*.o.*") == ["norm.weight"]
    assert trained("*", "!blocks.?.attention.[qk].weight", "blocks.1*") == [
        "blocks.0.attention.q.weight",
        "blocks.0.attention.k.weight",
    ]
    # A tied matrix has two names.
    assert "embedding.weight" not in trained("head.weight", tied=True)


@pytest.mark.parametrize(
    ("globs", "message"),
    [
        (["embeding.weight"], "'embeding.weight' matches no parameter (nearest: embedding.weight"),
        (["*", "!nrm*"], "'!nrm*' matches no parameter"),
        (["*"], "freeze ['*'] leaves nothing to train"),
        (["!norm*", "*"], "leaves nothing to train"),
    ],
)
def test_mistakes(globs, message):
    with pytest.raises(UserError) as caught:
        trained(*globs)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "shape", [MeshShape(1, 2, 2), pytest.param(MeshShape(2, 2, 2), marks=pytest.mark.slow)], ids=str
)
def test_every_mesh_trains_the_rest_alike_and_leaves_the_frozen_untouched(shape):
    alone = curves(MeshShape(), *CASES)
    for case, ours, reference in zip(CASES, curves(shape, *CASES), alone, strict=True):
        assert_same(ours, reference)
        still = {n for n in ours["before"] if torch.equal(ours["before"][n], ours["after"][n])}
        assert still == set(ours["before"]) - set(names_of(case))


def names_of(case: Case) -> list[str]:
    with torch.device("meta"):
        model = Llama(LlamaConfig(61, 36, case.layers, 6, 6, 0, 50, tie_embeddings=case.tied))
    freeze(model, case.frozen)
    return [name for name, p in model.named_parameters() if p.requires_grad]


def save(shape: MeshShape, folder: str, case: Case) -> tuple[list[float], list[str]]:
    with launch.world(shape.world, "cpu", 60):
        run = Run.begin(build_mesh(shape, "cpu"), case)
        run.train(0, 2)
        CheckpointStore(Path(folder)).save(2, run.model, run.optimizer, {})
        moments = [n for n in state_tensors(run.model, run.optimizer) if n.endswith("exp_avg")]
        return run.train(2, 4), moments


def resume(shape: MeshShape, folder: str, case: Case) -> list[float]:
    with launch.world(shape.world, "cpu", 60):
        run = Run.begin(build_mesh(shape, "cpu"), case)
        load_checkpoint(CheckpointStore(Path(folder)).latest(), run.model, run.optimizer)
        return run.train(2, 4)


def test_a_checkpoint_holds_no_moments_of_the_frozen_and_resumes_on_any_mesh(tmp_path):
    case = Case(frozen=NORMS)
    straight, moments = run_ranks(4, save, MeshShape(1, 2, 2), str(tmp_path), case)[0]
    assert moments == [f"optimizer.{name}.exp_avg" for name in names_of(case)]
    for shape in (MeshShape(1, 2, 2), MeshShape(1, 3, 1)):
        resumed = run_ranks(shape.world, resume, shape, str(tmp_path), case)[0]
        assert resumed == pytest.approx(straight, rel=0 if shape.tp == 2 else 1e-9)


def test_the_recipe_names_a_mistake_before_it_starts(tmp_path):
    out = tmp_path / "run"
    outcome = run_recipe(1, "--freeze", '["*", "!hed*"]', "--out", str(out))[0]
    assert outcome.exitcode == 2 and outcome.stdout == "" and not out.exists()
    assert "freeze: '!hed*' matches no parameter (nearest: head, head.weight" in outcome.stderr
