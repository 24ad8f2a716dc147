"""Imports point one way: errors → mesh, collectives, … → middle rooms → what composes them → recipes."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import ROOT

LAYERS = [
    {"errors"},
    {"mesh_shape"},
    {"shared_memory"},
    {"traffic", "seeds", "shards", "mesh", "collectives", "local_weights", "ties", "styles", "fsdp_on_cpu"},
    {
        "config",
        "run_folder",
        "launch",
        "compile",
        "float8",
        "tensor_parallel",
        "fsdp",
        "freeze",
        "init",
        "data",
        "loss",
        "optim",
    },
    {"flags", "step", "generate", "parallelize", "checkpoint", "metrics", "ledger", "summary"},
    {"hf", "planner"},
    {"verify", "forecast"},
    {"cli"},
]
# Within a layer: who may use whom, with the reason.
ALSO = {
    ("collectives", "shards"),  # what a whole tensor is put together from
    ("fsdp_on_cpu", "collectives"),  # which it is for FSDP
    ("styles", "collectives"),  # a style is a split and its collectives
    ("styles", "local_weights"),
    ("local_weights", "collectives"),  # what partial gradients are summed by
    ("styles", "shards"),  # which rows of the vocabulary are here
    ("styles", "seeds"),  # what dropout on a share draws
    ("config", "fsdp"),  # a section makes the policy of it
    ("metrics", "step"),  # shows StepStats
}


def imports_of(path: Path) -> set[str]:
    """Dotted names of the modules that a file imports, of this project only."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return {name for name in found if name.split(".")[0] in ("parallel2d", "models", "recipes")}


def room(name: str) -> str | None:
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else None


def layer(name: str) -> int:
    return next(i for i, rooms in enumerate(LAYERS) if name in rooms)


FILES = sorted(p for p in (ROOT / "parallel2d").rglob("*.py") if p.name != "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path):
    here = path.relative_to(ROOT / "parallel2d").parts[0].removesuffix(".py")
    used = {room(name) for name in imports_of(path)} & set().union(*LAYERS) - {here}
    # Only recipes and the command line know both.
    assert here == "cli" or "models" not in {room(name) for name in imports_of(path)}
    assert {u for u in used if layer(u) >= layer(here) and (here, u) not in ALSO} == set()


@pytest.mark.parametrize("path", sorted((ROOT / "models").glob("*.py")), ids=lambda p: p.name)
def test_models_are_plain_pytorch(path):
    assert imports_of(path) == set()


def test_there_is_one_caller_of_each_torch_entry_point():
    for name, home in {
        "fully_shard(": "fsdp.py",
        "torch.compile(": "compile.py",
        "parallelize_module(": "tensor_parallel.py",
        "init_process_group(": "launch.py",
        "init_device_mesh(": "mesh.py",
        '"WORLD_SIZE"': "launch.py",
    }.items():
        callers = {p.name for p in FILES if name in p.read_text()}
        assert callers == {home}, name


def test_files_and_functions_keep_their_size():
    for path in (*FILES, *(ROOT / "models").glob("*.py"), *(ROOT / "recipes").glob("*.py")):
        text = path.read_text()
        assert len(text.splitlines()) <= 300, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                body = node.end_lineno - node.body[0].lineno + 1
                assert body <= 45, f"{path}: {node.name} has {body} lines"


def test_public_names_are_what_they_say_whatever_was_imported_before():
    script = (
        "import parallel2d.freeze, parallel2d.parallelize as module, parallel2d\n"
        "from parallel2d import *\n"
        "from parallel2d import __all__ as names\n"
        "assert all(callable(globals()[name]) for name in names), names\n"
        "assert callable(parallel2d.freeze) and parallel2d.freeze is freeze\n"
        "try: parallel2d.nothing\n"
        "except AttributeError as error: print(error)"
    )
    run = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert "has no attribute 'nothing'" in run.stdout
