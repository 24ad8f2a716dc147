"""Shared by all tests; the ranks themselves are in tests/ranks.py."""

import json
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def read_metrics():
    """metrics.jsonl of a run folder as {step: line} of the training lines."""

    def read(out: Path) -> dict[int, dict[str, Any]]:
        lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        return {line["step"]: line for line in lines if "loss" in line}

    return read
