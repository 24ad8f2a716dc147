"""benchmarks/train.py and growth.py: both programs run, learn alike, and are compared as the tables say."""

import json
import runpy
import subprocess
import sys

import pytest

from tests.ranks import ROOT

SIZES = "--width 32 --layers 1 --heads 2 --vocab_size 300 --seq_len 16 --global_batch 4 --warm_up 1 --steps 2"


@pytest.mark.slow
def test_the_command(tmp_path):
    command = [sys.executable, "benchmarks/train.py", "--meshes", "1x1,2x1", "--repeats", "1", *SIZES.split()]
    command += ["--json", str(tmp_path / "train.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    meshes = json.loads((tmp_path / "train.json").read_text())["meshes"]
    assert list(meshes) == ["1x1", "2x1"]
    for name, found in meshes.items():
        ours, theirs = found["parallel2d"], found["baseline"]
        assert found["ratio_tokens_per_cpu_s"] == ours["tokens_per_cpu_s"] / theirs["tokens_per_cpu_s"]
        # Data and initial weights are drawn otherwise: both begin near the logarithm of the vocabulary.
        assert abs(ours["first_loss"] - theirs["first_loss"]) < 0.2
        assert 0 <= ours["outside_share"] < 1
        assert f"| {name.replace('x', '×')} | parallel2d | {ours['tokens_per_cpu_s']:,.0f} |" in done.stdout


def test_a_ratio_is_of_runs_that_stand_beside_each_other(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    ratios_of = runpy.run_path(str(ROOT / "benchmarks" / "train.py"))["ratios_of"]
    runs = {"baseline": [100.0, 50.0, 80.0], "parallel2d": [150.0, 100.0, 96.0]}
    rows = {program: [{"tokens": speed} for speed in speeds] for program, speeds in runs.items()}
    assert ratios_of("tokens", rows) == pytest.approx([1.5, 2.0, 1.2])


def test_growth_is_held_against_operations(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    growth = runpy.run_path(str(ROOT / "benchmarks" / "growth.py"))
    flops, base = growth["flops_of_step"], growth["BASE"]
    # Twice the batch: twice the operations. Twice the layers: less than twice, for the head.
    assert flops(base | {"global_batch": 32}) == 2 * flops(base)
    assert 1.5 < flops(base | {"layers": 4}) / flops(base) < 2
