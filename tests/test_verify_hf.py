"""`parallel2d verify --hf`: results computed elsewhere, by file or by transformers."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from parallel2d.models.hf import hf_names, to_hf
from parallel2d.models.llama import Llama, LlamaConfig
from safetensors.torch import load_file, save_file

from parallel2d import init_weights
from parallel2d.hf.weights import save_hf
from parallel2d.verify.hf import ask_transformers
from tests.ranks import try_ranks
from tests.test_hf import oracles  # noqa: F401  # a fixture
from tests.test_verify import command

KEYS = ("logits_max_abs_err", "loss_rel_err", "grad_norm_rel_err")


def verify(world: int, *arguments: str):
    return try_ranks(world, command, "verify", *arguments)[0]


def test_a_folder_against_a_file(oracles):  # noqa: F811
    folder = oracles / "llama_vocab1003"
    arguments = ("--hf", str(folder), "--expected", str(folder / "expected.npz"), "--json")
    outcome = verify(4, *arguments, "--dp", "2", "--tp", "2")
    assert outcome.exitcode == 0, outcome.stderr
    found = json.loads(outcome.stdout)
    assert found["same"] and found["mesh"] == "2×2"
    assert found["logits_max_abs_err"] <= 1e-4 and all(found[key] <= 1e-5 for key in KEYS[1:])
    assert all(found[key] > 0 for key in KEYS[:1]), "rounding shows that something was compared"


@pytest.fixture
def folder(tmp_path) -> Path:
    """A Hugging Face folder of our own, so that users can run these tests."""
    with torch.device("meta"):
        model = Llama(LlamaConfig(61, 32, 1, 4, 1, 0, 48, qkv_bias=True))
    init_weights(model, torch.device("cpu"), seed=0)
    save_hf(tmp_path / "folder", model, hf_names(model), to_hf(model.config))
    return tmp_path / "folder"


@pytest.mark.slow
def test_a_folder_against_transformers_and_a_wrong_weight_against_it(folder):
    pytest.importorskip("transformers")
    theirs = ask_transformers(folder)
    assert theirs.logits.shape == (2, 33, 61)
    np.savez(folder.parent / "theirs.npz", input_ids=theirs.ids, logits=theirs.logits, loss=theirs.loss)
    command = ("--hf", str(folder), "--expected", str(folder.parent / "theirs.npz"))
    right = verify(4, *command, "--dp", "4", "--json")  # two sequences over four ranks
    assert right.exitcode == 0, right.stderr
    found = json.loads(right.stdout)
    assert found["logits_max_abs_err"] < 1e-5 > found["loss_rel_err"] and found["grad_norm_rel_err"] is None
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] *= 1.01
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    wrong = verify(2, *command, "--tp", "2")
    assert wrong.exitcode == 1, wrong.stderr
    assert "same                False" in wrong.stdout


@pytest.mark.slow
def test_without_a_file_transformers_is_asked(folder):
    pytest.importorskip("transformers")
    outcome = verify(2, "--hf", str(folder), "--tp", "2", "--json")
    assert outcome.exitcode == 0, outcome.stderr
    assert all(json.loads(outcome.stdout)[key] < 1e-5 for key in KEYS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--expected", "nowhere.npz"), "--expected 'nowhere.npz' is not an .npz file"),
        (("--expected", "odd.npz"), "'odd.npz' has no input_ids, but logits"),
        (("--expected", "ids.npz"), "has none of logits, loss, grad_norm"),
        (("--expected", "inf.npz"), "logits that are not finite"),
        (("--expected", "half.npz", "--tp", "2"), "logits of 30 ids: the model's vocabulary has 61"),
        (("--expected", "float.npz"), "input_ids float64[2, 8] are not ids"),
        (("--expected", "far.npz"), "input_ids from 61 to 61: the vocabulary has 61"),
        (
            ("--expected", "short.npz"),
            "input_ids [2, 8], logits [2, 7, 61], not (batch, length[, vocabulary])",
        ),
        (("--dp", "1", "--tp", "3"), "num_heads 4 is not divisible by tp 3: use tp 1, 2, 4"),
        (("--data.seq_len=3",), "unknown with --hf: --data.seq_len=3"),
        (("--steps=2", "--batch=x"), "--batch, --steps does not go with this form"),
    ],
)
def test_mistakes(folder, monkeypatch, arguments, message):
    monkeypatch.chdir(folder)
    ids = np.zeros((2, 8), dtype=np.int64)
    np.savez("odd.npz", logits=ids)
    np.savez("ids.npz", input_ids=ids)
    np.savez("inf.npz", input_ids=ids, logits=np.full((2, 8, 61), np.inf))
    np.savez("half.npz", input_ids=ids, logits=np.zeros((2, 8, 30)))
    np.savez("float.npz", input_ids=ids + 0.9, loss=1.0)
    np.savez("far.npz", input_ids=ids + 61, loss=1.0)
    np.savez("short.npz", input_ids=ids, logits=np.zeros((2, 7, 61), dtype=np.float32))
    outcome = verify(1, "--hf", ".", *arguments)
    assert outcome.exitcode == 2
    assert message in outcome.stderr and "Traceback" not in outcome.stderr


def test_a_config_that_is_not_carried(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_act": "relu"}))
    outcome = verify(1, "--hf", str(folder))
    assert outcome.exitcode == 2 and "hidden_act 'relu' is not carried" in outcome.stderr
