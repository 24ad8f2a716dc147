"""`parallel2d verify`: a recipe's configuration, a Hugging Face folder, or one's own model."""

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel2d import launch
from parallel2d.cli.models import import_callable
from parallel2d.compile import async_tp_problems, compile_problems
from parallel2d.config import RunConfig
from parallel2d.data import Corpus, load_tokens
from parallel2d.errors import UserError
from parallel2d.flags import load_config
from parallel2d.freeze import freeze
from parallel2d.fsdp import Precision
from parallel2d.hf.weights import load_hf, read_config
from parallel2d.mesh import MeshShape, build_mesh, choose_mesh
from parallel2d.models.hf import CannotCarry, from_hf, hf_names
from parallel2d.models.llama import PRESETS, Llama, LlamaConfig
from parallel2d.parallelize import parallelize
from parallel2d.verify.compare import verify
from parallel2d.verify.hf import ask_transformers, compare, read_expected
from parallel2d.verify.report import finite
from parallel2d.verify.trial import Model, Trial, make_template, random_targets

_TIMEOUT_S = 600.0


def add_verify(commands: Any) -> None:
    """Add the command to argparse's subparsers; its `run` takes the arguments and what they left."""
    parser = commands.add_parser(
        "verify",
        allow_abbrev=False,
        usage="parallel2d verify (--config FILE [recipe flags] | --hf DIR | MODULE:CALLABLE --batch BATCH) "
        "[options]",
        help="compare a mesh with one process",
        description="Run a model on one process and on a dp × tp mesh of gloo workers on this machine's "
        "CPU, compare, and exit with 0 where they agree, 1 where they differ, 2 for a mistake of input. "
        "MODULE:CALLABLE is your own and returns (model, plan, units), as parallelize takes them.",
    )
    parser.add_argument(
        "--batch",
        help="for your own model: tokens:BATCH,LENGTH,VOCABULARY or floats:BATCH,SIZE,… or MODULE:CALLABLE, "
        "called with the step, that returns (inputs, targets) or inputs",
    )
    parser.add_argument("--config", action="append", help="a recipe's YAML; the recipe's flags may follow")
    parser.add_argument("--hf", metavar="DIR", help="a Hugging Face folder: config.json and safetensors")
    parser.add_argument(
        "--expected",
        metavar="FILE",
        help="for --hf: .npz with input_ids and any of logits, loss, grad_norm (default: ask transformers)",
    )
    parser.add_argument("--dp", type=int, help="data-parallel ranks (default: the configuration's, or 1)")
    parser.add_argument("--tp", type=int, help="tensor-parallel ranks (default: likewise)")
    parser.add_argument("--dp_replicate", type=int, help="replicas among the dp ranks (default: likewise)")
    parser.add_argument("--steps", type=int, help="optimizer updates (default 3; not for --hf)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=_verify)


def _verify(arguments: argparse.Namespace, rest: list[str]) -> bool:
    if arguments.hf:
        _refuse(arguments, "config", "batch", "steps")
        return _verify_hf(arguments, rest)
    _refuse(arguments, *(["batch", "expected"] if arguments.config else ["expected"]))
    arguments.steps = 3 if arguments.steps is None else arguments.steps
    if arguments.steps < 1:
        raise UserError(f"--steps {arguments.steps} is not positive")
    trial, shape = _configured(arguments, rest) if arguments.config else _own(arguments, rest)
    with launch.world(shape.world, "cpu", _TIMEOUT_S):
        report = verify(trial, build_mesh(shape, "cpu"), str(shape))
        if dist.get_rank() == 0:
            print(json.dumps(report.as_dict(), indent=1) if arguments.json else report, flush=True)
    return report.same


def _refuse(arguments: argparse.Namespace, *names: str) -> None:
    """Flags that mean nothing in this form of the command."""
    strange = [f"--{name}" for name in names if getattr(arguments, name) is not None]
    if strange:
        raise UserError(f"{', '.join(strange)} does not go with this form (see parallel2d verify --help)")


@dataclass(frozen=True)
class LlamaRun(RunConfig):
    """The schema of recipes/llama_2d.yaml."""

    model: LlamaConfig = field(default_factory=LlamaConfig)


def _configured(arguments: argparse.Namespace, rest: list[str]) -> tuple[Trial, MeshShape]:
    """The configured Llama, batch, optimizer and data, on the configured mesh."""
    first, *more = arguments.config
    given = {name: getattr(arguments, name) for name in ("dp", "tp", "dp_replicate", "steps")}
    flags = [f"--config={file}" for file in more]
    flags += [f"--{name}={value}" for name, value in given.items() if value is not None]
    config = load_config(LlamaRun, Path(first), PRESETS, [*rest, *flags])
    shape = _mesh(
        *config.sizes,
        lambda s: (
            config.problems(s.dp, s.tp)
            + config.model.problems(s.tp)
            + config.fsdp.problems(Llama, s.dp_shard, s.tp, "cpu")
            + (compile_problems() if config.compile else [])
            + (async_tp_problems(config.compile, s.tp, "cpu") if config.async_tp else [])
        ),
    )
    data, optim = config.data, config.optim
    corpus = Corpus(
        load_tokens(data.path), data.seq_len, config.model.vocab_size, data.val_fraction, config.seed
    )
    firsts = [step * data.global_batch for step in range(config.steps)]

    def make() -> Model:
        with torch.device("meta"):
            model = Llama(config.model)
        freeze(model, config.freeze)
        return model, model.tp_plan(), list(model.blocks)

    trial = Trial(
        make_template(make),
        [corpus.train_batch(range(first, first + data.global_batch)) for first in firsts],
        options={
            "activation_checkpoint": config.activation_checkpoint,
            "compile": config.compile,
            "fsdp": config.fsdp.policy(),
        },
        micro_batch=data.micro_batch,
        gradient_sync=config.fsdp.gradient_sync,
        optimizer=(optim.lr, (optim.beta1, optim.beta2), optim.weight_decay),
        max_norm=optim.max_norm,
        seed=config.seed,
    )
    return trial, shape


def _own(arguments: argparse.Namespace, rest: list[str]) -> tuple[Trial, MeshShape]:
    if len(rest) != 1 or ":" not in rest[0]:
        raise UserError(
            f"give --config FILE, --hf DIR or one MODULE:CALLABLE, not {' '.join(rest) or 'neither'} "
            f"(see parallel2d verify --help)"
        )
    if not arguments.batch:
        raise UserError("your own model needs --batch, for example --batch tokens:8,32,256")
    template = make_template(import_callable(rest[0]))
    batches = [_batch(arguments.batch, step, template[0]) for step in range(arguments.steps)]
    shape = _mesh(*_given_mesh(arguments), lambda _: [])
    return Trial(template, batches, options={}), shape


def _verify_hf(arguments: argparse.Namespace, rest: list[str]) -> bool:
    """Our model with the folder's weights against the expected arrays or transformers."""
    if rest:
        raise UserError(f"unknown with --hf: {' '.join(rest)} (see parallel2d verify --help)")
    folder = Path(arguments.hf)
    try:
        model_class, config = from_hf(read_config(folder))
    except CannotCarry as error:
        raise UserError(f"{folder / 'config.json'}: {error}") from None
    shape = _mesh(*_given_mesh(arguments), lambda s: config.problems(s.tp))
    expected = read_expected(Path(arguments.expected)) if arguments.expected else ask_transformers(folder)
    expected.require_vocabulary(config.vocab_size)
    length, longest = expected.padded_length(shape.tp), getattr(config, "max_positions", math.inf)
    if length > longest:
        raise UserError(f"{length} positions (padded for tp {shape.tp}) are more than the model's {longest}")
    with launch.world(shape.world, "cpu", _TIMEOUT_S) as device:
        mesh = build_mesh(shape, "cpu")
        with torch.device("meta"):
            model = model_class(config)
        precision = Precision(expected.dtype, expected.dtype, expected.dtype)
        parallelize(model, mesh, plan=model.tp_plan(), units=list(model.blocks), precision=precision)
        load_hf(folder, model, hf_names(model), device)
        model.eval()
        found = {
            "folder": str(folder),
            "mesh": str(shape),
            **compare(model, config.vocab_size, expected, mesh),
        }
        if dist.get_rank() == 0:
            text = "\n".join(f"{key:20}{value}" for key, value in found.items())
            print(json.dumps(finite(found), indent=1) if arguments.json else text, flush=True)
    return bool(found["same"])


def _given_mesh(arguments: argparse.Namespace) -> tuple[int, int, int]:
    """dp, tp and dp_replicate, 1 where not given."""
    dp, tp, replicas = (1 if v is None else v for v in (arguments.dp, arguments.tp, arguments.dp_replicate))
    return dp, tp, replicas


def _mesh(dp: int, tp: int, dp_replicate: int, problems: Callable[[MeshShape], list[str]]) -> MeshShape:
    world = launch.planned_world(dp, tp, dp_replicate, "cpu")
    return choose_mesh(dp, tp, dp_replicate, world, problems)


def _batch(spec: str, step: int, model: nn.Module) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a step, by specification or by the user's callable."""
    kind, _, sizes = spec.partition(":")
    made = _drawn(spec, kind, sizes, step) if kind in ("tokens", "floats") else import_callable(spec)(step)
    inputs, targets = made if isinstance(made, tuple) else (made, None)
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    return inputs, random_targets(model, inputs, step) if targets is None else targets


def _drawn(spec: str, kind: str, sizes: str, step: int) -> Tensor | tuple[Tensor, Tensor]:
    shape = [int(size) for size in sizes.split(",") if size.isdigit()]
    if len(shape) != len(sizes.split(",")) or 0 in shape or (kind == "tokens" and len(shape) != 3):
        raise UserError(f"--batch {spec!r} is neither tokens:BATCH,LENGTH,VOCABULARY nor floats:BATCH,SIZE,…")
    generator = torch.Generator().manual_seed(step)
    if kind == "floats":
        return torch.randn(shape, generator=generator)
    rows, length, vocabulary = shape
    ids = torch.randint(vocabulary, (rows, length + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]
