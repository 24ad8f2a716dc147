"""Shapes that tensor parallelism tends to get wrong: every gradient and weight against one process.

All variants of a mesh run in one world: starting it costs more than what runs in it.
"""

import functools

import pytest
import torch
from parallel2d.models.gpt2 import GPT2, GPT2Config
from parallel2d.models.llama import Llama, LlamaConfig
from parallel2d.models.rope import RopeScaling
from torch import nn

from parallel2d import MeshShape, build_mesh, launch
from parallel2d.verify.compare import verify
from parallel2d.verify.report import Report
from parallel2d.verify.trial import Model, Trial, make_template
from tests.ranks import run_ranks

# 8 heads of 6, 56 features: what dp splits, 2 or 4 need not divide.
BASE = {"vocab_size": 64, "width": 48, "num_layers": 2, "num_heads": 8, "num_kv_heads": 8, "ffn_width": 56}
ROPES = {
    "llama3": {"rope_scaling": RopeScaling("llama3", 8.0, 1.0, 4.0, 16), "rope_theta": 500.0},
    "linear": {"rope_scaling": RopeScaling("linear", 4.0)},
}
ALL_BIASES = {"qkv_bias": True, "o_bias": True, "ffn_bias": True}
LLAMAS = {
    "gqa": {"num_kv_heads": 2},
    "mqa, biases, QK-norm": {"num_kv_heads": 1, "qkv_bias": True, "qk_norm": True},
    "vocabulary 1003": {"vocab_size": 1003},
    "vocabulary 32003": {"vocab_size": 32_003},
    "vocabulary 61, tied": {"vocab_size": 61, "tie_embeddings": True},
    "all biases": ALL_BIASES,
    "head size 10": {"head_dim": 10, "num_kv_heads": 4},
    "RoPE llama3": ROPES["llama3"],
    "RoPE linear": ROPES["linear"],
    "window 3": {"sliding_window": 3, "num_kv_heads": 4},
}
# The same in three models of one block, for every day.
ONE_BLOCK = {
    "gqa, all biases, RoPE llama3": {"num_kv_heads": 2, **ALL_BIASES, **ROPES["llama3"]},
    "mqa, QK-norm, vocabulary 1003": {
        "num_kv_heads": 1,
        "qk_norm": True,
        "qkv_bias": True,
        "vocab_size": 1003,
    },
    "tied 61, head size 10, window, RoPE linear": {
        **{"vocab_size": 61, "tie_embeddings": True, "head_dim": 10, "num_kv_heads": 4, "sliding_window": 3},
        **ROPES["linear"],
    },
}
MODELS: dict[str, tuple[type[nn.Module], LlamaConfig | GPT2Config]] = {
    **{name: (Llama, LlamaConfig(**{**BASE, **changes})) for name, changes in LLAMAS.items()},
    **{name: (Llama, LlamaConfig(**{**BASE, "num_layers": 1, **more})) for name, more in ONE_BLOCK.items()},
    "GPT-2": (GPT2, GPT2Config(61, 48, 1, 8, 56, max_positions=19)),
}
EVERY_DAY = [*ONE_BLOCK, "GPT-2"]
MESHES = [MeshShape(1, 1, 2), MeshShape(1, 2, 2), MeshShape(1, 1, 4), MeshShape(1, 2, 4), MeshShape(2, 2, 2)]


def make(name: str) -> Model:
    model_class, config = MODELS[name]
    with torch.device("meta"):
        model = model_class(config)
    return model, model.tp_plan(), list(model.blocks)


def reports(shape: MeshShape, names: list[str], steps: int, rows: int = 4) -> dict[str, Report]:
    found = {}
    with launch.world(shape.world, "cpu", 60):
        mesh = build_mesh(shape, "cpu")
        for name in names:
            vocab_size = MODELS[name][1].vocab_size
            draw = torch.Generator().manual_seed(1)
            ids = torch.randint(vocab_size, (rows, 9), generator=draw)
            ids, targets = ids[:, :-1], ids[:, 1:].clone()
            # Padding that falls unevenly on ranks and micro-batches: one sequence has two real tokens.
            targets[0, 2:] = targets[-1, ::2] = -100
            trial = Trial(
                make_template(functools.partial(make, name)),
                [(ids, targets)] * steps,
                options={},
                micro_batch=1,
            )
            found[name] = verify(trial, mesh, str(shape))
    return found


@pytest.mark.parametrize(
    "shape",
    [pytest.param(m, marks=pytest.mark.slow) if m.world == 8 else m for m in MESHES],
    ids=str,
)
def test_every_shape_equals_one_process(shape):
    check(shape, EVERY_DAY, steps=1)


@pytest.mark.slow
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_each_alone_in_two_blocks(shape):
    check(shape, [*LLAMAS, "GPT-2"], steps=2)


@pytest.mark.parametrize("rows", [3, 5])
def test_a_last_batch_that_dp_does_not_divide_or_that_is_smaller(rows):
    check(MeshShape(2, 2, 1), ["GPT-2"], steps=1, rows=rows)


def check(shape: MeshShape, names: list[str], steps: int, rows: int = 4) -> None:
    for found in run_ranks(shape.world, reports, shape, names, steps, rows):
        assert list(found) == names
        for name, report in found.items():
            assert report.same, f"{name}\n{report}"
