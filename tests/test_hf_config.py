"""config.json to our configurations and back: both generations, and every refusal by name."""

from typing import Any

import pytest
import torch
from parallel2d.models.gpt2 import GPT2, GPT2Config
from parallel2d.models.hf import CannotCarry, from_hf, hf_names, to_hf
from parallel2d.models.llama import Llama, LlamaConfig
from parallel2d.models.rope import RopeScaling

LLAMA = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
}
QWEN = LLAMA | {"model_type": "qwen2", "num_key_value_heads": 4}
GPT2_JSON = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 8}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def ours(**more: Any) -> Any:
    return from_hf(LLAMA | more)[1]


def test_what_config_json_leaves_out_is_what_transformers_assumes():
    plain = LlamaConfig(256, 64, 2, 8, 8, 0, 160, norm_eps=1e-6)
    assert from_hf(LLAMA) == (Llama, plain)
    mistral = from_hf(LLAMA | {"model_type": "mistral"})[1]
    assert (mistral.num_kv_heads, mistral.sliding_window) == (8, 4096)
    qwen3 = from_hf(QWEN | {"model_type": "qwen3"})[1]
    assert (qwen3.head_dim, qwen3.qk_norm, qwen3.qkv_bias, qwen3.sliding_window) == (128, True, False, 0)
    qwen2 = from_hf(QWEN)[1]
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.num_kv_heads, qwen2.sliding_window) == (True, False, 4, 0)
    dropouts = dict.fromkeys(("embedding_dropout", "residual_dropout", "attention_dropout"), 0.1)
    assert from_hf(GPT2_JSON) == (GPT2, GPT2Config(50_257, 64, 2, 8, 256, 1024, **dropouts))


@pytest.mark.parametrize(
    ("more", "theta", "scaling"),
    [
        ({"rope_theta": 5e5}, 5e5, RopeScaling()),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, 5e5, RopeScaling()),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 1e4, RopeScaling("linear", 4.0)),
        (
            {"rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 4}},
            1e4,
            RopeScaling("linear", 4),
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            5e5,
            RopeScaling("llama3", 8.0, 1.0, 4.0, 16),
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
            5e5,
            RopeScaling("llama3", 8.0, 1.0, 4.0, 16),
        ),
        ({"rope_theta": 7.0, "rope_parameters": {"rope_type": "default"}}, 7.0, RopeScaling()),
    ],
)
def test_both_generations_of_rope(more, theta, scaling):
    found = ours(**more)
    assert (found.rope_theta, found.rope_scaling) == (theta, scaling)
    assert from_hf(to_hf(found))[1] == found


@pytest.mark.parametrize(
    ("base", "more", "message"),
    [
        (LLAMA, {"model_type": "gemma"}, "model_type 'gemma' is not carried (these are: llama, mistral,"),
        (LLAMA, {"architectures": ["LlamaForSequenceClassification"]}, "only LlamaForCausalLM"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act 'gelu' is not carried (only 'silu')"),
        (LLAMA, {"attention_dropout": 0.1}, "attention_dropout 0.1 is not carried"),
        (LLAMA, {"pretraining_tp": 2}, "pretraining_tp 2 is not carried"),
        (LLAMA, {"quantization_config": {"bits": 4}}, "quantization_config {'bits': 4} is not carried"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not carried"),
        (LLAMA, {"auto_map": {}}, "auto_map {} is not carried"),
        (LLAMA, {"sliding_window": 8}, "sliding_window 8 is not known, and may change"),
        (LLAMA, {"logit_scale": 2.0}, "logit_scale 2.0 is not known, and may change what the model computes"),
        (LLAMA, {"num_hidden_layers": "2"}, "num_hidden_layers '2' is not of type int"),
        (LLAMA, {"hidden_size": None}, "hidden_size None is not of type int"),
        (LLAMA, {"vocab_size": True}, "vocab_size True is not of type int"),
        (LLAMA, {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type 'yarn' is not carried"),
        (LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_type 'dynamic' is not carried"),
        (LLAMA, {"rope_parameters": {"full_attention": {}}}, "full_attention {} of rope_type default is not"),
        (LLAMA, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_type llama3 lacks low_freq"),
        (LLAMA, {"rope_scaling": {"type": "linear", "factor": "4"}}, "factor '4' is not a number"),
        (LLAMA, {"rope_scaling": {"type": "linear", "rope_type": "llama3"}}, "is not carried"),
        (LLAMA, {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor of"),
        (LLAMA, {"rope_theta": 1.0, "rope_parameters": {"rope_theta": 2.0}}, "rope_theta 1.0 contradicts"),
        (
            LLAMA,
            {"rope_scaling": {"factor": 2.0}, "rope_parameters": {"rope_type": "linear", "factor": 4.0}},
            "only one of them can be meant",
        ),
        (
            LLAMA,
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 5e5}},
            "only one of them can be meant",
        ),
        (LLAMA, {"model_type": ["llama"]}, "model_type ['llama'] is not carried"),
        (LLAMA, {"rope_scaling": {"rope_type": ["linear"]}}, "rope_type ['linear'] is not carried"),
        (LLAMA, {"rope_parameters": {"rope_theta": None}}, "rope_theta None is not a number"),
        (LLAMA, {"head_dim": 0}, "head_dim 0 is not positive"),
        (QWEN, {"mlp_bias": True}, "mlp_bias True is not known"),
        (QWEN, {"use_sliding_window": True, "max_window_layers": 1}, "all 2 layers must be full_attention"),
        (QWEN, {"layer_types": ["full_attention", "chunked"]}, "all 2 layers must be"),
        (QWEN, {"layer_types": ["sliding_attention"] * 2}, "is not carried: all 2 layers"),
        (QWEN, {"layer_types": ["full_attention"] * 3}, "is not carried: all 2 layers"),
        (GPT2_JSON, {"activation_function": "relu"}, "activation_function 'relu' is not carried"),
        (GPT2_JSON, {"scale_attn_weights": False}, "scale_attn_weights False is not carried"),
        (GPT2_JSON, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True"),
        (GPT2_JSON, {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn True is not carried"),
        (GPT2_JSON, {"add_cross_attention": True}, "add_cross_attention True is not carried"),
        (GPT2_JSON, {"tie_word_embeddings": False}, "tie_word_embeddings False is not carried"),
    ],
)
def test_what_we_lack_is_refused_by_name(base, more, message):
    from_hf(base)
    with pytest.raises(CannotCarry) as caught:
        from_hf(base | more)
    assert message in str(caught.value)


def test_all_refusals_come_at_once():
    with pytest.raises(CannotCarry) as caught:
        from_hf({"model_type": "llama", "vocab_size": 3, "hidden_act": "relu", "mlp_bias": 3, "what": None})
    assert str(caught.value).splitlines() == [
        "hidden_act 'relu' is not carried (only 'silu')",
        "mlp_bias 3 is not of type bool",
        "what None is not known, and may change what the model computes",
        "config.json lacks hidden_size, intermediate_size, num_hidden_layers, num_attention_heads",
    ]


@pytest.mark.parametrize(
    ("more", "window"),
    [
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, 8),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 28}, 0),
        ({"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0}, 0),
        ({"use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention"] * 2}, 8),
        ({"layer_types": ["full_attention"] * 2, "sliding_window": None}, 0),
    ],
)
def test_a_window_of_all_layers_or_of_none(more, window):
    found = from_hf(QWEN | more)[1]
    assert found.sliding_window == window
    assert from_hf(to_hf(found))[1] == found


def test_what_no_hugging_face_model_computes_is_refused():
    with pytest.raises(CannotCarry, match="qkv_bias True, o_bias False, ffn_bias True, qk_norm False"):
        to_hf(LlamaConfig(qkv_bias=True, ffn_bias=True))


def test_what_changes_no_logit_is_kept():
    like = LLAMA | {"eos_token_id": [2, 3], "max_position_embeddings": 77, "torch_dtype": "float16"}
    written = to_hf(from_hf(like)[1], like=like)
    assert (written["eos_token_id"], written["max_position_embeddings"]) == ([2, 3], 77)
    assert "torch_dtype" not in written and "pretraining_tp" not in written


def test_names_cover_every_parameter_once():
    for config in (LlamaConfig(qkv_bias=True, o_bias=True, ffn_bias=True, qk_norm=True), GPT2Config()):
        with torch.device("meta"):
            model = GPT2(config) if isinstance(config, GPT2Config) else Llama(config)
        names = hf_names(model)
        assert names.keys() == {n for n, _ in model.named_parameters(remove_duplicate=False)}
        assert len({(place.tensor, place.part) for place in names.values()}) == len(names)
    assert names["blocks.1.attention.k.weight"] == ("transformer.h.1.attn.c_attn.weight", True, 1, 3)
    assert names["blocks.1.attention.k.bias"] == ("transformer.h.1.attn.c_attn.bias", False, 1, 3)
    assert names["head.weight"] == ("lm_head.weight", False, 0, 1)
