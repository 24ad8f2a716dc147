"""The planner's formulas against the real thing: weights, memory that stays, collectives, FLOPs."""

from dataclasses import replace

import pytest
import torch
from parallel2d.models.llama import PRESETS, Llama, LlamaConfig
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from parallel2d import MeshShape, Precision, build_mesh, launch, parallelize
from parallel2d.ledger import expected_step, weights_of
from parallel2d.optim import build_optimizer
from parallel2d.planner.memory import states
from parallel2d.planner.model import ModelShape, flops_per_token, step_flops
from parallel2d.planner.predict import predict
from parallel2d.planner.setup import Setup
from parallel2d.shards import local_box
from parallel2d.ties import to_empty

# Sizes that no axis divides, where the rules of tp allow it.
ODD = LlamaConfig(1003, 72, 3, 4, 4, 18, 92)
RELATIVES = [
    ODD,
    replace(ODD, tie_embeddings=True),
    replace(ODD, num_kv_heads=1, qk_norm=True, qkv_bias=True, o_bias=True, ffn_bias=True),
]
MESHES = [MeshShape(1, 4, 2), MeshShape(1, 2, 4), MeshShape(2, 2, 2)]


def on_mesh(config: LlamaConfig, shape: MeshShape, checkpoint: str = "none"):
    with torch.device("meta"):
        model = Llama(config)
    mesh = build_mesh(shape, "cpu")
    precision = Precision(torch.float32, torch.bfloat16, torch.float32)
    units = list(model.blocks)
    plan, kind = model.tp_plan(), {"precision": precision, "activation_checkpoint": checkpoint}
    parallelize(model, mesh, plan=plan, units=units, **kind)
    return model, units, mesh


def sizes_of(groups):
    """Without the order within a group, which changes no sum. -1: whole over tp."""
    return [sorted((w.shape, -1 if w.tp_dim is None else w.tp_dim) for w in group) for group in groups]


@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize("config", RELATIVES, ids=["odd", "tied", "relative"])
def test_weights_collectives_and_what_stays_are_those_of_the_real_model(config, shape):
    ours = ModelShape.of(config)
    with launch.imagined_world(shape.world):
        model, units, mesh = on_mesh(config, shape)
        assert sizes_of(ours.groups(shape.tp)) == sizes_of(weights_of(model, units))
        for shard in range(shape.dp_shard):
            for tp in range(shape.tp):
                coordinate = (0, shard, tp) if shape.dp_replicate > 1 else (shard, tp)
                held = sum(local_box(p, coordinate).numel for p in model.parameters())
                assert states(ours, shape, 4, shard_index=shard, tp_index=tp)[0] == 4 * held
        setup = Setup(2, 8, 3, "selective", "always")
        predicted = predict(ours, shape, setup, None)
        real = replace(setup.step(ours), compute=torch.bfloat16, reduce=torch.float32)
        assert dict(predicted.ledger) == dict(expected_step(model, units, mesh, real))


def test_gradients_and_optimizer_state_to_the_byte():
    shape = MeshShape(1, 4, 2)
    with launch.imagined_world(shape.world):
        model, _, _ = on_mesh(ODD, shape)
        to_empty(model, "cpu")
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer = build_optimizer(model, 1e-3, (0.9, 0.95), 0.1)
        optimizer.step()
        state = [value for entry in optimizer.state.values() for value in entry.values()]
        held = tuple(map(nbytes, (model.parameters(), (p.grad for p in model.parameters()), state)))
    assert held == states(ModelShape.of(ODD), shape, 4)


def nbytes(tensors) -> int:
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)


def test_parameters_and_flops_per_token_are_the_models_own():
    for config in (PRESETS["debug"], PRESETS["llama3-8b"], *RELATIVES, replace(ODD, sliding_window=5)):
        shape = ModelShape.of(config)
        with torch.device("meta"):
            model = Llama(config)
        assert shape.parameters == sum(p.numel() for p in model.parameters())
        assert flops_per_token(shape, 96) == model.flops_per_token(96)


CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_COUNTERS = {
    CPU_ATTENTION: lambda q, k, v, *rest, **kwargs: sdpa_flop_count(q, k, v),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda grad, q, k, v, *rest, **kwargs: sdpa_backward_flop_count(grad, q, k, v)
    ),
}


@pytest.mark.parametrize("checkpoint", ["none", "selective", "full"])
@pytest.mark.parametrize("tp", [1, 2])
def test_flops_are_those_that_torch_counts(checkpoint, tp):
    shape = MeshShape(1, 1, tp)
    with launch.imagined_world(tp):
        model, _, _ = on_mesh(ODD, shape, checkpoint)
        to_empty(model, "cpu")
        with FlopCounterMode(display=False, custom_mapping=_COUNTERS) as counter:
            model(torch.zeros(3, 8, dtype=torch.int64)).sum().backward()
    assert counter.get_total_flops() == step_flops(ModelShape.of(ODD), 3, 8, tp, checkpoint).total
