"""Hugging Face folders of one process: what is written, what is read, and what is refused by name."""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel2d.models.hf import Config, from_hf, hf_names, to_hf
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from parallel2d import UserError
from parallel2d.hf.weights import load_hf, read_config, save_hf
from tests.test_hf import CPU, EXPORTED, SMALL, filled


def written(folder: Path, config: Config = SMALL, **options: Any) -> nn.Module:
    """A model of one process, and its folder."""
    model = filled(config)
    save_hf(folder, model, hf_names(model), to_hf(config), **options)
    return model


def loaded(folder: Path) -> nn.Module:
    model_class, config = from_hf(read_config(folder))
    with torch.device("meta"):
        model = model_class(config)
    load_hf(folder, model, hf_names(model), CPU)
    return model


def same(ours: nn.Module, theirs: nn.Module) -> bool:
    other = theirs.state_dict()
    return all(torch.equal(value, other[name]) for name, value in ours.state_dict().items())


@pytest.mark.parametrize(
    "config", [SMALL, EXPORTED["llama_tied"], EXPORTED["gpt2"]], ids=["llama", "tied", "gpt2"]
)
def test_a_plain_model_without_a_process_group(tmp_path, config):
    model = written(tmp_path / "a", config)
    again = loaded(tmp_path / "a")
    assert same(model, again)
    assert (again.head.weight is again.embedding.weight) == (config is not SMALL)
    files = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "a").iterdir()}
    (tmp_path / "other").touch()
    assert files == dict.fromkeys(
        ("config.json", "model.safetensors"), stat.S_IMODE((tmp_path / "other").stat().st_mode)
    )
    assert os.listdir(tmp_path) in (["a", "other"], ["other", "a"])


def test_files_are_no_larger_than_asked_for_unless_a_tensor_is(tmp_path):
    model = written(tmp_path / "a", max_shard_bytes=30e3)
    files = [load_file(path) for path in (tmp_path / "a").glob("*.safetensors")]
    assert len(files) > 2
    sizes = [sum(t.numel() * 4 for t in file.values()) for file in files]
    assert all(size <= 30e3 for size in sizes) and sum(sizes) > 150e3
    assert same(model, loaded(tmp_path / "a"))


def test_casts_are_exact_where_they_widen_and_refused_where_they_overflow(tmp_path):
    model = written(tmp_path / "a", dtype=torch.bfloat16)
    assert same(model.bfloat16().float(), loaded(tmp_path / "a"))
    with torch.no_grad():
        model.norm.weight[0] = 1e6
    with pytest.raises(
        UserError, match=r"model\.norm\.weight has numbers that are not finite in torch\.float16"
    ):
        save_hf(tmp_path / "b", model, hf_names(model), to_hf(SMALL), dtype=torch.float16)
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_an_export_never_overwrites(tmp_path):
    (tmp_path / "a").mkdir()
    written(tmp_path / "a")
    with pytest.raises(UserError, match="exists and is not an empty folder"):
        written(tmp_path / "a")


def edit(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    path = folder / "model.safetensors"
    content = load_file(path)
    change(content)
    save_file(content, path)


def test_what_transformers_ignores_is_allowed(tmp_path):
    tied = written(tmp_path / "a", EXPORTED["llama_tied"])
    edit(
        tmp_path / "a",
        lambda t: t.update(
            {
                "lm_head.weight": tied.head.weight.detach().clone(),
                "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
            }
        ),
    )
    assert same(tied, loaded(tmp_path / "a"))
    gpt2 = written(tmp_path / "b", EXPORTED["gpt2"])

    def old_names(t: dict[str, Tensor]) -> None:
        for name in list(t):
            t[name.removeprefix("transformer.")] = t.pop(name)
        t["h.0.attn.bias"] = torch.ones(1, 1, 21, 21)
        t["h.0.attn.masked_bias"] = torch.tensor(-1e4)

    edit(tmp_path / "b", old_names)
    assert same(gpt2, loaded(tmp_path / "b"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"1 missing: model.norm.weight \[48\]"),
        (lambda t: t.update(extra=torch.ones(2)), r"1 unexpected: extra \[2\]"),
        (
            lambda t: t.update({"lm_head.weight": torch.ones(48, 101)}),
            r"1 of another shape: lm_head.weight \[48, 101\] instead of \[101, 48\]",
        ),
        (
            lambda t: [t.pop(n) for n in list(t) if "layers" in n],
            r"18 missing: model.layers.0.input_layernorm.weight \[48\], .*, …$",
        ),
        (lambda t: t.update(b=torch.ones(2, dtype=torch.int8)), "1 tensors are not of F64, .*: b is I8"),
    ],
)
def test_a_folder_of_another_model_is_refused(tmp_path, change, message):
    written(tmp_path / "a")
    edit(tmp_path / "a", change)
    with pytest.raises(UserError, match=message):
        loaded(tmp_path / "a")


def test_a_tie_that_is_none_is_refused(tmp_path):
    written(tmp_path / "a", EXPORTED["llama_tied"])
    edit(tmp_path / "a", lambda t: t.update({"lm_head.weight": torch.zeros(101, 48)}))
    with pytest.raises(UserError, match=r"lm_head\.weight is not equal to model\.embed_tokens\.weight"):
        loaded(tmp_path / "a")


def test_only_the_files_of_the_index_are_read(tmp_path):
    folder = tmp_path / "a"
    model = written(folder, max_shard_bytes=100e3)
    save_file({"model.norm.weight": torch.zeros(48)}, folder / "another.safetensors")
    assert same(model, loaded(folder))
    save_file({"model.norm.weight": torch.zeros(48)}, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"has both model\.safetensors and model\.safetensors\.index\.json"):
        loaded(folder)


def test_a_tensor_in_two_files_of_the_index_is_refused(tmp_path):
    written(tmp_path / "a", max_shard_bytes=100e3)
    last = sorted((tmp_path / "a").glob("model-*.safetensors"))[-1]
    held = load_file(last)
    save_file(held | {"model.embed_tokens.weight": torch.zeros(101, 48)}, last)
    with pytest.raises(UserError, match=r"does not list \['model\.embed_tokens\.weight'\] of"):
        loaded(tmp_path / "a")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: i.clear(), "weight_map must name a file for each tensor"),
        (lambda i: i.update(weight_map={"a": 3}), "weight_map must name a file for each tensor"),
        (lambda i: i["weight_map"].update(x="../x.safetensors"), r"'\.\./x\.safetensors', which is not"),
        (lambda i: i["weight_map"].update(x="/etc/x.safetensors"), "'/etc/x.safetensors', which is not"),
        (lambda i: i["weight_map"].update(x="pytorch_model.bin"), "'pytorch_model.bin', which is not"),
        (lambda i: i["weight_map"].update(x="y.safetensors"), "y.safetensors cannot be read as safetensors"),
        (lambda i: i["weight_map"].update(x="model-00001-of-00002.safetensors"), r"does not hold \['x'\]"),
        (lambda i: i["weight_map"].pop("model.norm.weight"), r"does not list \['model\.norm\.weight'\] of"),
    ],
)
def test_a_damaged_index_is_named(tmp_path, change, message):
    written(tmp_path / "a", max_shard_bytes=100e3)
    path = tmp_path / "a" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))
    with pytest.raises(UserError, match=message):
        loaded(tmp_path / "a")


def test_a_damaged_or_missing_file_is_named(tmp_path):
    written(tmp_path / "a")
    path = tmp_path / "a" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"model\.safetensors cannot be read as safetensors"):
        loaded(tmp_path / "a")
    path.rename(tmp_path / "a" / "pytorch_model.bin")
    with pytest.raises(UserError, match="only safetensors are read, nothing pickled"):
        loaded(tmp_path / "a")
    (tmp_path / "a" / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json is damaged"):
        read_config(tmp_path / "a")
    with pytest.raises(UserError, match=r"config\.json cannot be read: No such file"):
        read_config(tmp_path)


def test_buffers_are_refused(tmp_path):
    model = written(tmp_path / "a")
    model.register_buffer("table", torch.ones(2))
    with pytest.raises(UserError, match="cannot fill the buffers table"):
        load_hf(tmp_path / "a", model, hf_names(model), CPU)
