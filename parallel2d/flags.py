"""A configuration from defaults, YAML files and flags; strict, and by jsonargparse."""

import dataclasses
import difflib
import itertools
import keyword
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from jsonargparse import (
    ActionConfigFile,
    ArgumentError,
    ArgumentParser,
    Namespace,
    get_loader,
    set_dumper,
    set_loader,
)

from parallel2d.config import RunConfig
from parallel2d.errors import UserError

AnyConfig = TypeVar("AnyConfig", bound=RunConfig)
_YAML = "recipe"  # our name for YAML with renamed keys, in jsonargparse


def load_config(
    config_class: type[AnyConfig],
    default_file: Path,
    presets: Mapping[str, Any],
    arguments: Sequence[str] | None = None,
) -> AnyConfig:
    """Defaults < preset < default_file < --config files < flags, in that order of strength.

    Args:
        config_class: a RunConfig with a `model` section.
        default_file: the recipe's YAML, always read.
        presets: values of `--model.preset`, each a whole model section.
        arguments: the command line; default sys.argv[1:].
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = _parser(config_class, default_file, presets)
    try:
        _reject_duplicate_keys(default_file, arguments)
        # Two passes: the first finds the preset, whose values are then the second's defaults.
        quiet = [a for a in arguments if a not in ("-h", "--help") and not a.startswith("--print_config")]
        model = parser.parse_args(quiet).model
        preset = model and model.preset
        if preset not in presets:
            raise UserError(f"model.preset {preset!r} is not one of {', '.join(presets)}")
        parser.set_defaults(
            {f"model.{key}": value for key, value in dataclasses.asdict(presets[preset]).items()}
        )
        values = parser.parse_args(arguments)
    except ArgumentError as error:
        raise UserError(_explain(str(error), parser)) from None
    _reject_nulls(values, parser.get_defaults())
    del values["model"]["preset"], values["config"]
    return config_class(**vars(parser.instantiate(values)))


def _reject_nulls(values: Namespace, defaults: Namespace) -> None:
    """`lr:` without a value, or a section that is not one."""
    for key, default in vars(defaults).items():
        value = getattr(values, key, None)
        if default is not None and value is None:
            raise UserError(f"{key} has no value: leave the key out to get its default")
        if isinstance(default, Namespace):
            if not isinstance(value, Namespace):
                raise UserError(f"{key} is {value!r}, not a section with keys of its own")
            _reject_nulls(value, default)


def _parser(config_class: type, default_file: Path, presets: Mapping[str, Any]) -> ArgumentParser:
    set_loader(_YAML, lambda text: _rename(get_loader("yaml")(text), _as_field), (yaml.YAMLError,))
    set_dumper(_YAML, _dump)
    parser = ArgumentParser(
        parser_mode=_YAML,
        exit_on_error=False,
        allow_abbrev=False,
        default_config_files=[str(default_file)],
        description=f"Defaults come from {default_file.name}; --config adds a YAML file on top, flags win.",
    )
    parser.add_argument("--config", action=ActionConfigFile, help="YAML file; may be given several times")
    parser.add_argument(
        "--model.preset",
        default=next(iter(presets)),
        help=f"whole model section to start from: {', '.join(presets)}",
    )
    parser.add_class_arguments(config_class)
    for action in parser._actions:
        action.option_strings = [_as_written(flag) for flag in action.option_strings]
        parser._option_string_actions |= dict.fromkeys(action.option_strings, action)
    return parser


def dump_config(config: RunConfig) -> str:
    """The resolved configuration as YAML that --config reads back."""
    return _dump(dataclasses.asdict(config))


def _dump(values: Any) -> str:
    return yaml.safe_dump(_rename(values, _as_written), sort_keys=False)


# A key that Python reserves, `async`, is a field with an underscore behind it; flags and files do without.
def _as_field(key: str) -> str:
    return f"{key}_" if keyword.iskeyword(key) else key


def _as_written(key: str) -> str:
    short = key.removesuffix("_")
    return short if keyword.iskeyword(short.split(".")[-1]) else key


def _rename(values: Any, rename: Callable[[str], str]) -> Any:
    """The same, with other keys in all sections."""
    if not isinstance(values, dict):
        return values
    return {rename(k) if isinstance(k, str) else k: _rename(v, rename) for k, v in values.items()}


def _explain(message: str, parser: ArgumentParser) -> str:
    """jsonargparse's message, with the nearest known keys where one is unknown."""
    unknown = re.search(
        r"unrecognized arguments: --?([\w.-]+)|Group '([\w.]+)' does not accept option '([\w.]+)'"
        r"|Option '([\w.]+)' is not accepted",
        message,
    )
    if not unknown:
        return message
    section, _, tail = ".".join(part for part in unknown.groups() if part).replace("-", "_").rpartition(".")
    known: dict[str, list[str]] = {}
    for action in parser._actions:
        if action.dest not in ("help", "print_config"):
            known.setdefault(action.dest.split(".")[-1], []).append(action.dest)
    near = [key for close in difflib.get_close_matches(tail, known, n=3) for key in known[close]]
    near = near or [
        key for keys in known.values() for key in keys if section and key.startswith(f"{section}.")
    ]
    return f"{message}\nnearest known keys: {', '.join(near) or 'none'} (all: --help)"


def _reject_duplicate_keys(default_file: Path, arguments: Sequence[str]) -> None:
    """YAML readers keep the last of two equal keys without a word."""
    named = [a.split("=", 1)[1] for a in arguments if a.startswith("--config=")]
    named += [following for a, following in itertools.pairwise(arguments) if a == "--config"]
    for file in (default_file, *map(Path, named)):
        if not file.is_file():
            raise UserError(f"--config {str(file)!r} is not a file")
        try:
            _walk_keys(file, yaml.compose(file.read_text()))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise UserError(f"{file} is not YAML: {error}") from None


def _walk_keys(file: Path, node: yaml.Node | None) -> None:
    if not isinstance(node, yaml.MappingNode):
        return
    seen: set[str] = set()
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise UserError(f"{file}, line {key.start_mark.line + 1}: a key must be a word")
        if key.value in seen:
            raise UserError(f"{file}, line {key.start_mark.line + 1}: key {key.value!r} is given twice")
        seen.add(key.value)
        _walk_keys(file, value)
