"""One event stream, exact numbers, and curves that go on after a restart."""

import json
from pathlib import Path

import pytest
import torch
from parallel2d.models.llama import PRESETS, Llama, LlamaConfig
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from parallel2d.metrics import Monitor, Run, memory_gib, peak_flops
from parallel2d.step import StepStats
from tests.ranks import run_recipe

CPU = torch.device("cpu")
RATES = ("tokens", "tokens_per_s", "step_s", "memory_gib", "mfu")
SMALL = ("--data.seq_len", "32", "--data.global_batch", "8", "--log.every", "1", "--log.val_batches", "1")
SMALL += ("--log.sample_tokens", "0", "--checkpoint.every", "2", "--log.val_every", "0")


def events(out: Path) -> EventAccumulator:
    board = EventAccumulator(str(out / "tensorboard"), size_guidance={"scalars": 0})
    board.Reload()
    return board


def test_a_restarted_run_continues_its_curves(tmp_path, read_metrics):
    out = tmp_path / "run"
    first = run_recipe(4, "--dp", "2", "--tp", "2", "--out", str(out), *SMALL, "--steps", "5")
    assert first[0].exitcode == 0, first[0].stderr
    assert [o.stdout for o in first[1:]] == [""] * 3  # only rank 0 speaks
    # As if it had been killed after step 5, with step 4 the last checkpoint.
    (out / "checkpoints/step-00000005").rename(out / "checkpoints/step-00000005.tmp")
    with (out / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 6, "lo')
    second = run_recipe(2, "--dp", "1", "--tp", "2", "--out", str(out), *SMALL, "--steps", "7")
    assert second[0].exitcode == 0, second[0].stderr

    lines = read_metrics(out)
    assert list(lines) == [1, 2, 3, 4, 5, 6, 7]
    assert [p.name for p in out.iterdir() if p.is_dir()].count("tensorboard") == 1
    board = events(out)
    scalars = {"loss", "grad_norm", "lr", "tokens", "tokens_per_s", "step_s", "memory_gib", "val_loss"}
    scalars |= {"checkpoint_stall_s"}
    assert set(board.Tags()["scalars"]) == scalars
    points = board.Scalars("loss")
    assert [p.step for p in points] == [1, 2, 3, 4, 5, 6, 7]
    assert [p.value for p in points] == pytest.approx([lines[s]["loss"] for s in lines], rel=1e-6)
    assert [p.step for p in board.Scalars("val_loss")] == [0, 7]
    assert board.Tags()["tensors"] == ["config/text_summary"]
    assert lines[7]["tokens"] == 7 * 8 * 32
    assert lines[7]["mfu"] is None


def test_numbers(tmp_path, capsys):
    run = Run(start_step=0, total_steps=6, flops_per_token=10, device=CPU, world=2)
    monitor = Monitor(tmp_path, run, every=2, config_text="x: 1\n", rank=0)
    for step in range(1, 7):
        monitor.begin_step()
        monitor.end_step(step, StepStats(1 / 3, 0.1, 100), lr=0.5, tokens_seen=100 * step)
    monitor.validation(6, 2 / 3)
    monitor.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 4, 6, 6]
    assert lines[1]["loss"] == 1 / 3 and lines[-1] == {"step": 6, "val_loss": 2 / 3}
    assert lines[2]["tokens_per_s"] == pytest.approx(100 / lines[2]["step_s"], rel=1e-9)
    assert list(lines[0]) == [*("step", "loss", "grad_norm", "lr"), *RATES]
    printed = capsys.readouterr().out
    assert "step 4/6  loss 0.3333  grad_norm 0.100" in printed and "ETA 0:00" in printed


def test_other_ranks_write_nothing(tmp_path):
    monitor = Monitor(tmp_path, Run(0, 1, 1, CPU, 2), every=1, config_text="", rank=1)
    monitor.begin_step()
    monitor.end_step(1, StepStats(1.0, 1.0, 1), 1.0, 1)
    monitor.validation(1, 1.0)
    monitor.close()
    assert list(tmp_path.iterdir()) == []


def test_mfu_where_the_peak_is_known(tmp_path, monkeypatch):
    monkeypatch.setattr("parallel2d.metrics.peak_flops", lambda device: 1e6)
    monitor = Monitor(tmp_path, Run(0, 1, 500, CPU, world=2), every=1, config_text="", rank=0)
    monitor.begin_step()
    monitor.end_step(1, StepStats(1.0, 1.0, 100), 1.0, 100)
    monitor.close()
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert line["mfu"] == pytest.approx(line["tokens_per_s"] * 500 / 2e6)


def test_flops_per_token_counts_every_matrix_product():
    config = LlamaConfig(vocab_size=100, width=32, num_layers=3, num_heads=4, num_kv_heads=2, ffn_width=48)
    with torch.device("meta"):
        model = Llama(config)
    weights = sum(p.numel() for n, p in model.named_parameters() if "norm" not in n and "embedding" not in n)
    assert model.flops_per_token(64) == 6 * weights + 12 * 3 * 32 * 64
    assert PRESETS["llama3-8b"].num_kv_heads == 8


def test_peak_and_memory():
    assert peak_flops(CPU) is None
    assert 0.01 < memory_gib(CPU) < 1000


def test_a_full_disk_costs_the_curves_and_not_the_run(tmp_path, capsys):
    run = Run(start_step=0, total_steps=6, flops_per_token=10, device=CPU, world=2)
    monitor = Monitor(tmp_path, run, every=2, config_text="x: 1\n", rank=0)
    monitor.lines.close()
    monitor.lines = open("/dev/full", "a", buffering=1)  # noqa: SIM115  # closed by the monitor
    monitor.validation(1, 0.5)
    monitor.validation(2, 0.5)
    monitor.close()
    assert capsys.readouterr().out.count("NOT written  curves from step 1 on: No space left on device") == 1
