"""benchmarks/gpu.py runs, outlives its rows, and an imagined rank holds what a real one does."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from enum import Enum

import pytest
import torch
from parallel2d.models.llama import Llama, LlamaConfig

from parallel2d import MeshShape, launch
from tests.ranks import ROOT, run_ranks

BENCHMARKS = ROOT / "benchmarks"
MODEL = LlamaConfig(vocab_size=251, width=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_width=40)


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import gpu

    return gpu


@pytest.mark.slow
def test_the_command(tmp_path):
    file = tmp_path / "rows.json"
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--device", "cpu", "--tiny", "--json", str(file)]
    flags = ["--only", "eager", "70B on 32x8, full", "--warm_up", "1", "--steps", "3", "--micro_batch", "2"]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())
    assert [(row["what"], row["program"]) for row in rows] == [
        ("1×1 eager", "parallel2d"),
        ("1×1 eager", "by hand"),
        ("rank 0 of 70B on 32×8, full", "parallel2d"),
    ]
    for row in rows:
        assert row["note"] == "" and len(row["seconds"]) == 3 and row["first_step_s"] > 0
        assert row["mfu"] is None and row["reserved_gib"] is None and row["allocated_gib"] > 0
        tokens = 2 * 64 if row["what"] == "1×1 eager" else 128 / 8
        assert row["tokens_per_s"] * row["step_s"] == pytest.approx(tokens)
    lines = done.stdout.splitlines()
    assert [line.count("|") for line in lines] == [11] * 5 + [0, 0]
    assert lines[-1] == f"CPU, torch {torch.__version__}"


def test_a_large_model_on_a_cpu_is_refused(gpu, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", "--steps", "0"])
    with pytest.raises(SystemExit, match="2"):
        gpu.main()
    assert "--steps must be at least 1" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu"])
    with pytest.raises(SystemExit, match="2"):
        gpu.main()
    assert "too large for a CPU: --tiny" in capsys.readouterr().err


@pytest.mark.slow
def test_a_row_that_fails_or_comes_too_late_is_told(gpu):
    good = gpu.Row("good", "parallel2d", MODEL, MeshShape(1, 2, 2), 16, 1, (1, 1))
    odd = replace(good, what="tp does not divide the sequence", seq_len=15)
    results = dict(gpu.measure_all([odd, good], "cpu", 60))
    assert results[odd] == {"note": "failed with status 1, see above"}
    assert results[good]["note"] == ""
    assert "failed with status 1" in gpu.line_of(odd, results[odd])

    endless = replace(good, steps=(1, 10**6))
    began = time.monotonic()
    results = dict(gpu.measure_all([endless, good], "cpu", 3))
    assert results == {row: {"note": gpu.OUT_OF_TIME} for row in (endless, good)}
    assert time.monotonic() - began < 30


def test_out_of_memory_is_a_result(gpu):
    from gpu_row import outcome

    def allocate() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert outcome(allocate) == {"note": gpu.OUT_OF_MEMORY}


def memory_of_step(shape: MeshShape, imagined: bool) -> dict[str, int]:
    """Bytes that a step holds at its peak, by what they are for."""
    from torch.distributed._tools.mem_tracker import MemTracker

    sys.path.insert(0, str(BENCHMARKS))
    from gpu_row import Row, build, imagined_step

    row = Row("", "parallel2d", MODEL, shape, 16, 2, (1, 1), "full")
    device, ids = torch.device("cpu"), torch.zeros(2, 16, dtype=torch.long)
    with launch.imagined_world(shape.world) if imagined else launch.world(shape.world, "cpu", 60):
        step, tracker = build(row, device, imagined_step), MemTracker()
        for _ in range(2):  # the first makes the optimizer's state
            tracker.reset_mod_stats()
            with tracker:
                step(ids, ids)
        return {
            kind.value if isinstance(kind, Enum) else kind: size
            for kind, size in tracker.get_tracker_snapshot("peak")[device].items()
        }


@pytest.mark.slow
def test_an_imagined_rank_holds_what_a_real_one_does():
    shape = MeshShape(1, 2, 2)
    real, imagined = (run_ranks(n, memory_of_step, shape, n == 1)[0] for n in (4, 1))
    assert imagined == real
    # FSDP's gathered weights are in it: of blocks and root a half each, in both halves.
    with torch.device("meta"):
        of_a_rank = sum(p.numel() for p in Llama(MODEL).parameters()) / shape.world
    assert real["Parameter"] > 4 * of_a_rank * 2
