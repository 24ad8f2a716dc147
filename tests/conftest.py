"""Shared by all tests; the ranks themselves are in tests/ranks.py."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from parallel2d.cli.main import _main


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
