"""`parallel2d checkpoint export-hf` and `import-hf`: a checkpoint to a Hugging Face folder and back."""

import argparse
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from parallel2d.checkpoint.manifest import WEIGHTS, Manifest, read_manifest
from parallel2d.cli.common import PATH, absolute, add_command, found_checkpoint, progress_bar
from parallel2d.cli.models import MODELS, config_of, make_model
from parallel2d.errors import UserError
from parallel2d.hf.companions import companions_of, config_beside, kept_companions, kept_config
from parallel2d.hf.folder import DTYPES, read_config
from parallel2d.hf.offline import export_hf, import_hf
from parallel2d.models.hf import CannotCarry, from_hf, hf_names, to_hf

_AS_STORED = "as-stored"
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}


def add_export_hf(subparsers: Any) -> None:
    """Add the command to argparse's subparsers; its `run` takes the arguments and what they left."""
    parser = add_command(
        subparsers,
        "export-hf",
        _export,
        "write a Hugging Face folder from a checkpoint",
        "Write config.json and safetensors, which transformers reads, from the weights of a "
        "checkpoint of any mesh. One process, no GPU, memory for one block of a tensor. The folder is whole "
        "or not there; every number read is checked, every file written is read again.",
    )
    parser.add_argument("source", metavar="SRC", type=Path, help=PATH)
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


def add_import_hf(subparsers: Any) -> None:
    """Likewise."""
    parser = add_command(
        subparsers,
        "import-hf",
        _import,
        "make a checkpoint from a Hugging Face folder",
        "Make a checkpoint of weights only, at step 0, which any mesh loads, from config.json "
        "and safetensors. One process, no GPU, memory for one block of a tensor. Tokenizer files and "
        "config.json are kept in it for a later export-hf.",
    )
    parser.add_argument("folder", metavar="DIR", help="a Hugging Face folder: config.json and safetensors")
    parser.add_argument("destination", metavar="DST", help="the checkpoint to make: new or empty")
    _add_dtype(parser, "float32")


def _add_dtype(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--dtype",
        choices=[*_DTYPES, _AS_STORED],
        default=default,
        help=f"numbers to write; those that it cannot hold are refused (default: {default})",
    )


def _export(arguments: argparse.Namespace) -> bool:
    if not 0 < arguments.max_shard_bytes < math.inf:
        raise UserError(f"--max-shard-bytes {arguments.max_shard_bytes} is not a size")
    source, folder = found_checkpoint(arguments.source), absolute(arguments.folder)
    manifest = read_manifest(source)
    model = _model_of(source, manifest)
    if arguments.tokenizer:
        beside = Path(arguments.tokenizer)
        companions, like = companions_of(beside), config_beside(beside)
    else:
        companions, like = kept_companions(source, manifest), kept_config(source, manifest)
    try:
        config_json = to_hf(model.config)
        if like.get("model_type") == config_json["model_type"]:
            config_json = to_hf(model.config, like)
    except CannotCarry as error:
        raise UserError(f"{source}: {error}") from None
    to = (folder, model, hf_names(model), config_json)
    dtype, max_bytes = _DTYPES.get(arguments.dtype), arguments.max_shard_bytes
    weights = sum(t.bytes for name, t in manifest.tensors.items() if name.startswith(WEIGHTS))
    with progress_bar("export", weights) as progress:
        kinds = export_hf(source, manifest, *to, companions, dtype, max_bytes, progress)
    numbers = ", ".join(sorted({str(kind.dtype).removeprefix("torch.") for kind in kinds.values()}))
    print(
        f"{source} (step {manifest.step}, {manifest.model}) exported to {folder}\n"
        f"{len(kinds)} tensors, {sum(kind.bytes for kind in kinds.values()):,} bytes, {numbers}\n"
        f"also carried over: {', '.join(file.name for file in companions) or 'no tokenizer files'}"
    )
    return True


def _import(arguments: argparse.Namespace) -> bool:
    folder, destination = Path(arguments.folder), absolute(arguments.destination)
    try:
        model_class, config = from_hf(read_config(folder))
    except CannotCarry as error:
        raise UserError(f"{folder / 'config.json'}: {error}") from None
    if problems := config.problems(1):
        raise UserError("\n".join([f"{folder / 'config.json'} describes no model", *problems]))
    model, _, _ = make_model(model_class.__name__, config)
    # No data was read yet: whatever a run reads, it begins at its start.
    trainer = {"step": 0, "position": 0, "tokens_seen": 0, "data": "", "model": asdict(config)}
    companions = companions_of(folder)
    dtype, names = _DTYPES.get(arguments.dtype), hf_names(model)
    with progress_bar("import", sum(p.nbytes for p in model.parameters())) as progress:
        manifest = import_hf(folder, destination, model, names, trainer, companions, dtype, progress=progress)
    tensors = manifest.tensors.values()
    print(
        f"{folder} ({manifest.model}) imported into {destination}\n"
        f"{len(tensors)} tensors, {sum(t.bytes for t in tensors):,} bytes, "
        f"{', '.join(sorted({t.dtype for t in tensors}))}\n"
        f"also kept: {', '.join(file.name for file in companions) or 'no tokenizer files'}"
    )
    return True


def _model_of(source: Path, manifest: Manifest) -> nn.Module:
    """The checkpoint's model, on meta."""
    if manifest.model not in MODELS:
        raise UserError(
            f"{source} holds a {manifest.model!r}, for which there is no Hugging Face model "
            f"(only for {', '.join(MODELS)})"
        )
    config = config_of(manifest.model, manifest.trainer.get("model"))
    if problems := config.problems(1):
        raise UserError("\n".join([f"{source} describes no model", *problems]))
    model, _, _ = make_model(manifest.model, config)
    return model
