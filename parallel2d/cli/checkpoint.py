"""`parallel2d checkpoint …`: look at checkpoints, check, compare and rewrite them; no GPU, no world."""

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from parallel2d import launch
from parallel2d.checkpoint.diff import Difference, bytes_to_compare, differences
from parallel2d.checkpoint.files import StoredBlocks
from parallel2d.checkpoint.find import fault_of_name
from parallel2d.checkpoint.intact import DamagedCheckpoint, StoredFile, file_faults, hash_faults
from parallel2d.checkpoint.layout import Layout, layouts_of_checkpoint, layouts_of_model
from parallel2d.checkpoint.manifest import MANIFEST_FILE, Manifest, read_manifest
from parallel2d.checkpoint.reshard import Source, bytes_to_move, require_apart, reshard, weights_only
from parallel2d.checkpoint.show import aligned, facts_as_text, facts_of
from parallel2d.cli.checkpoint_hf import add_export_hf, add_import_hf
from parallel2d.cli.common import PATH, absolute, add_command, found_checkpoint, progress_bar
from parallel2d.cli.models import MODELS, config_of, make_model, make_users_model
from parallel2d.errors import UserError
from parallel2d.mesh import AXES, MeshShape, build_mesh, choose_mesh
from parallel2d.parallelize import parallelize
from parallel2d.verify.report import finite


def add_checkpoint(commands: Any) -> None:
    """Add the command and its own commands to argparse's subparsers."""
    parser = commands.add_parser(
        "checkpoint", allow_abbrev=False, help="look at checkpoints, check, compare and rewrite them"
    )
    inner = parser.add_subparsers(dest="action", required=True)
    _add_show(inner)
    _add_verify(inner)
    _add_diff(inner)
    _add_reshard(inner)
    add_export_hf(inner)
    add_import_hf(inner)


def _add_show(inner: Any) -> None:
    parser = add_command(inner, "show", _show, "say what a checkpoint holds, from its manifest")
    parser.add_argument("path", type=Path, help=PATH)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object")
    form.add_argument(
        "--model-yaml", action="store_true", help="print the model's configuration, for a recipe's --config"
    )


def _add_verify(inner: Any) -> None:
    about = "read every file and compare its hash: exit 0 if intact, 1 if not, 2 if there is no checkpoint"
    parser = add_command(inner, "verify", _verify, about)
    parser.add_argument("path", type=Path, help=PATH)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _add_diff(inner: Any) -> None:
    about = (
        "the largest relative difference of each tensor, max |a - b| / max |b|: exit 1 if one is too large"
    )
    parser = add_command(inner, "diff", _diff, about)
    parser.add_argument("a", type=Path, help=PATH)
    parser.add_argument("b", type=Path, help="another one")
    parser.add_argument("--tolerance", type=float, default=0.0, help="what is not too large (default 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _add_reshard(inner: Any) -> None:
    about = (
        "rewrite a checkpoint for another mesh: each of its ranks then reads a file of its own, front to back"
    )
    parser = add_command(inner, "reshard", _reshard, about)
    parser.add_argument("source", type=Path, help=PATH)
    parser.add_argument("destination", type=Path, help="a folder that does not exist or is empty")
    parser.add_argument("--dp", type=int, default=1, help="data-parallel ranks of the target (default 1)")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks (default 1)")
    parser.add_argument("--dp_replicate", type=int, default=1, help="replicas among the dp ranks (default 1)")
    parser.add_argument("--model-only", action="store_true", help="leave the optimizer's state out")
    parser.add_argument(
        "--model",
        metavar="MODULE:CALLABLE",
        help="your own model: returns (model, plan, units), as parallelize takes them; called on meta",
    )


def _show(arguments: argparse.Namespace) -> bool:
    path = found_checkpoint(arguments.path)
    manifest = read_manifest(path)
    if arguments.model_yaml:
        if not isinstance(manifest.trainer.get("model"), dict):
            raise UserError(f"{path} has no configuration of its model")
        print(yaml.safe_dump({"model": manifest.trainer.get("model")}, sort_keys=False), end="")
        return True
    facts = facts_of(path, manifest)
    print(json.dumps(facts) if arguments.json else facts_as_text(facts))
    return True


def _verify(arguments: argparse.Namespace) -> bool:
    path = found_checkpoint(arguments.path)
    checked: Mapping[str, StoredFile] = {}
    try:
        manifest = read_manifest(path)
    except DamagedCheckpoint as error:
        faults = {MANIFEST_FILE: str(error).removeprefix(f"{path / MANIFEST_FILE} ")}
    else:
        checked = manifest.files
        faults = _faults_of_files(path, manifest)
        if fault := fault_of_name(path, manifest.step):
            faults = {MANIFEST_FILE: fault, **faults}
    total = sum(file.bytes for file in checked.values())
    if arguments.json:
        found = {"path": str(path), "intact": not faults, "files": len(checked), "bytes": total}
        print(json.dumps({**found, "faults": faults}))
    else:
        intact = f"{path} is intact: {len(checked)} files, {total:,} bytes"
        lines = [f"{name}: {fault}" for name, fault in faults.items()]
        print("\n".join([f"{path} is damaged:", *lines]) if faults else intact)
    return not faults


def _faults_of_files(path: Path, manifest: Manifest) -> dict[str, str]:
    """{file: what is wrong with it}"""
    faults = file_faults(path, manifest.files, MANIFEST_FILE)
    to_read = {name: file for name, file in manifest.files.items() if name not in faults}
    with progress_bar("verify", sum(file.bytes for file in to_read.values())) as progress:
        for name, fault in hash_faults(path, to_read):
            progress(to_read[name].bytes)
            if fault:
                faults[name] = fault
    return faults


def _diff(arguments: argparse.Namespace) -> bool:
    tolerance = arguments.tolerance
    if not 0 <= tolerance < math.inf:
        raise UserError(f"--tolerance {tolerance} is no number from 0 on")
    paths = [found_checkpoint(arguments.a), found_checkpoint(arguments.b)]
    first, second = (read_manifest(path) for path in paths)
    with (
        progress_bar("diff", bytes_to_compare(first, second)) as progress,
        StoredBlocks(paths[0], first) as a,
        StoredBlocks(paths[1], second) as b,
    ):
        found = differences(a, b, progress)
    beyond = [difference for difference in found if difference.is_beyond(tolerance)]
    if arguments.json:
        print(json.dumps(_diff_as_json(paths, found, tolerance), allow_nan=False))
    else:
        rows = [("difference", "tensor"), *((d.reason or f"{d.relative:.3g}", d.name) for d in found)]
        print("\n".join(aligned(rows)))
        print(f"{len(beyond)} of {len(found)} tensors differ by more than {tolerance:g}")
    return not beyond


def _diff_as_json(paths: list[Path], found: list[Difference], tolerance: float) -> dict[str, Any]:
    tensors = [
        {
            **finite({"name": d.name, "relative": d.relative}),
            "reason": d.reason,
            "differs": d.is_beyond(tolerance),
        }
        for d in found
    ]
    same = not any(d.is_beyond(tolerance) for d in found)
    return {"a": str(paths[0]), "b": str(paths[1]), "tolerance": tolerance, "same": same, "tensors": tensors}


def _reshard(arguments: argparse.Namespace) -> bool:
    path = found_checkpoint(arguments.source)
    destination = absolute(arguments.destination)
    require_apart(path, destination)
    manifest = read_manifest(path)
    shape, layouts = _target(arguments, manifest)
    if arguments.model_only:
        manifest = weights_only(manifest)
    of_all = layouts_of_checkpoint(manifest, layouts)
    mesh = {axis: getattr(shape, axis) for axis in AXES}
    with progress_bar("reshard", bytes_to_move(manifest)) as progress:
        written = reshard(Source(path, manifest), destination, mesh, of_all, progress)
    total = sum(file.bytes for file in written.files.values())
    files = f"{len(written.files)} files, {total:,} bytes"
    print(f"{destination}: step {written.step} for {shape}, {files}")
    return True


def _target(arguments: argparse.Namespace, manifest: Manifest) -> tuple[MeshShape, dict[str, Layout]]:
    """The mesh, checked, and how the model lies on it, by the code that training runs."""
    if arguments.dp < 1:
        raise UserError(
            f"--dp {arguments.dp} is not a positive number: nothing here says what it should fill"
        )
    known = not arguments.model and manifest.model in MODELS
    if not arguments.model and not known:
        raise UserError(
            f"the checkpoint is of a {manifest.model!r}, which is none of {', '.join(MODELS)}: "
            f"give the model with --model MODULE:CALLABLE"
        )
    config = config_of(manifest.model, manifest.trainer.get("model")) if known else None
    world = arguments.dp * max(arguments.tp, 1)
    shape = choose_mesh(
        arguments.dp,
        arguments.tp,
        arguments.dp_replicate,
        world,
        lambda s: config.problems(s.tp) if config else [],
    )
    made, plan, units = make_model(manifest.model, config) if known else make_users_model(arguments.model)
    with launch.imagined_world(shape.world):
        parallelize(made, build_mesh(shape, "cpu"), plan=plan, units=list(units))
        return shape, layouts_of_model(made, shape.world)
