"""parallel2d checkpoint show, verify, diff: what they print, and how they exit."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from parallel2d.models.llama import PRESETS

from parallel2d import UserError
from parallel2d.checkpoint.find import find_checkpoint
from parallel2d.checkpoint.manifest import MANIFEST_FILE
from parallel2d.cli.main import main
from parallel2d.cli.verify import LlamaRun
from parallel2d.flags import load_config
from tests.ranks import Outcome, try_ranks
from tests.stored import LLAMA, damage, llama_checkpoint, tensors_of, write_checkpoint


def command(*arguments: str) -> None:
    sys.argv = ["parallel2d", "checkpoint", *arguments]
    main()


def run(*arguments: object) -> Outcome:
    """The command as its console script runs it, in a process of its own."""
    return try_ranks(1, command, *map(str, arguments))[0]


def test_exit_codes_of_the_command(tmp_path):
    whole, other = llama_checkpoint(tmp_path / "whole"), llama_checkpoint(tmp_path / "other", seed=1)
    outcomes = [
        run("show", whole),
        run("verify", whole),
        run("diff", whole, whole),
        run("diff", whole, other),
        run("show", tmp_path / "nowhere"),
        run("verify", tmp_path),
    ]
    damage(whole)
    outcomes.append(run("verify", whole))
    assert [outcome.exitcode for outcome in outcomes] == [0, 0, 0, 1, 2, 2, 1], outcomes
    assert all("Traceback" not in outcome.stderr for outcome in outcomes)
    assert "is neither a checkpoint" in outcomes[-2].stderr
    assert "__1_0.distcp: its content was changed" in outcomes[-1].stdout


def test_the_shown_configuration_makes_the_same_model(tmp_path, ask):
    _, out, _ = ask("show", llama_checkpoint(tmp_path / "x"), "--model-yaml")
    file = tmp_path / "model.yaml"
    file.write_text(out)
    recipe = Path(__file__).parent.parent / "recipes" / "llama_2d.yaml"
    assert load_config(LlamaRun, recipe, PRESETS, [f"--config={file}"]).model == LLAMA


def test_show(tmp_path, ask):
    path = llama_checkpoint(tmp_path / "x")
    code, out, _ = ask("show", path, "--json")
    found = json.loads(out)
    parameters = sum(t.numel() for n, t in tensors_of("Llama", LLAMA).items() if n.startswith("model."))
    steps = sum(name.endswith(".step") for name in found["tensors"])
    assert code == 0 and found["parameters"] == parameters
    assert found["weight_bytes"] == 4 * parameters and found["optimizer_bytes"] == 8 * parameters + 4 * steps
    assert (found["step"], found["model"], found["optimizer"]) == (200, "Llama", "AdamW")
    assert found["mesh"] == {"dp_replicate": 1, "dp_shard": 3, "tp": 1} and found["files"] == 4
    assert found["bytes"] == sum(f.stat().st_size for f in path.iterdir() if f.name != MANIFEST_FILE)
    embedding = {"dtype": "float32", "shape": [61, 36], "split": {"dp_shard": 0}, "blocks": 3}
    assert found["tensors"]["model.embedding.weight"] == embedding
    _, out, _ = ask("show", path)
    assert f"{parameters:,} parameters" in out
    lines = out.splitlines()
    column = next(line for line in lines if line.startswith("tensor")).index("shape")
    assert next(line for line in lines if line.startswith("model.embedding"))[column:].startswith("61 × 36 ")


def test_verify_names_what_is_wrong(tmp_path, ask):
    path = llama_checkpoint(tmp_path / "x")
    assert "is intact: 4 files" in ask("verify", path)[1]
    damage(path)
    (path / "__0_0.distcp").unlink()
    (path / "stranger").touch()
    with open(path / "__2_0.distcp", "ab") as handle:
        handle.write(b"more")
    code, out, _ = ask("verify", path, "--json")
    found = json.loads(out)
    assert code == 1 and not found["intact"]
    assert set(found["faults"]) == {"__0_0.distcp", "__1_0.distcp", "__2_0.distcp", "stranger"}


@pytest.mark.parametrize("change", ["missing", "cut", "edited"])
def test_verify_names_a_bad_manifest(tmp_path, ask, change):
    path = llama_checkpoint(tmp_path / "step-00000200")
    manifest = path / MANIFEST_FILE
    text = manifest.read_text()
    manifest.unlink()
    if change != "missing":
        manifest.write_text(text[:-100] if change == "cut" else text.replace('"step": 200', '"step": 300'))
    code, out, _ = ask("verify", path)
    assert code == 1 and MANIFEST_FILE in out


def test_the_newest_checkpoint_of_a_run(tmp_path, ask):
    folder = tmp_path / "run" / "checkpoints"
    for step in ("step-00000200", "step-100000000", "step-99999999", "step-999999999.tmp"):
        llama_checkpoint(folder / step)
    newest = folder / "step-100000000"
    assert find_checkpoint(tmp_path / "run") == find_checkpoint(folder) == newest
    assert find_checkpoint(folder / "step-00000200") == folder / "step-00000200"
    _, out, err = ask("show", tmp_path / "run", "--json")
    assert json.loads(out)["path"] == str(newest) and str(newest) in err
    # A damaged one does not hide behind an older one.
    (newest / MANIFEST_FILE).unlink()
    code, out, _ = ask("verify", tmp_path / "run")
    assert code == 1 and MANIFEST_FILE in out


NAN = math.nan
CASES = {  # a, b, max |a - b| / max |b|
    "equal": ([1.0, 2.0], [1.0, 2.0], 0.0),
    "apart": ([1.0, 2.5], [1.0, -2.0], 2.25),
    "zeros": ([0.0, -0.0], [0.0, 0.0], 0.0),
    "from zero": ([0.0, 1e-9], [0.0, 0.0], math.inf),
    "same NaN": ([NAN, 1.0], [NAN, 1.0], 0.0),
    "same NaN, and apart": ([NAN, 1.0], [NAN, 2.0], 0.5),
    "NaN": ([NAN, 1.0, 9.0], [1.0, 1.0, 1.0], NAN),
    "NaN elsewhere": ([NAN, 1.0], [1.0, NAN], NAN),
    "same infinity": ([math.inf, 1.0], [math.inf, 2.0], 0.5),
    "infinity": ([math.inf, 1.0], [1.0, 1.0], math.inf),
}


def test_diff(tmp_path, ask):
    cases = {f"model.{name}": case for name, case in CASES.items()}
    a = {name: torch.tensor(case[0]) for name, case in cases.items()}
    b = {name: torch.tensor(case[1]) for name, case in cases.items()}
    # Rows in more than one band, the NaN not in the last one.
    rows = torch.ones(5_000_000, 2)
    a["model.long"], b["model.long"] = rows.clone(), rows
    a["model.long"][0, 0] = NAN
    big = torch.tensor([2**60, 1])
    a |= {"model.integers": big, "model.bf16": torch.ones(3, dtype=torch.bfloat16), "optimizer.a.step": big}
    b |= {"model.integers": big + 1, "model.bf16": torch.ones(3), "model.new": big, "model.shape": big}
    a["model.shape"] = big.view(2, 1)
    paths = [write_checkpoint(tmp_path / n, t, parts=1 + i) for i, (n, t) in enumerate((("a", a), ("b", b)))]
    code, out, _ = ask("diff", *paths, "--json")
    found = {tensor["name"]: tensor for tensor in json.loads(out)["tensors"]}
    assert code == 1 and set(found) == a.keys() | b.keys()
    for name, (_, _, expected) in cases.items():
        assert found[name]["relative"] == (expected if math.isfinite(expected) else None), name
        assert found[name]["differs"] == (expected != 0), name
    assert found["model.long"]["differs"] and found["model.integers"]["differs"]
    reasons = {name: tensor["reason"] for name, tensor in found.items() if tensor["reason"]}
    assert reasons == {
        "model.bf16": "dtype bfloat16 in A, float32 in B",
        "model.shape": "shape [2, 1] in A, [2] in B",
        "model.new": "only in B",
        "optimizer.a.step": "only in A",
    }
    text = ask("diff", *paths)[1].splitlines()
    worst = [line.split("  ")[0] for line in text[5:]]
    assert worst[:5] == ["nan", "nan", "nan", "inf", "inf"] and worst[5] == "2.25"
    assert text[-1] == "13 of 16 tensors differ by more than 0"


def test_diff_within_a_tolerance(tmp_path, ask):
    a = llama_checkpoint(tmp_path / "a")
    tensors = tensors_of("Llama", LLAMA)
    moved = tensors["optimizer.norm.weight.exp_avg"]
    moved[3] += 1e-3 * moved.abs().max()
    b = write_checkpoint(tmp_path / "b", tensors, parts=2)
    code, out, _ = ask("diff", a, b)
    assert code == 1 and out.splitlines()[1].endswith("optimizer.norm.weight.exp_avg")
    assert out.splitlines()[-1] == "1 of 120 tensors differ by more than 0"
    assert ask("diff", a, b, "--tolerance", "2e-3")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("show", "nowhere"), "nowhere is neither a checkpoint"),
        (("show", "x", "--strange"), "unknown: --strange"),
        (("verify", "x", "--strange"), "unknown: --strange"),
        (("diff", "x", "x", "--strange"), "unknown: --strange"),
        (("reshard", "x", "y", "--strange"), "unknown: --strange"),
        (("diff", "x", "x", "--tolerance", "nan"), "--tolerance nan is no number from 0 on"),
        (("diff", "x", "."), ". is neither a checkpoint"),
    ],
)
def test_mistakes(tmp_path, monkeypatch, ask, arguments, message):
    monkeypatch.chdir(tmp_path)
    llama_checkpoint(tmp_path / "x")
    with pytest.raises(UserError, match=message.replace(".", r"\.")):
        ask(*arguments)


def test_odd_arguments_are_mistakes(tmp_path, ask, monkeypatch):
    path = llama_checkpoint(tmp_path / "x")
    with pytest.raises(UserError, match="tolerance inf"):
        ask("diff", path, path, "--tolerance", "inf", "--json")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    code, _, _ = ask("reshard", path, ".", "--dp", "2")
    assert code == 0 and ask("verify", tmp_path / "empty")[0] == 0
    with pytest.raises(UserError, match=r"File name too long|is neither a checkpoint"):
        ask("show", "a" * 300)
    other = path.rename(tmp_path / "step-00000007")
    assert ask("verify", other)[:2] == (1, f"{other} is damaged:\nmanifest.json: it holds step 200\n")
