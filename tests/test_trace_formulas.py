"""The planner's formulas against a traced step of the real code: collectives, FLOPs, peak of memory."""

import pytest
import torch
from parallel2d.models.llama import Llama, LlamaConfig

from parallel2d import FsdpPolicy, MeshShape, Precision
from parallel2d.planner.model import ModelShape
from parallel2d.planner.predict import predict
from parallel2d.planner.setup import ON_CPU, Setup
from parallel2d.planner.trace import Workload, trace_step

BF16 = Precision(torch.float32, torch.bfloat16, torch.float32)
# Wide enough for buffers of a size (logits, activations, weights) to outweigh what the formulas leave out.
WIDE = LlamaConfig(32_003, 512, 5, 8, 2, 0, 1_536)
NARROW_HEAD = LlamaConfig(509, 512, 5, 8, 2, 0, 1_536)


@pytest.mark.parametrize("shape", [MeshShape(1, 4, 2), MeshShape(2, 2, 2)], ids=str)
@pytest.mark.parametrize(
    "checkpoint, reshard", [("none", "auto"), ("selective", "never"), ("full", "always")]
)
@pytest.mark.parametrize("config", [WIDE, NARROW_HEAD], ids=["wide", "narrow-head"])
def test_the_formulas_are_what_a_trace_counts(config, shape, checkpoint, reshard):
    with torch.device("meta"):
        model = Llama(config)
    work = Workload(4, 256, config.vocab_size, 2, BF16, FsdpPolicy(reshard), activation_checkpoint=checkpoint)
    traced = trace_step((model, model.tp_plan(), list(model.blocks)), shape, work)
    ours = predict(ModelShape.of(config), shape, Setup(4, 256, 2, checkpoint, reshard), None, ON_CPU)
    assert dict(ours.ledger) == dict(traced.ledger)
    assert ours.flops.total * 2 == traced.flops
    assert ours.memory.allocated == pytest.approx(traced.peak_bytes, rel=0.05)
    if ours.memory.peak.name == "loss":
        assert ours.memory.allocated == pytest.approx(traced.peak_bytes, rel=0.01)
