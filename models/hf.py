"""Hugging Face's words for our models: config.json to and from our configurations, and tensor names.

Pure functions on plain data; parallel2d/hf/weights.py reads and writes the files. What a
config.json asks for and these models do not compute is refused by name, never passed over.
"""

import re
from collections.abc import Mapping
from types import UnionType
from typing import TYPE_CHECKING, Any

from .gpt2_config import GPT2Config
from .hf_tables import FAMILIES, GPT2_PLACES, LLAMA_PLACES, NEEDED, ROPE_KEYS, ROPE_KINDS, Family, Place
from .llama_config import LlamaConfig, RopeScaling

if TYPE_CHECKING:
    from torch import nn

Config = LlamaConfig | GPT2Config


class CannotCarry(ValueError):
    """What a config.json asks for and our models do not compute, or the other way round; a line for each."""


def hf_names(model: "nn.Module") -> dict[str, Place]:
    """{our parameter name: its place} for a Llama or GPT2, parallelized or not, on meta or not.

    A tied head is in it under both of its names.
    """
    table = GPT2_PLACES if isinstance(model.config, GPT2Config) else LLAMA_PLACES
    return {name: _place(table, name) for name, _ in model.named_parameters(remove_duplicate=False)}


def _place(table: Mapping[str, Place], parameter: str) -> Place:
    module, _, leaf = parameter.rpartition(".")
    layer = re.search(r"\.(\d+)\.", module)
    place = table[re.sub(r"\.\d+\.", ".*.", module)]
    tensor = place.tensor.replace("*", layer[1] if layer else "*") + "." + leaf
    return place._replace(tensor=tensor, transpose=place.transpose and leaf == "weight")


def from_hf(config: Mapping[str, Any]) -> "tuple[type[nn.Module], Config]":
    """A config.json -> (model class, our configuration); one CannotCarry with all that we lack."""
    ours = config_from_hf(config)
    # Imported here: `parallel2d plan` reads a config.json and needs no torch.
    from .gpt2 import GPT2
    from .llama import Llama

    return (GPT2 if isinstance(ours, GPT2Config) else Llama), ours


def config_from_hf(config: Mapping[str, Any]) -> Config:
    """A config.json -> our configuration; one CannotCarry with all that we lack.

    Both generations are read: rope_theta with rope_scaling, and rope_parameters.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise CannotCarry(f"model_type {kind!r} is not carried (these are: {', '.join(FAMILIES)})")
    family = FAMILIES[kind]
    _refuse(_problems_of_keys(config, family))
    values = {key: config.get(key, default) for key, (_, default) in family.keys.items()}
    return _read_gpt2(values) if kind == "gpt2" else _read_llama(kind, values)


def _refuse(problems: list[str]) -> None:
    if problems:
        raise CannotCarry("\n".join(problems))


def _problems_of_keys(config: Mapping[str, Any], family: Family) -> list[str]:
    found = []
    if config.get("architectures") not in (None, [], [family.architecture]):
        found.append(f"architectures {config['architectures']!r} is not carried (only {family.architecture})")
    for key, value in config.items():
        if key in family.keys:
            kind, _ = family.keys[key]
            if not _is(value, kind):
                found.append(f"{key} {value!r} is not of type {getattr(kind, '__name__', kind)}")
        elif key in family.fixed:
            if value not in family.fixed[key]:
                found.append(f"{key} {value!r} is not carried (only {family.fixed[key][0]!r})")
        elif key not in family.neutral:
            found.append(f"{key} {value!r} is not known, and may change what the model computes")
    lacking = [k for k, (_, default) in family.keys.items() if default is NEEDED and k not in config]
    return found + ([f"config.json lacks {', '.join(lacking)}"] if lacking else [])


def _is(value: Any, kind: type | UnionType) -> bool:
    """isinstance, but True is no number."""
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _read_gpt2(c: Mapping[str, Any]) -> GPT2Config:
    return GPT2Config(
        vocab_size=c["vocab_size"],
        width=c["n_embd"],
        num_layers=c["n_layer"],
        num_heads=c["n_head"],
        ffn_width=4 * c["n_embd"] if c["n_inner"] is None else c["n_inner"],
        max_positions=c["n_positions"],
        norm_eps=c["layer_norm_epsilon"],
        init_std=c["initializer_range"],
        embedding_dropout=c["embd_pdrop"],
        residual_dropout=c["resid_pdrop"],
        attention_dropout=c["attn_pdrop"],
    )


def _read_llama(kind: str, c: Mapping[str, Any]) -> LlamaConfig:
    # transformers fails on a zero here, and we would take it for "not given".
    zeros = ("head_dim", "num_key_value_heads", "sliding_window")
    _refuse([f"{key} 0 is not positive" for key in zeros if c.get(key) == 0])
    theta, scaling, problems = _read_rope(c)
    window, more = _read_window(kind, c)
    _refuse(problems + more)
    bias, width, heads = c.get("attention_bias", False), c["hidden_size"], c["num_attention_heads"]
    return LlamaConfig(
        vocab_size=c["vocab_size"],
        width=width,
        num_layers=c["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=c["num_key_value_heads"] or heads,
        head_dim=0 if c["head_dim"] is None or c["head_dim"] * heads == width else c["head_dim"],
        ffn_width=c["intermediate_size"],
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=c["rms_norm_eps"],
        init_std=c["initializer_range"],
        tie_embeddings=c["tie_word_embeddings"],
        qkv_bias=bias or kind == "qwen2",
        o_bias=bias,
        ffn_bias=c.get("mlp_bias", False),
        qk_norm=kind == "qwen3",
        sliding_window=window,
    )


def _read_rope(c: Mapping[str, Any]) -> tuple[float, RopeScaling, list[str]]:
    """(theta, scaling, problems) of rope_parameters, or of rope_theta and rope_scaling."""
    old, new = c["rope_scaling"] or {}, c["rope_parameters"] or {}
    rope = {"rope_theta": 10_000.0 if c["rope_theta"] is None else c["rope_theta"]} | old | new
    found = []
    if old and new and old != new:
        found.append(f"rope_scaling {old} and rope_parameters {new}: only one of them can be meant")
    if c["rope_theta"] and rope["rope_theta"] != c["rope_theta"]:
        found.append(
            f"rope_theta {c['rope_theta']} contradicts rope_theta {rope['rope_theta']} of {new or old}"
        )
    kinds = [rope.pop(key) for key in ("rope_type", "type") if key in rope]
    kind = kinds[0] if kinds and kinds == kinds[:1] * len(kinds) else kinds or "default"
    if not isinstance(kind, str) or kind not in ROPE_KEYS:
        return (
            0.0,
            RopeScaling(),
            [*found, f"rope_type {kind!r} is not carried (only {', '.join(ROPE_KEYS)})"],
        )
    if rope.pop("partial_rotary_factor", 1.0) != 1.0:
        found.append(f"partial_rotary_factor of {new or old} is not carried (only 1.0)")
    theta, names = rope.pop("rope_theta"), ROPE_KEYS[kind]
    found += [f"{k} {v!r} of rope_type {kind} is not known" for k, v in rope.items() if k not in names]
    found += [f"rope_type {kind} lacks {key}" for key in names if key not in rope]
    numbers = {"rope_theta": theta, **rope}
    found += [f"{k} {v!r} is not a number" for k, v in numbers.items() if not _is(v, float | int)]
    if found:
        return theta, RopeScaling(), found
    fields = {names[key]: value for key, value in rope.items()}
    return theta, RopeScaling(kind=ROPE_KINDS[kind], **fields), []


def _read_window(kind: str, c: Mapping[str, Any]) -> tuple[int, list[str]]:
    """(sliding window, 0 for none; problems). All layers have it or none has: ours are alike."""
    if kind == "mistral":
        return c["sliding_window"] or 0, []
    if kind == "llama":
        return 0, []
    window = c["sliding_window"] or 0 if c["use_sliding_window"] else 0
    layers, first = c["num_hidden_layers"], c["max_window_layers"] or 0
    full = layers if not window else min(first, layers)
    types = c["layer_types"] or ["full_attention"] * full + ["sliding_attention"] * (layers - full)
    if types == ["full_attention"] * layers:
        return 0, []
    if types == ["sliding_attention"] * layers and window:
        return window, []
    told = {k: c[k] for k in ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")}
    return 0, [f"{told} is not carried: all {layers} layers must be full_attention, or all sliding_attention"]


def to_hf(config: Config, like: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Our configuration -> a config.json, in the older form, which every version of transformers reads.

    Args:
        config: of a Llama or GPT2. One CannotCarry if no Hugging Face model computes it.
        like: the config.json that the weights came from; what changes no logit (token ids, context
            length, …) is taken over from it.
    """
    kind = "gpt2" if isinstance(config, GPT2Config) else _kind_of(config)
    family = FAMILIES[kind]
    kept = {k: v for k, v in (like or {}).items() if k in family.neutral and "dtype" not in k}
    ours = _write_gpt2(config) if isinstance(config, GPT2Config) else _write_llama(config, kind)
    return kept | {"model_type": kind, "architectures": [family.architecture]} | ours


def _kind_of(c: LlamaConfig) -> str:
    """Which of the Hugging Face models computes the same."""
    alike = c.qkv_bias == c.o_bias
    if c.qk_norm and alike and not c.ffn_bias:
        return "qwen3"
    if not c.qk_norm and (c.qkv_bias, c.o_bias, c.ffn_bias) == (True, False, False):
        return "qwen2"
    if not c.qk_norm and c.sliding_window and not (c.qkv_bias or c.o_bias or c.ffn_bias):
        return "mistral"
    if not c.qk_norm and alike and not c.sliding_window:
        return "llama"
    names = ("qkv_bias", "o_bias", "ffn_bias", "qk_norm", "sliding_window")
    told = ", ".join(f"{name} {getattr(c, name)}" for name in names)
    raise CannotCarry(f"neither llama, mistral, qwen2 nor qwen3 computes a Llama with {told}")


def _write_gpt2(c: GPT2Config) -> dict[str, Any]:
    return {
        "vocab_size": c.vocab_size,
        "n_embd": c.width,
        "n_layer": c.num_layers,
        "n_head": c.num_heads,
        "n_inner": c.ffn_width,
        "n_positions": c.max_positions,
        "layer_norm_epsilon": c.norm_eps,
        "initializer_range": c.init_std,
        "embd_pdrop": c.embedding_dropout,
        "resid_pdrop": c.residual_dropout,
        "attn_pdrop": c.attention_dropout,
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
    }


def _write_llama(c: LlamaConfig, kind: str) -> dict[str, Any]:
    window, scaling = c.sliding_window or None, c.rope_scaling
    rope = {theirs: getattr(scaling, ours) for theirs, ours in ROPE_KEYS.get(scaling.kind, {}).items()}
    of_kind: dict[str, dict[str, Any]] = {
        "llama": {"attention_bias": c.qkv_bias, "mlp_bias": c.ffn_bias},
        "mistral": {"sliding_window": window},
        "qwen2": _windows(c),
        "qwen3": _windows(c) | {"attention_bias": c.qkv_bias},
    }
    return of_kind[kind] | {
        "vocab_size": c.vocab_size,
        "hidden_size": c.width,
        "intermediate_size": c.ffn_width,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.key_width,
        "hidden_act": "silu",
        "rms_norm_eps": c.norm_eps,
        "initializer_range": c.init_std,
        "tie_word_embeddings": c.tie_embeddings,
        "rope_theta": c.rope_theta,
        "rope_scaling": None if scaling.kind == "none" else {"rope_type": scaling.kind, **rope},
    }


def _windows(c: LlamaConfig) -> dict[str, Any]:
    """Qwen's way to say that all layers have a sliding window, or none."""
    return {
        "use_sliding_window": c.sliding_window > 0,
        "sliding_window": c.sliding_window or None,
        "max_window_layers": 0 if c.sliding_window else c.num_layers,
    }
