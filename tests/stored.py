"""Checkpoints for tests, written block by block without a model, an optimizer or ranks."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from parallel2d.models.gpt2 import GPT2, GPT2Config
from parallel2d.models.llama import Llama, LlamaConfig
from torch import Tensor

from parallel2d.checkpoint.files import DataFile, StoredBlocks, commit
from parallel2d.checkpoint.manifest import Manifest, StoredTensor, read_manifest

LLAMA = LlamaConfig(
    vocab_size=61,
    width=36,
    num_layers=2,
    num_heads=6,
    num_kv_heads=1,
    ffn_width=54,
    tie_embeddings=True,
    qkv_bias=True,
    qk_norm=True,
)
GPT = GPT2Config(vocab_size=61, width=36, num_layers=1, num_heads=6, ffn_width=54, max_positions=17)
CLASSES = {"Llama": Llama, "GPT2": GPT2}


def tensors_of(model: str, config: Any, seed: int = 0) -> dict[str, Tensor]:
    """Weights and Adam's state, random."""
    draw = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        made = CLASSES[model](config)
    tensors = {}
    for name, parameter in made.named_parameters():
        tensors[f"model.{name}"] = torch.randn(parameter.shape, generator=draw)
        tensors[f"optimizer.{name}.exp_avg"] = torch.randn(parameter.shape, generator=draw)
        tensors[f"optimizer.{name}.exp_avg_sq"] = torch.rand(parameter.shape, generator=draw)
        tensors[f"optimizer.{name}.step"] = torch.tensor(7.0)
    return tensors


def write_checkpoint(
    path: Path, tensors: Mapping[str, Tensor], model: str = "Llama", config: Any = LLAMA, parts: int = 3
) -> Path:
    """Rows cut in `parts` blocks, one file each; the last parts may be empty."""
    writing = path.with_name(path.name + ".tmp")
    writing.mkdir(parents=True)
    files = [DataFile(writing / f"__{rank}_0.distcp") for rank in range(parts)]
    stored = {}
    for name, tensor in tensors.items():
        share = -(-len(tensor) // parts) if tensor.ndim else 0
        starts = range(0, len(tensor), share or 1) if tensor.ndim else []
        blocks = [
            file.add(tensor[start : start + share], (start, *[0] * (tensor.ndim - 1)))
            for start, file in zip(starts, files, strict=False)
        ] or [files[0].add(tensor, ())]
        dtype = str(tensor.dtype).removeprefix("torch.")
        stored[name] = StoredTensor(dtype, tuple(tensor.shape), {"dp_shard": 0}, tuple(blocks))
    sizes = {file.path.name: file.close() for file in files}
    mesh = {"dp_replicate": 1, "dp_shard": parts, "tp": 1}
    optimizer = "AdamW" if any(name.startswith("optimizer.") for name in tensors) else ""
    trainer = {"model": asdict(config), "position": 1234}
    versions = {"parallel2d": "0.0.1", "torch": "2.11.0"}
    commit(writing, path, Manifest(200, mesh, versions, model, optimizer, trainer, sizes, stored))
    return path


def llama_checkpoint(path: Path, seed: int = 0, **changed: Tensor) -> Path:
    tensors = tensors_of("Llama", LLAMA, seed)
    return write_checkpoint(path, {**tensors, **{k.replace("__", "."): v for k, v in changed.items()}})


def read_tensors(path: Path) -> dict[str, Tensor]:
    manifest = read_manifest(path)
    with StoredBlocks(path, manifest) as blocks:
        return {name: blocks.read(name) for name in manifest.tensors}


def same_bits(a: Tensor, b: Tensor) -> bool:
    flat = (t.reshape(-1).view(torch.uint8) for t in (a, b))
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(*flat)


def damage(path: Path, name: str = "__1_0.distcp", at: int = 2000) -> None:
    """Change one bit of a file."""
    data = bytearray((path / name).read_bytes())
    data[at] ^= 1
    (path / name).write_bytes(data)
