"""`parallel2d checkpoint export-hf` and `import-hf`: a checkpoint to a Hugging Face folder and back."""

import argparse
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm  # type: ignore[import-untyped]  # it has no types of its own

from parallel2d.checkpoint.hf_companions import companions_of, config_beside, kept_companions, kept_config
from parallel2d.checkpoint.hf_files import DTYPES, read_config
from parallel2d.checkpoint.hf_offline import export_hf, import_hf
from parallel2d.checkpoint.manifest import MANIFEST_FILE, Manifest, read_manifest
from parallel2d.errors import UserError
from parallel2d.models.gpt2 import GPT2, GPT2Config
from parallel2d.models.hf import CannotCarry, Config, from_hf, hf_names, to_hf
from parallel2d.models.llama import Llama, LlamaConfig

_CLASSES: dict[str, tuple[type[nn.Module], type[Config]]] = {
    "Llama": (Llama, LlamaConfig),
    "GPT2": (GPT2, GPT2Config),
}
_AS_STORED = "as-stored"
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}


def add_export_hf(subparsers: Any) -> None:
    """Add the command to argparse's subparsers; its `run` takes the arguments and what they left."""
    parser = subparsers.add_parser(
        "export-hf",
        allow_abbrev=False,
        help="write a Hugging Face folder from a checkpoint",
        description="Write config.json and safetensors, which transformers reads, from the weights of a "
        "checkpoint of any mesh. One process, no GPU, memory for one block of a tensor. The folder is whole "
        "or not there; every number read is checked, every file written is read again.",
    )
    parser.add_argument("source", metavar="SRC", help="a checkpoint")
    parser.add_argument("folder", metavar="DIR", help="the folder to make: new or empty")
    _add_dtype(parser, _AS_STORED)
    parser.add_argument(
        "--max-shard-bytes",
        type=float,
        default=5e9,
        metavar="N",
        help="size of a safetensors file, unless one tensor is larger (default: 5e9)",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="FROM_DIR",
        help="where to copy tokenizer and generation files from, and what config.json says of token ids "
        "and context length (default: what import-hf kept in the checkpoint, if anything)",
    )
    parser.set_defaults(run=_export)


def add_import_hf(subparsers: Any) -> None:
    """Likewise."""
    parser = subparsers.add_parser(
        "import-hf",
        allow_abbrev=False,
        help="make a checkpoint from a Hugging Face folder",
        description="Make a checkpoint of weights only, at step 0, which any mesh loads, from config.json "
        "and safetensors. One process, no GPU, memory for one block of a tensor. Tokenizer files and "
        "config.json are kept in it for a later export-hf.",
    )
    parser.add_argument("folder", metavar="DIR", help="a Hugging Face folder: config.json and safetensors")
    parser.add_argument("destination", metavar="DST", help="the checkpoint to make: new or empty")
    _add_dtype(parser, "float32")
    parser.set_defaults(run=_import)


def _add_dtype(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--dtype",
        choices=[*_DTYPES, _AS_STORED],
        default=default,
        help=f"numbers to write; those that it cannot hold are refused (default: {default})",
    )


def _export(arguments: argparse.Namespace, rest: list[str]) -> bool:
    _refuse(rest, "export-hf")
    if not 0 < arguments.max_shard_bytes < math.inf:
        raise UserError(f"--max-shard-bytes {arguments.max_shard_bytes} is not a size")
    source, folder = Path(arguments.source), _absolute(arguments.folder)
    if not (source / MANIFEST_FILE).exists():
        raise UserError(f"{source} is not a checkpoint: it has no {MANIFEST_FILE}")
    manifest = read_manifest(source)
    model_class, config = _model_of(source, manifest)
    if arguments.tokenizer:
        beside = Path(arguments.tokenizer)
        companions, like = companions_of(beside), config_beside(beside)
    else:
        companions, like = kept_companions(source, manifest), kept_config(source, manifest)
    try:
        config_json = to_hf(config)
        if like.get("model_type") == config_json["model_type"]:
            config_json = to_hf(config, like)
    except CannotCarry as error:
        raise UserError(f"{source}: {error}") from None
    model = _on_meta(model_class, config)
    to = (folder, model, hf_names(model), config_json)
    dtype, max_bytes = _DTYPES.get(arguments.dtype), arguments.max_shard_bytes
    with _progress() as bar:
        kinds = export_hf(source, manifest, *to, companions, dtype, max_bytes, bar.update)
    numbers = ", ".join(sorted({str(kind.dtype).removeprefix("torch.") for kind in kinds.values()}))
    print(
        f"{source} (step {manifest.step}, {manifest.model}) exported to {folder}\n"
        f"{len(kinds)} tensors, {sum(kind.bytes for kind in kinds.values()):,} bytes, {numbers}\n"
        f"also carried over: {', '.join(file.name for file in companions) or 'no tokenizer files'}"
    )
    return True


def _import(arguments: argparse.Namespace, rest: list[str]) -> bool:
    _refuse(rest, "import-hf")
    folder, destination = Path(arguments.folder), _absolute(arguments.destination)
    try:
        model_class, config = from_hf(read_config(folder))
    except CannotCarry as error:
        raise UserError(f"{folder / 'config.json'}: {error}") from None
    if problems := config.problems(1):
        raise UserError("\n".join([f"{folder / 'config.json'} describes no model", *problems]))
    model = _on_meta(model_class, config)
    # No data was read yet: whatever a run reads, it begins at its start.
    trainer = {"step": 0, "position": 0, "tokens_seen": 0, "data": "", "model": asdict(config)}
    companions = companions_of(folder)
    dtype, names = _DTYPES.get(arguments.dtype), hf_names(model)
    with _progress() as bar:
        manifest = import_hf(
            folder, destination, model, names, trainer, companions, dtype, progress=bar.update
        )
    tensors = manifest.tensors.values()
    print(
        f"{folder} ({manifest.model}) imported into {destination}\n"
        f"{len(tensors)} tensors, {sum(t.bytes for t in tensors):,} bytes, "
        f"{', '.join(sorted({t.dtype for t in tensors}))}\n"
        f"also kept: {', '.join(file.name for file in companions) or 'no tokenizer files'}"
    )
    return True


def _refuse(rest: list[str], command: str) -> None:
    if rest:
        raise UserError(f"unknown: {' '.join(rest)} (see parallel2d checkpoint {command} --help)")


def _absolute(name: str) -> Path:
    """Of a folder to make: `.` has no name that a temporary one could be made of."""
    return Path(os.path.abspath(name))


def _on_meta(model_class: type[nn.Module], config: Config) -> nn.Module:
    with torch.device("meta"):
        return model_class(config)


def _progress() -> Any:
    """A bar on a terminal, nothing elsewhere."""
    return tqdm(unit="B", unit_scale=True, file=sys.stderr, disable=None, leave=False)


def _model_of(source: Path, manifest: Manifest) -> tuple[type[nn.Module], Config]:
    """The class of a checkpoint's model, and its configuration."""
    if manifest.model not in _CLASSES:
        raise UserError(
            f"{source} holds a {manifest.model!r}, for which there is no Hugging Face model "
            f"(only for {', '.join(_CLASSES)})"
        )
    model_class, config_class = _CLASSES[manifest.model]
    config = _from_json(config_class, manifest.trainer.get("model"), f"{source}: model")
    if problems := config.problems(1):
        raise UserError("\n".join([f"{source} describes no model", *problems]))
    return model_class, config


def _from_json(config_class: type[Any], content: Any, where: str) -> Any:
    """The dataclass of which asdict made this; all its fields have defaults."""
    if not isinstance(content, Mapping):
        raise UserError(f"{where} is not a configuration, but {content!r}")
    names = {field.name for field in fields(config_class)}
    if names != content.keys():
        lacking, unknown = sorted(names - content.keys()), sorted(content.keys() - names)
        raise UserError(
            f"{where} is not a {config_class.__name__} of this version: lacks {lacking}, has {unknown}"
        )
    values, defaults = {}, config_class()
    for name, value in content.items():
        default = getattr(defaults, name)
        if is_dataclass(default):
            values[name] = _from_json(type(default), value, f"{where}.{name}")
        elif type(value) is type(default) or (type(value) is int and type(default) is float):
            values[name] = value
        else:
            raise UserError(f"{where}.{name} {value!r} is not of type {type(default).__name__}")
    return config_class(**values)
