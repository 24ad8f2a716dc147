"""The planner's formulas against a traced step of the real code: collectives, FLOPs, peak of memory."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from parallel2d.models.llama import Llama, LlamaConfig

from parallel2d import FsdpPolicy, MeshShape, Precision
from parallel2d.planner.model import ModelShape
from parallel2d.planner.predict import predict
from parallel2d.planner.setup import BFLOAT16, FLOAT32, ON_CPU, Formats, Setup
from parallel2d.planner.trace import Workload, trace_step

BF16 = Precision(torch.float32, torch.bfloat16, torch.float32)
# Vocabularies that tp does not divide: one whose logits are the peak of memory, in several chunks of the
# loss, and one that leaves the peak to the blocks.
LLAMA = LlamaConfig(4099, 128, 3, 8, 2, 0, 352)
QWEN = replace(LLAMA, qkv_bias=True, o_bias=True, ffn_bias=True, qk_norm=True)
MODELS = {
    "llama": LLAMA,
    "llama-narrow-head": replace(LLAMA, vocab_size=509),
    "qwen": QWEN,
    "qwen-tied-narrow-head": replace(QWEN, vocab_size=509, tie_embeddings=True),
}
MESHES = {"4×2": MeshShape(1, 4, 2), "2×4": MeshShape(1, 2, 4), "HSDP": MeshShape(2, 2, 2)}
MODES = {
    "none": ("none", "but_last", 1),
    "selective": ("selective", "never", 1),
    "full": ("full", "always", 2),
}
QUICK = {("llama", "4×2", "selective")}
CASES = [
    pytest.param(
        MODELS[model],
        MESHES[mesh],
        *MODES[mode],
        id=f"{model}-{mesh}-{mode}",
        marks=() if (model, mesh, mode) in QUICK else pytest.mark.slow,
    )
    for model, mesh, mode in product(MODELS, MESHES, MODES)
]


@pytest.mark.parametrize(
    "precision", [pytest.param(BF16, marks=pytest.mark.slow), Precision()], ids=["bf16", "float32"]
)
def test_where_tokens_are_few_weights_and_their_reduction_set_the_peak(precision):
    config = LlamaConfig(61, 512, 3, 8, 8, 0, 1408)
    with torch.device("meta"):
        model = Llama(config)
    work = Workload(1, 64, 61, 1, precision, FsdpPolicy("but_last"), "none")
    traced = trace_step((model, model.tp_plan(), list(model.blocks)), MeshShape(1, 2, 2), work)
    formats = Formats(FLOAT32, BFLOAT16 if precision is BF16 else FLOAT32, FLOAT32)
    setup = Setup(1, 64, reshard="but_last", formats=formats)
    ours = predict(ModelShape.of(config), MeshShape(1, 2, 2), setup, None, ON_CPU)
    assert ours.memory.peak.name == "reduction of block 2 of 3"
    assert ours.memory.allocated == pytest.approx(traced.peak_bytes, rel=0.02)


@pytest.mark.parametrize("config, shape, checkpoint, reshard, accumulation", CASES)
def test_the_formulas_are_what_a_trace_counts(config, shape, checkpoint, reshard, accumulation):
    with torch.device("meta"):
        model = Llama(config)
    work = Workload(4, 64, config.vocab_size, accumulation, BF16, FsdpPolicy(reshard), checkpoint)
    traced = trace_step((model, model.tp_plan(), list(model.blocks)), shape, work)
    setup = Setup(4, 64, accumulation, checkpoint, reshard)
    ours = predict(ModelShape.of(config), shape, setup, None, ON_CPU)
    assert dict(ours.ledger) == dict(traced.ledger)
    assert ours.flops.total * accumulation == traced.flops
    assert ours.memory.allocated == pytest.approx(traced.peak_bytes, rel=0.01)


def test_the_gradients_of_a_tied_table_are_added_up():
    config = LlamaConfig(8192, 256, 2, 8, 8, 0, 704, tie_embeddings=True)
    with torch.device("meta"):
        model = Llama(config)
    work = Workload(2, 64, 8192, 1, BF16, FsdpPolicy("but_last"), "none")
    traced = trace_step((model, model.tp_plan(), list(model.blocks)), MeshShape(1, 2, 2), work)
    ours = predict(ModelShape.of(config), MeshShape(1, 2, 2), Setup(2, 64, reshard="but_last"), None, ON_CPU)
    assert ours.memory.peak.name == "reduction of the root"
    assert ours.memory.allocated == pytest.approx(traced.peak_bytes, rel=0.01)


@pytest.mark.parametrize("checkpoint", ["none", pytest.param("full", marks=pytest.mark.slow)])
def test_all_blocks_share_the_mask_of_a_sliding_window(checkpoint):
    config = LlamaConfig(61, 256, 3, 8, 8, 0, 704, sliding_window=64)
    with torch.device("meta"):
        model = Llama(config)
    shape = MeshShape(1, 2, 2)
    work = Workload(1, 512, 61, 1, BF16, FsdpPolicy("but_last"), checkpoint)
    traced = trace_step((model, model.tp_plan(), list(model.blocks)), shape, work)
    setup = Setup(1, 512, checkpoint=checkpoint, reshard="but_last")
    ours = predict(ModelShape.of(config), shape, setup, None, ON_CPU)
    assert ours.memory.allocated == pytest.approx(traced.peak_bytes, rel=0.01)
    assert ours.memory.peak.by_part()["other"] == 6 * 512 * config.key_width + 2 * 512**2
