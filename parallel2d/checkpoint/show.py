"""What a checkpoint holds, in numbers and words."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from parallel2d.checkpoint.manifest import OPTIMIZER, WEIGHTS, Manifest


def facts_of(path: Path, manifest: Manifest) -> dict[str, Any]:
    """Everything that the manifest says, plain enough for JSON. No file of numbers is read."""
    tensors = manifest.tensors
    return {
        "path": str(path),
        "step": manifest.step,
        "mesh": dict(manifest.mesh),
        "versions": dict(manifest.versions),
        "model": manifest.model,
        "optimizer": manifest.optimizer,
        "files": len(manifest.files),
        "bytes": sum(file.bytes for file in manifest.files.values()),
        "weight_bytes": sum(t.bytes for name, t in tensors.items() if name.startswith(WEIGHTS)),
        "optimizer_bytes": sum(t.bytes for name, t in tensors.items() if name.startswith(OPTIMIZER)),
        "parameters": sum(math.prod(t.shape) for name, t in tensors.items() if name.startswith(WEIGHTS)),
        "tensors": {
            name: {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "split": dict(tensor.split),
                "blocks": len(tensor.blocks),
            }
            for name, tensor in tensors.items()
        },
    }


def facts_as_text(facts: dict[str, Any]) -> str:
    """The same for people."""
    mesh = " × ".join(f"{axis} {size}" for axis, size in facts["mesh"].items())
    head = [
        ("checkpoint", facts["path"]),
        ("step", f"{facts['step']:,}"),
        ("model", f"{facts['model']}, {facts['parameters']:,} parameters"),
        ("optimizer", facts["optimizer"] or "none: weights only"),
        ("mesh", mesh),
        ("written by", ", ".join(f"{name} {version}" for name, version in facts["versions"].items())),
        ("files", f"{facts['files']} files, {facts['bytes']:,} bytes"),
        ("weights", f"{facts['weight_bytes']:,} bytes"),
        ("optimizer", f"{facts['optimizer_bytes']:,} bytes"),
    ]
    rows = [("tensor", "dtype", "shape", "split", "blocks")]
    for name, tensor in facts["tensors"].items():
        split = ", ".join(f"{axis}: dim {dim}" for axis, dim in tensor["split"].items())
        shape = " × ".join(map(str, tensor["shape"])) or "a number"
        rows.append((name, tensor["dtype"], shape, split or "whole", str(tensor["blocks"])))
    return "\n".join([*aligned(head), "", *aligned(rows)])


def aligned(rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Rows of words as lines, each column as wide as its widest word."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(word.ljust(n) for word, n in zip(row, widths, strict=True)).rstrip() for row in rows]
