"""Models by name: the project's own, from a stored configuration, and a user's, from MODULE:CALLABLE."""

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from jsonargparse import ArgumentError, ArgumentParser

from parallel2d.errors import UserError
from parallel2d.models.gpt2 import GPT2, GPT2Config
from parallel2d.models.llama import Llama, LlamaConfig
from parallel2d.verify.trial import Model, require_model

# Class and configuration, by the name that a checkpoint has for the class.
MODELS: Mapping[str, tuple[type[Any], type[Any]]] = {
    "Llama": (Llama, LlamaConfig),
    "GPT2": (GPT2, GPT2Config),
}


def config_of(model: str, stored: Any) -> Any:
    """The configuration that a checkpoint of one of MODELS was trained with, from its JSON."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(MODELS[model][1])
    try:
        if not isinstance(stored, dict):
            raise TypeError("it is no JSON object")
        values = parser.parse_object(stored)
    except (ArgumentError, TypeError) as error:
        raise UserError(
            f"the checkpoint's trainer state has no model configuration of a {model} ({error}): "
            f"give the model with --model MODULE:CALLABLE"
        ) from None
    return MODELS[model][1](**vars(parser.instantiate(values)))


def make_model(model: str, config: Any) -> Model:
    """One of MODELS without its values, its plan and its units."""
    with torch.device("meta"):
        made = MODELS[model][0](config)
    return made, made.tp_plan(), list(made.blocks)


def make_users_model(name: str) -> Model:
    """What MODULE:CALLABLE returns, without values: it is called under torch.device("meta")."""
    with torch.device("meta"):
        return require_model(import_callable(name)())


def import_callable(name: str) -> Callable[..., Any]:
    """MODULE:CALLABLE, from the current folder or installed."""
    module_name, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except ModuleNotFoundError as error:
        if error.name and not module_name.startswith(error.name):
            raise
        raise UserError(f"{name!r}: there is no module {module_name!r} here or installed") from None
    except (AttributeError, ValueError, TypeError):
        raise UserError(f"{name!r} is not MODULE:CALLABLE of something that exists") from None
    if not callable(found):
        raise UserError(f"{name!r} is a {type(found).__name__}, not a callable")
    return found
