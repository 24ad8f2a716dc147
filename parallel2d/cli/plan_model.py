"""The model of `parallel2d plan`: a preset, a recipe's YAML, or a Hugging Face config.json. No torch."""

import dataclasses
import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from parallel2d.errors import UserError
from parallel2d.models.hf import CannotCarry, config_from_hf
from parallel2d.models.llama_config import PRESETS, LlamaConfig, RopeScaling
from parallel2d.planner.setup import Formats, NumberFormat

# What recipes/llama_2d.yaml sets where a recipe's own file does not.
_SEQ_LEN, _GLOBAL_BATCH = 128, 16
# The keys of a recipe (`RunConfig`, whose module needs torch; a test compares them).
KEYS = {
    "": [
        "dp",
        "tp",
        "dp_replicate",
        "seed",
        "steps",
        "out",
        "device",
        "activation_checkpoint",
        "compile",
        "async_tp",
        "freeze",
        "timeout_s",
        "ledger",
        "data",
        "optim",
        "precision",
        "fsdp",
        "checkpoint",
        "log",
        "model",
    ],
    "data": ["path", "seq_len", "global_batch", "micro_batch", "val_fraction"],
    "precision": ["param", "compute", "reduce", "output", "cast_inputs", "float8"],
    "fsdp": [
        "reshard_after_forward",
        "offload",
        "forward_prefetch",
        "backward_prefetch",
        "forward_methods",
        "gradient_sync",
    ],
}
_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2}


@dataclass(frozen=True)
class PlannedModel:
    """A model and what the same file says of how it is to be trained; `recipe`: that file, or {}."""

    name: str
    config: LlamaConfig
    recipe: dict[str, Any]


def planned_model(name: str) -> PlannedModel:
    """From what --model says, with one UserError for all that is wrong with it."""
    path = Path(name)
    if name in PRESETS:
        return PlannedModel(name, PRESETS[name], {"model": {"preset": name}})
    if path.is_dir() or path.suffix == ".json":
        return _of_hugging_face(path / "config.json" if path.is_dir() else path)
    if path.suffix in (".yaml", ".yml"):
        return _of_recipe(path)
    near = difflib.get_close_matches(name, PRESETS, n=3, cutoff=0.4) or list(PRESETS)
    raise UserError(
        f"model {name!r} is not known: nearest names: {', '.join(near)} (all: {', '.join(PRESETS)}; or a "
        f"recipe's .yaml, or a Hugging Face config.json)"
    )


def formats_of(precision: dict[str, Any]) -> Formats:
    """Number formats on a GPU, as `PrecisionConfig.dtypes` fills them in."""
    param = precision.get("param") or "float32"
    names = {
        "param": param,
        "compute": precision.get("compute") or ("bfloat16" if param == "float32" else param),
        "reduce": precision.get("reduce") or ("float64" if param == "float64" else "float32"),
    }
    for key, name in names.items():
        if name not in _BYTES:
            raise UserError(f"precision.{key} {name!r} is not one of {', '.join(_BYTES)}")
    return Formats(**{key: NumberFormat(name, _BYTES[name]) for key, name in names.items()})


def _of_hugging_face(path: Path) -> PlannedModel:
    try:
        read = json.loads(_text(path))
        config = config_from_hf(read if isinstance(read, dict) else {})
    except ValueError as error:  # JSONDecodeError, or a number of thousands of digits
        raise UserError(f"{path} is not JSON: {error}") from None
    except CannotCarry as error:
        raise UserError(f"{path}: {error}") from None
    if not isinstance(config, LlamaConfig):
        kind = read["model_type"]
        raise UserError(f"{path}: the formulas are those of Llama and its relatives, not of {kind}")
    return PlannedModel(
        path.resolve().parent.name, _sound(config, path), {"model": dataclasses.asdict(config)}
    )


def _of_recipe(path: Path) -> PlannedModel:
    try:
        recipe = yaml.safe_load(_text(path)) or {}
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not YAML: {error}") from None
    sections = ("model", "data", "precision", "fsdp")
    if not isinstance(recipe, dict) or not all(isinstance(recipe.get(s, {}), dict) for s in sections):
        raise UserError(
            f"{path} is not a recipe: {', '.join(sections)} must be sections with keys of their own"
        )
    _require_known_keys(recipe, path)
    given = dict(recipe.get("model", {}))
    preset = given.pop("preset", "debug")
    if not isinstance(preset, str) or preset not in PRESETS:
        raise UserError(f"{path}: model.preset {preset!r} is not one of {', '.join(PRESETS)}")
    if isinstance(given.get("rope_scaling"), dict):
        given["rope_scaling"] = _replace(RopeScaling(), given["rope_scaling"], f"{path}: model.rope_scaling")
    config = _replace(PRESETS[preset], given, f"{path}: model")
    data = {"seq_len": _SEQ_LEN, "global_batch": _GLOBAL_BATCH} | recipe.get("data", {})
    return PlannedModel(path.stem, _sound(config, path), {**recipe, "data": data})


def _require_known_keys(recipe: dict[str, Any], path: Path) -> None:
    found = [
        _unknown(f"{path}: {section}{'.' * bool(section)}{key}", key, known)
        for section, known in KEYS.items()
        for key in (recipe.get(section, {}) if section else recipe)
        if key not in known
    ]
    if found:
        raise UserError("\n".join(found))


def _unknown(name: str, key: object, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(str(key), known, n=3) or list(known)
    return f"{name} is not known: nearest known keys: {', '.join(near)}"


def _replace(config: Any, values: Mapping[str, Any], where: str) -> Any:
    """dataclasses.replace, strict on names and types."""
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    found = []
    for key, value in values.items():
        if key not in fields:
            found.append(_unknown(f"{where}.{key}", key, fields))
        elif not _is_like(value, fields[key]):
            found.append(f"{where}.{key} {value!r} is not of type {type(fields[key]).__name__}")
    if found:
        raise UserError("\n".join(found))
    return dataclasses.replace(config, **values)


def _is_like(value: Any, default: Any) -> bool:
    if isinstance(default, float):
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is type(default)


def _sound(config: LlamaConfig, path: Path) -> LlamaConfig:
    if problems := config.problems(1):
        raise UserError("\n".join([f"{path} describes no model", *problems]))
    return config


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
