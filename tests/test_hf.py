"""Hugging Face folders on a mesh: transformers' own numbers, bit-identical round trips."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel2d.models.gpt2 import GPT2, GPT2Config
from parallel2d.models.hf import Config, from_hf, hf_names, to_hf
from parallel2d.models.llama import Llama, LlamaConfig
from parallel2d.models.rope import RopeScaling
from safetensors.torch import load_file
from torch import Tensor, nn

from parallel2d import MeshShape, build_mesh, launch, parallelize
from parallel2d.fsdp import inference
from parallel2d.hf.weights import load_hf, read_config, save_hf
from parallel2d.loss import VocabShard, gather_vocab
from parallel2d.verify.hf import compare, read_expected
from tests.ranks import ROOT, run_ranks

ORACLES = ROOT.parent / "shared" / "oracles"
NAMES = sorted(path.parent.name for path in ORACLES.glob("*/expected.npz"))
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def oracles() -> Path:
    if not NAMES:
        pytest.skip(
            f"no {ORACLES}: the folders with transformers' own results are not part of the repository"
        )
    return ORACLES


def open_model(folder: Path, mesh: Any) -> nn.Module:
    """The folder's model on the mesh."""
    model_class, config = from_hf(read_config(folder))
    with torch.device("meta"):
        model = model_class(config)
    parallelize(model, mesh, plan=model.tp_plan(), units=list(model.blocks))
    load_hf(folder, model, hf_names(model), CPU)
    return model


def numbers(folder: Path, model: nn.Module, mesh: Any) -> tuple[float, float, float]:
    """Largest absolute error of the logits, relative errors of loss and gradient norm."""
    found = compare(model, model.config.vocab_size, read_expected(folder / "expected.npz"), mesh)
    return found["logits_max_abs_err"], found["loss_rel_err"], found["grad_norm_rel_err"]


def errors(shape: MeshShape, folders: list[Path], out: Path) -> dict[str, tuple[float, ...]]:
    """The errors of each folder; then each is written again, below `out`."""
    with launch.world(shape.world, "cpu", 60):
        mesh, found = build_mesh(shape, "cpu"), {}
        for folder in folders:
            config = read_config(folder)
            model = open_model(folder, mesh)
            found[folder.name] = numbers(folder, model, mesh)
            several = len(list(folder.glob("*.safetensors"))) > 1
            save_hf(
                out / folder.name,
                model,
                hf_names(model),
                to_hf(model.config, like=config),
                dtype=getattr(torch, config["dtype"]),
                max_shard_bytes=170e3 if several else 5e9,
            )
        return found


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in load_file(path).items()}


@pytest.mark.parametrize(
    "shape",
    [
        MeshShape(1, 2, 1),
        *(pytest.param(m, marks=pytest.mark.slow) for m in (MeshShape(), MeshShape(1, 2, 2))),
    ],
    ids=str,
)
def test_transformers_numbers_and_its_tensors_bit_by_bit(oracles, tmp_path, shape):
    # Nine heads are not for tp 2, so they alone go to 2×1.
    names = [n for n in NAMES if shape.world == 1 or (n == "llama_9heads") == (shape.tp == 1)]
    results = run_ranks(shape.world, errors, shape, [oracles / n for n in names], tmp_path)
    for name in names:
        logits, loss, norm = (
            max(of_rank) for of_rank in zip(*(found[name] for found in results), strict=True)
        )
        print(f"{shape} {name:18s} logits {logits:.1e} loss {loss:.1e} grad_norm {norm:.1e}")
        assert logits <= 1e-4 and loss <= 1e-5 and norm <= 1e-5, name
    for name in names:
        theirs, ours = tensors(oracles / name), tensors(tmp_path / name)
        assert theirs.keys() == ours.keys()
        assert all(torch.equal(t, ours[n]) and t.dtype == ours[n].dtype for n, t in theirs.items()), name
        config = read_config(tmp_path / name)
        assert from_hf(config)[1] == from_hf(read_config(oracles / name))[1]
        assert config["bos_token_id"] == read_config(oracles / name)["bos_token_id"]
        assert (tmp_path / name / "model.safetensors.index.json").exists() == (name == "llama_sharded")


SMALL = LlamaConfig(vocab_size=101, width=48, num_layers=2, num_heads=4, num_kv_heads=2, ffn_width=56)
LLAMA3 = RopeScaling("llama3", 8.0, 1.0, 4.0, 16)
EXPORTED: dict[str, Config] = {
    "llama": SMALL,
    "llama_tied": dataclasses.replace(SMALL, tie_embeddings=True),
    "llama_bias": dataclasses.replace(SMALL, qkv_bias=True, o_bias=True, ffn_bias=True),
    "llama_head_dim": dataclasses.replace(SMALL, head_dim=10, rope_theta=500.0, norm_eps=1e-3),
    "llama_linear": dataclasses.replace(SMALL, rope_scaling=RopeScaling("linear", 4.0)),
    "llama_llama3": dataclasses.replace(SMALL, rope_theta=5e5, rope_scaling=LLAMA3),
    "mistral": dataclasses.replace(SMALL, sliding_window=5),
    "qwen2": dataclasses.replace(SMALL, qkv_bias=True),
    "qwen2_window": dataclasses.replace(SMALL, qkv_bias=True, sliding_window=5),
    "qwen3": dataclasses.replace(SMALL, qk_norm=True),
    "qwen3_bias": dataclasses.replace(SMALL, qk_norm=True, qkv_bias=True, o_bias=True),
    "gpt2": GPT2Config(vocab_size=101, width=48, num_heads=4, ffn_width=56, max_positions=21),
}
IDS = torch.randint(101, (2, 20), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def filled(config: Config) -> nn.Module:
    """A model with large weights, biases and norms, so that a wrong convention shows."""
    model = GPT2(config) if isinstance(config, GPT2Config) else Llama(config)
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / 5 + (parameter.ndim == 1))
    return model


def export(shape: MeshShape, out: Path) -> dict[str, Tensor]:
    """Our logits of each model; each is written below `out`."""
    with launch.world(shape.world, "cpu", 60):
        mesh, found = build_mesh(shape, "cpu"), {}
        for name, config in EXPORTED.items():
            model = filled(config)
            parallelize(model, mesh, plan=model.tp_plan(), units=list(model.blocks))
            with inference(model):
                found[name] = gather_vocab(model(IDS), VocabShard.of(config.vocab_size, mesh["tp"]))
            save_hf(out / name, model, hf_names(model), to_hf(config))
        return found


@pytest.mark.slow
def test_transformers_computes_the_same_from_what_a_mesh_exports(tmp_path):
    transformers = pytest.importorskip("transformers")
    logits = run_ranks(4, export, MeshShape(1, 2, 2), tmp_path)[0]
    for name, ours in logits.items():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype="auto")
        assert theirs.dtype == torch.float32
        with torch.no_grad():
            error = (theirs.eval()(IDS).logits - ours).abs().max().item()
        print(f"{name:16s} {type(theirs).__name__:20s} logits {error:.1e} of {ours.abs().max():.1f}")
        assert error < 1e-4, name
