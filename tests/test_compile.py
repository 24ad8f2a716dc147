"""Compiled blocks: the numbers of eager code, its collectives, one graph for all blocks and all steps."""

import os
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from parallel2d.models.llama import Llama, LlamaConfig
from torch.distributed import _symmetric_memory
from torch.utils._python_dispatch import TorchDispatchMode

from parallel2d import MeshShape, Precision, UserError, build_mesh, init_weights, launch, parallelize
from parallel2d.compile import async_tp_problems
from parallel2d.ledger import Observer, Step, expected_step
from parallel2d.loss import VocabShard
from parallel2d.mesh import dp_rank
from parallel2d.optim import build_optimizer
from parallel2d.step import evaluate, train_step
from tests.ranks import RECIPE, _recipe_main, run_ranks, run_recipe, try_ranks

CONFIG = LlamaConfig(61, 24, 2, 2, 2, 0, 20)
FLOAT64 = Precision(torch.float64, torch.float64, torch.float64)


def curve(shape: MeshShape, mode: str, compile: bool, *, async_tp: bool = False) -> tuple[list[float], int]:
    """Loss and gradient norm of three steps and the validation loss after them; the number of graphs."""
    from torch._dynamo.utils import counters

    with launch.world(shape.world, "cpu", 300) as device:
        mesh = build_mesh(shape, "cpu")
        with torch.device("meta"):
            model = Llama(CONFIG)
        units = list(model.blocks)
        parallelize(
            model,
            mesh,
            plan=model.tp_plan(),
            units=units,
            precision=FLOAT64,
            activation_checkpoint=mode,
            compile=compile,
            async_tp=async_tp,
        )
        init_weights(model, device, 0)
        optimizer = build_optimizer(model, 1e-2, (0.9, 0.95), 0.1)
        vocab = VocabShard.of(CONFIG.vocab_size, mesh["tp"])
        ids = torch.randint(CONFIG.vocab_size, (4, 13), generator=torch.Generator().manual_seed(1))
        mine = ids.chunk(shape.dp)[dp_rank(mesh)]
        batch = (mine[:, :-1], mine[:, 1:])
        steps = [train_step(model, [batch], optimizer, vocab, mesh, 1.0) for _ in range(2)]
        with Observer(mesh) as observer:
            steps.append(train_step(model, [batch], optimizer, vocab, mesh, 1.0))
        step = Step(len(mine), 12, 24, 1, torch.float64, torch.float64, mode, compile=compile)
        assert dict(observer.ledger) == dict(expected_step(model, units, mesh, step))
        shorter = (mine[:, :-3], mine[:, 3:])
        validations = [evaluate(model, [b], vocab, mesh) for b in (batch, shorter)]
        numbers = [n for s in steps for n in (s.loss, s.grad_norm)] + validations
        return numbers, counters["stats"]["unique_graphs"]


def worst_error(shape: MeshShape, mode: str) -> float:
    """Of a compiled run against eager code in one process; every rank has compiled one graph."""
    ((reference, no_graphs),) = run_ranks(1, curve, MeshShape(), "none", False)
    assert no_graphs == 0
    results = run_ranks(shape.world, curve, shape, mode, True, timeout_s=400)
    assert [graphs for _, graphs in results] == [1] * shape.world
    ours = results[0][0]
    return max(abs(a - b) / abs(b) for a, b in zip(ours, reference, strict=True))


@pytest.mark.slow
def test_compiled_equals_eager_on_one_process():
    assert worst_error(MeshShape(), "none") < 1e-7


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("shape", [MeshShape(), MeshShape(1, 1, 2), MeshShape(1, 2, 2)], ids=str)
def test_compiled_equals_eager_on_any_mesh(shape, mode):
    assert worst_error(shape, mode) < 1e-7


@pytest.mark.slow
def test_the_recipe_trains_validates_generates_and_shows_its_ledger(tmp_path, read_metrics):
    flags = ("--dp", "2", "--tp", "1", "--steps", "2", "--data.seq_len", "32", "--log.val_batches", "1")
    flags += ("--log.every", "1", "--log.sample_tokens", "5", "--precision.param", "float64")
    outcomes = {}
    for compile in ("false", "true"):
        out = ("--out", str(tmp_path / compile), "--ledger", "true", "--compile", compile)
        outcomes[compile] = run_recipe(2, *flags, *out, timeout_s=400)[0]
        assert outcomes[compile].exitcode == 0, outcomes[compile].stderr
    assert "differs" not in outcomes["true"].stdout
    losses = [[line["loss"] for line in read_metrics(tmp_path / c).values()] for c in ("true", "false")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-7)


def test_no_compiler_is_told_before_anything_starts(tmp_path):
    (outcome,) = try_ranks(1, recipe_without_compiler, str(tmp_path / "run"))
    assert outcome.exitcode == 2
    assert "compile true needs a C++ compiler: install g++" in outcome.stderr
    assert "Traceback" not in outcome.stderr and not (tmp_path / "run").exists()


def recipe_without_compiler(out: str) -> None:
    os.environ["PATH"] = ""
    _recipe_main(RECIPE, ("--compile", "true", "--steps", "1", "--out", out))


class Fused(TorchDispatchMode):
    """Counts the products that gathers and scatters are one operation with."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[func._opname] += func.namespace == "symm_mem"
        return func(*args, **(kwargs or {}))


def fused(shape: MeshShape) -> tuple[list[float], Counter[str]]:
    """Of the third step of a run with asynchronous tensor parallelism."""
    # torch fuses where it has NCCL and CUDA. What its pass makes of our graphs runs here all the same,
    # by torch's own reference of each fused operation.
    dist.is_nccl_available = lambda: True
    library = torch.library.Library("symm_mem", "IMPL", "CPU")
    for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
        library.impl(name, getattr(_symmetric_memory, f"_{name}_fallback"))
    with _symmetric_memory._test_mode(), Fused() as counter:
        numbers, _ = curve(shape, "none", True, async_tp=True)
    return numbers, +counter.seen


@pytest.mark.slow
def test_async_tp_fuses_gathers_and_scatters_with_their_products():
    ((reference, _),) = run_ranks(1, curve, MeshShape(), "none", False)
    for numbers, seen in run_ranks(2, fused, MeshShape(1, 1, 2), timeout_s=400):
        assert max(abs(a - b) / abs(b) for a, b in zip(numbers, reference, strict=True)) < 1e-7
        # Two blocks, three steps. Forward: q, k, v and gate, up; o and down. Backward: the gradients of the
        # latter; those of the former are sums of products, which torch does not fuse.
        assert seen == {"fused_all_gather_matmul": 3 * 2 * 4, "fused_matmul_reduce_scatter": 3 * 2 * 2}


def test_async_tp_says_what_it_needs(tmp_path):
    flags = ("--async_tp", "true", "--device", "cpu", "--out", str(tmp_path / "run"))
    (outcome,) = try_ranks(1, _recipe_main, RECIPE, flags)
    assert outcome.exitcode == 2 and not (tmp_path / "run").exists()
    for problem in (
        "async_tp true is a pass of the compiler: use --compile true",
        "async_tp true has nothing to overlap with tp 1",
        "async_tp true needs GPUs that map each other's memory",
    ):
        assert problem in outcome.stderr
    assert async_tp_problems(True, 2, "cuda") == []
    assert run_ranks(1, refused_without_compile) == [
        "async_tp=True is a pass of the compiler: give compile=True too"
    ]


def refused_without_compile() -> str:
    with pytest.raises(UserError) as told:
        curve(MeshShape(), "none", False, async_tp=True)
    return str(told.value)
