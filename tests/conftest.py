"""Shared by all tests; the ranks themselves are in tests/ranks.py."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from parallel2d.cli.main import _main
from tests.ranks import ROOT


@pytest.fixture
def read_metrics():
    """metrics.jsonl of a run folder as {step: line} of the training lines."""

    def read(out: Path) -> dict[int, dict[str, Any]]:
        lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        return {line["step"]: line for line in lines if "loss" in line}

    return read


@pytest.fixture
def ask(monkeypatch, capsys):
    """`parallel2d checkpoint …` in this process: (exit code, stdout, stderr); a UserError is raised."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["parallel2d", "checkpoint", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            _main()
        return ended.value.code, *capsys.readouterr()

    return call


@pytest.fixture
def ask_plan(monkeypatch, capsys):
    """`parallel2d plan …` in this process: its stdout; a UserError is raised."""

    def call(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["parallel2d", "plan", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            _main()
        assert ended.value.code == 0
        return capsys.readouterr().out

    return call


@pytest.fixture
def published_runs() -> Path:
    """The CSV of published runs; skips where it is not."""
    path = ROOT.parent / "shared" / "planner" / "published_runs.csv"
    if not path.exists():
        pytest.skip(f"no {path}: the published runs are not part of the repository")
    return path
