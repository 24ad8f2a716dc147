"""Weights: bit-identical on every mesh, and no rank ever holds the whole model."""

import weakref

import pytest
import torch
from parallel2d.models.llama import Llama, LlamaConfig
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from parallel2d import MeshShape, Precision, UserError, build_mesh, init_weights, launch, parallelize
from tests.ranks import run_ranks

CPU = torch.device("cpu")
CONFIG = LlamaConfig(vocab_size=259, width=64, num_layers=2, num_heads=8, num_kv_heads=8, ffn_width=96)


def build(shape: MeshShape, config: LlamaConfig, seed: int = 0) -> Llama:
    with torch.device("meta"):
        model = Llama(config)
    parallelize(model, build_mesh(shape, "cpu"), plan=model.tp_plan(), units=list(model.blocks))
    init_weights(model, CPU, seed)
    return model


def whole_weights(shape: MeshShape, config: LlamaConfig, seed: int) -> dict[str, torch.Tensor]:
    with launch.world(shape.world, "cpu", 60):
        named = build(shape, config, seed).named_parameters()
        return {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for n, p in named}


@pytest.mark.parametrize(
    "shape", [MeshShape(1, 4, 2), MeshShape(2, 2, 2), MeshShape(1, 1, 4), MeshShape(1, 3, 1)]
)
def test_weights_are_bit_identical_on_every_mesh(shape):
    reference = run_ranks(1, whole_weights, MeshShape(), CONFIG, 7)[0]
    for weights in run_ranks(shape.world, whole_weights, shape, CONFIG, 7):
        assert weights.keys() == reference.keys()
        assert all(torch.equal(weights[name], reference[name]) for name in reference)


def test_seeds_and_modules_differ():
    zero, one = (run_ranks(1, whole_weights, MeshShape(), CONFIG, seed)[0] for seed in (0, 1))
    assert not torch.equal(zero["blocks.0.attention.q.weight"], one["blocks.0.attention.q.weight"])
    assert not torch.equal(zero["blocks.0.attention.q.weight"], zero["blocks.1.attention.q.weight"])
    assert zero["blocks.0.attention.q.weight"].std().item() == pytest.approx(0.02, rel=0.05)


def test_a_tied_weight_stays_one_parameter():
    tied = LlamaConfig(vocab_size=259, width=64, num_layers=1, num_heads=8, ffn_width=96, tie_embeddings=True)
    reference = run_ranks(1, whole_weights, MeshShape(), tied, 0)[0]
    sharded = run_ranks(4, whole_weights, MeshShape(1, 2, 2), tied, 0)[0]
    assert "head.weight" not in sharded
    assert torch.equal(sharded["embedding.weight"], reference["embedding.weight"])
    assert run_ranks(4, tied_after_a_step, tied) == [True] * 4


def tied_after_a_step(config: LlamaConfig) -> bool:
    with launch.world(4, "cpu", 60):
        model = build(MeshShape(1, 2, 2), config)
        model(torch.zeros(1, 8, dtype=torch.int64)).sum().backward()
        return model.head.weight is model.embedding.weight


class PeakMemory(TorchDispatchMode):
    """Bytes of live storages made under the mode, and their peak; meta tensors hold none."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor) and not tensor.is_meta:
                self.count(tensor.untyped_storage())
        return result

    def count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self.seen:
            return
        self.seen.add(storage._cdata)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.forget, storage._cdata, storage.nbytes())

    def forget(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size


def peak_of_build(config: LlamaConfig) -> tuple[int, int, int, int]:
    with launch.world(8, "cpu", 60):
        with PeakMemory() as memory:
            model = build(MeshShape(1, 4, 2), config)
        parameters = list(model.parameters())
        shards = sum(p.to_local().untyped_storage().nbytes() for p in parameters)
        return (
            memory.peak,
            shards,
            4 * max(p.numel() for p in parameters),
            4 * sum(p.numel() for p in parameters),
        )


def test_no_rank_holds_more_than_its_shards_and_one_parameter():
    config = LlamaConfig(vocab_size=512, width=128, num_layers=6, num_heads=8, ffn_width=384)
    for peak, shards, largest, whole in run_ranks(8, peak_of_build, config):
        assert largest < peak <= shards + largest + 4096
        assert peak < 0.4 * whole


class NoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))


def test_a_module_without_reset_parameters_is_named():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), NoReset())
    with pytest.raises(UserError, match=r"define it in: 1 \(NoReset\)"):
        init_weights(model, CPU, seed=0)


class Masked(nn.Linear):
    """Inherits a reset_parameters() that does not know the buffer."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("mask", torch.ones(4))


def test_values_that_are_never_set_are_named():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), Masked())
    with pytest.raises(UserError, match=r"reset_parameters\(\) of 1 \(Masked\) leaves mask without values"):
        init_weights(model, CPU, seed=0)


class Rotating(nn.Module):
    """A complex buffer, as in Meta's Llama, and a float32 table."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("freqs", torch.polar(torch.ones(4), torch.arange(4.0)))
        self.register_buffer("table", torch.ones(4))


def dtypes_after(param: torch.dtype) -> tuple[torch.dtype, ...]:
    with launch.world(1, "cpu", 60):
        model = Rotating()
        precision = Precision(param, param, torch.float32)
        parallelize(model, build_mesh(MeshShape(), "cpu"), plan={}, units=[], precision=precision)
        return model.linear.weight.dtype, model.freqs.dtype, model.table.dtype


def test_buffers_are_never_narrowed():
    assert run_ranks(1, dtypes_after, torch.float32) == [(torch.float32, torch.complex64, torch.float32)]
    assert run_ranks(1, dtypes_after, torch.bfloat16) == [(torch.bfloat16, torch.complex64, torch.float32)]
    assert run_ranks(1, dtypes_after, torch.float64) == [(torch.float64, torch.complex128, torch.float64)]


def keeps_rank_0_values() -> float:
    with launch.world(4, "cpu", 60):
        torch.manual_seed(torch.distributed.get_rank())
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        mesh = build_mesh(MeshShape(1, 2, 2), "cpu")
        parallelize(model, mesh, plan={"0": "colwise", "1": "rowwise"}, units=[])
        return sum(p.full_tensor().double().sum().item() for p in model.parameters())


def test_a_model_with_values_keeps_those_of_rank_0():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    expected = sum(p.double().sum().item() for p in model.parameters())
    assert run_ranks(4, keeps_rank_0_values) == pytest.approx([expected] * 4, abs=1e-12)
