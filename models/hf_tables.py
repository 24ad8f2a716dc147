"""What Hugging Face calls things: tensors, and the keys of a config.json with what they mean to us.

Defaults and meanings are those of transformers' configuration classes
(https://huggingface.co/docs/transformers, `LlamaConfig` and its relatives, `GPT2Config`).
"""

from collections.abc import Mapping
from types import UnionType
from typing import Any, Literal, NamedTuple


class Place(NamedTuple):
    """Where one of our parameters lies in a Hugging Face folder.

    Take the stored tensor, transpose it if `transpose`, cut its dim 0 into `parts` equal pieces: the
    parameter is piece number `part`.
    """

    tensor: str
    transpose: bool = False
    part: int = 0
    parts: int = 1


LLAMA_PLACES = {
    "embedding": Place("model.embed_tokens"),
    "blocks.*.attention_norm": Place("model.layers.*.input_layernorm"),
    "blocks.*.attention.q": Place("model.layers.*.self_attn.q_proj"),
    "blocks.*.attention.k": Place("model.layers.*.self_attn.k_proj"),
    "blocks.*.attention.v": Place("model.layers.*.self_attn.v_proj"),
    "blocks.*.attention.o": Place("model.layers.*.self_attn.o_proj"),
    "blocks.*.attention.q_norm": Place("model.layers.*.self_attn.q_norm"),
    "blocks.*.attention.k_norm": Place("model.layers.*.self_attn.k_norm"),
    "blocks.*.ffn_norm": Place("model.layers.*.post_attention_layernorm"),
    "blocks.*.ffn.gate": Place("model.layers.*.mlp.gate_proj"),
    "blocks.*.ffn.up": Place("model.layers.*.mlp.up_proj"),
    "blocks.*.ffn.down": Place("model.layers.*.mlp.down_proj"),
    "norm": Place("model.norm"),
    "head": Place("lm_head"),
}

# GPT-2 keeps (in, out) weights, and q, k, v in one of them.
GPT2_PLACES = {
    "embedding": Place("transformer.wte"),
    "positions": Place("transformer.wpe"),
    "blocks.*.attention_norm": Place("transformer.h.*.ln_1"),
    "blocks.*.attention.q": Place("transformer.h.*.attn.c_attn", True, 0, 3),
    "blocks.*.attention.k": Place("transformer.h.*.attn.c_attn", True, 1, 3),
    "blocks.*.attention.v": Place("transformer.h.*.attn.c_attn", True, 2, 3),
    "blocks.*.attention.o": Place("transformer.h.*.attn.c_proj", True),
    "blocks.*.ffn_norm": Place("transformer.h.*.ln_2"),
    "blocks.*.ffn.up": Place("transformer.h.*.mlp.c_fc", True),
    "blocks.*.ffn.down": Place("transformer.h.*.mlp.c_proj", True),
    "norm": Place("transformer.ln_f"),
    "head": Place("lm_head"),
}

Key = tuple[type | UnionType, Any]
NEEDED = object()  # no default: config.json must have it

# Keys that carry the mathematics: (type, what transformers assumes without it).
_LLAMA_KEYS: dict[str, Key] = {
    "vocab_size": (int, NEEDED),
    "hidden_size": (int, NEEDED),
    "intermediate_size": (int, NEEDED),
    "num_hidden_layers": (int, NEEDED),
    "num_attention_heads": (int, NEEDED),
    "num_key_value_heads": (int | None, None),
    "head_dim": (int | None, None),
    "rms_norm_eps": (float | int, 1e-6),
    "initializer_range": (float | int, 0.02),
    "tie_word_embeddings": (bool, False),
    "rope_theta": (float | int | None, None),
    "rope_scaling": (dict | None, None),
    "rope_parameters": (dict | None, None),
}
_BIASES: dict[str, Key] = {"attention_bias": (bool, False), "mlp_bias": (bool, False)}
_WINDOWS: dict[str, Key] = {
    "use_sliding_window": (bool, False),
    "sliding_window": (int | None, 4096),
    "max_window_layers": (int | None, 28),
    "layer_types": (list | None, None),
}
_GPT2_KEYS: dict[str, Key] = {
    "vocab_size": (int, 50_257),
    "n_positions": (int, 1024),
    "n_embd": (int, 768),
    "n_layer": (int, 12),
    "n_head": (int, 12),
    "n_inner": (int | None, None),
    "layer_norm_epsilon": (float | int, 1e-5),
    "initializer_range": (float | int, 0.02),
    "embd_pdrop": (float | int, 0.1),
    "resid_pdrop": (float | int, 0.1),
    "attn_pdrop": (float | int, 0.1),
}

# Keys for which we compute one meaning only: the values that have it.
_FIXED: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "auto_map": (None,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "pruned_heads": ({}, None),
}
_LLAMA_FIXED: dict[str, tuple[Any, ...]] = _FIXED | {
    "hidden_act": ("silu", "swish"),
    "attention_dropout": (0.0, None),
    "pretraining_tp": (1, None),
    "partial_rotary_factor": (1.0, None),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
}
_GPT2_FIXED: dict[str, tuple[Any, ...]] = _FIXED | {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "reorder_and_upcast_attn": (False,),
    "tie_word_embeddings": (True,),
}

# Keys that change no logit: names, dtypes of files, token ids, how to generate, heads for other tasks.
_NEUTRAL = frozenset(
    """
    model_type architectures _name_or_path name_or_path transformers_version transformers.js_config
    dtype torch_dtype use_bfloat16 torchscript tf_legacy_loss gradient_checkpointing use_cache output_past
    attn_implementation _attn_implementation _attn_implementation_autoset chunk_size_feed_forward
    bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id mask_token_id decoder_start_token_id
    tokenizer_class prefix task_specific_params finetuning_task problem_type id2label label2id
    num_labels _num_labels is_decoder is_llama_config tie_encoder_decoder cross_attention_hidden_size
    output_attentions output_hidden_states output_scores return_dict return_dict_in_generate
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature
    top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences forced_bos_token_id
    forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens
    begin_suppress_tokens
    """.split()  # noqa: SIM905  (names to read, one after the other)
)
_LLAMA_NEUTRAL = _NEUTRAL | {"max_position_embeddings", "max_sequence_length"}
_GPT2_NEUTRAL = _NEUTRAL | {
    "n_ctx",
    "summary_type",
    "summary_use_proj",
    "summary_activation",
    "summary_proj_to_labels",
    "summary_first_dropout",
}


class Family(NamedTuple):
    architecture: str
    keys: Mapping[str, Key]
    fixed: Mapping[str, tuple[Any, ...]]
    neutral: frozenset[str]


FAMILIES = {
    "llama": Family("LlamaForCausalLM", _LLAMA_KEYS | _BIASES, _LLAMA_FIXED, _LLAMA_NEUTRAL),
    "mistral": Family(
        "MistralForCausalLM",
        _LLAMA_KEYS | {"num_key_value_heads": (int | None, 8), "sliding_window": (int | None, 4096)},
        _LLAMA_FIXED,
        _LLAMA_NEUTRAL,
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        _LLAMA_KEYS | _WINDOWS | {"num_key_value_heads": (int | None, 32)},
        _LLAMA_FIXED,
        _LLAMA_NEUTRAL,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        _LLAMA_KEYS
        | _WINDOWS
        | {"num_key_value_heads": (int | None, 32), "head_dim": (int, 128), "attention_bias": (bool, False)},
        _LLAMA_FIXED,
        _LLAMA_NEUTRAL,
    ),
    "gpt2": Family("GPT2LMHeadModel", _GPT2_KEYS, _GPT2_FIXED, _GPT2_NEUTRAL),
}

# Rotary scalings that we compute: our name; their keys, and the fields of RopeScaling that these are.
ROPE_KINDS: dict[str, Literal["none", "linear", "llama3"]] = {
    "default": "none",
    "linear": "linear",
    "llama3": "llama3",
}
ROPE_KEYS: dict[str, dict[str, str]] = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_context",
    },
}
