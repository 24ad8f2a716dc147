"""`parallel2d plan`: which mesh, how much memory, how fast, before anything is launched. No torch."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import yaml

from parallel2d.cli.plan_model import PlannedModel, formats_of, planned_model
from parallel2d.errors import UserError
from parallel2d.mesh_shape import MeshShape
from parallel2d.planner.hardware import Cluster, load_gpus, require_gpu
from parallel2d.planner.model import ModelShape
from parallel2d.planner.predict import Prediction
from parallel2d.planner.report import as_json, as_text, explained, prediction_as_json
from parallel2d.planner.search import (
    CHECKPOINTS,
    FLOAT8S,
    MOST_GPUS,
    RESHARDS,
    Plan,
    Request,
    best_setup,
    plan,
    problems_of,
)
from parallel2d.planner.setup import Setup


def add_plan(commands: Any) -> None:
    """Add the command to argparse's subparsers; its `run` takes the arguments and what they left."""
    parser = commands.add_parser(
        "plan",
        allow_abbrev=False,
        help="meshes for a model and so many GPUs: speed, memory, traffic, by formula",
        description="The meshes on which a model can be trained, best first, by the formulas of "
        "docs/planner.md: tokens/s, memory of a rank, bytes sent. Needs no GPU.",
    )
    _add_what(parser)
    _add_how(parser)
    parser.set_defaults(run=_plan)


def _add_what(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", help="a preset, a recipe's .yaml, or a Hugging Face config.json")
    add("--gpus", type=int, required=True, metavar="N", help="how many")
    add("--gpu", required=True, metavar="NAME", help="which, by a name of hardware.yaml")
    add("--seq_len", type=int, help="tokens per sequence (default: the recipe's, or 8192)")
    add("--global_batch", type=int, help="sequences per step (default: the recipe's, or one per GPU)")
    add("--gpus-per-node", type=int, default=8, metavar="N", help="default 8")
    add("--network-gbps", type=float, metavar="G", help="gigabits per second of a node, to other nodes")
    add("--hardware", type=Path, metavar="FILE", help="GPUs of your own, in the form of hardware.yaml")
    add("--activation_checkpoint", choices=CHECKPOINTS, help="only this (default: the recipe's, or all)")
    add("--compile", choices=("true", "false"), help="compiled blocks (default: the recipe's, or false)")


def _add_how(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--top", type=int, default=10, metavar="N", help="meshes to show (default 10)")
    add("--explain", metavar="DPxTP", help="one mesh in full; RxSxTP with R replicas of S shards")
    add("--trace", action="store_true", help="check the formulas on a step of the real code, on fake tensors")
    add("--mesh", metavar="DPxTP", help="the mesh to trace; RxSxTP with R replicas of S shards")
    add("--json", action="store_true", help="print one JSON object")
    add("--emit", type=Path, metavar="FILE", help="write a recipe for the best mesh, or --explain's")
    add("--plot", type=Path, metavar="FILE", help="draw memory and speed of the meshes")
    add(
        "--calibrate",
        nargs="+",
        type=Path,
        metavar="METRICS",
        help="print an entry for --hardware from metrics.jsonl files of runs on --gpus of these GPUs",
    )


def _plan(arguments: argparse.Namespace, rest: list[str]) -> bool:
    if rest:
        raise UserError(f"unknown: {' '.join(rest)} (see parallel2d plan --help)")
    if arguments.calibrate:
        beside = {
            "--model": "model",
            "--emit": "emit",
            "--plot": "plot",
            "--explain": "explain",
            "--trace": "trace",
        }
        if given := [flag for flag, name in beside.items() if getattr(arguments, name)]:
            raise UserError(
                f"--calibrate prints an entry and plans nothing: use it without {', '.join(given)}"
            )
        from parallel2d.cli.plan_calibrate import calibrated

        print(calibrated(arguments.calibrate, _cluster(arguments), arguments.gpus), end="")
        return True
    _refuse_what_does_not_go_together(arguments)
    model = planned_model(arguments.model)
    _note_what_is_not_modelled(model)
    request = _request(arguments, model)
    wanted = arguments.mesh if arguments.trace else arguments.explain
    if wanted is not None:
        chosen = best_setup(request, _mesh_of(wanted, request))
        said = _traced(model, chosen, arguments.json) if arguments.trace else _told(chosen, arguments.json)
    else:
        found = plan(request)
        chosen = found.predictions[0]
        said = json.dumps(as_json(found)) if arguments.json else as_text(found, arguments.top)
        if arguments.plot:
            _plot(found, arguments.plot, arguments.top)
    # Files first: who reads what is printed may be gone before its end.
    if arguments.emit:
        _emit(model, chosen, arguments.emit)
    print(said)
    return True


def _refuse_what_does_not_go_together(arguments: argparse.Namespace) -> None:
    """One error for all of it."""
    given = arguments
    found = {
        "--model is missing: a preset, a recipe's .yaml, or a Hugging Face config.json": not given.model,
        "--trace needs --mesh DPxTP, whose step it traces": given.trace and not given.mesh,
        "--mesh is what --trace traces: --explain shows a mesh by formula": given.mesh and not given.trace,
        "--trace and --explain: use one of them": given.trace and given.explain,
        "--plot draws all meshes: use it without --trace and --explain": (
            given.plot and (given.trace or given.explain)
        ),
        f"--top {given.top} is not a positive number": given.top < 1,
        **{
            f"{flag} {file} exists: use another name, or remove it": True
            for flag, file in (("--emit", given.emit), ("--plot", given.plot))
            if file and file.exists()
        },
    }
    if wrong := [why for why, holds in found.items() if holds]:
        raise UserError("\n".join(wrong))


def _told(chosen: Prediction, as_object: bool) -> str:
    return json.dumps(prediction_as_json(chosen)) if as_object else explained(chosen)


def _traced(model: PlannedModel, chosen: Prediction, as_object: bool) -> str:
    from parallel2d.cli import plan_trace  # here: it needs torch, which takes seconds

    beside = plan_trace.trace_beside(model, chosen)
    return json.dumps(plan_trace.as_json(beside)) if as_object else plan_trace.as_text(beside)


def _cluster(arguments: argparse.Namespace) -> Cluster:
    gpu = require_gpu(arguments.gpu, load_gpus(arguments.hardware))
    return Cluster.of(gpu, arguments.gpus_per_node, arguments.network_gbps)


def _request(arguments: argparse.Namespace, model: PlannedModel) -> Request:
    data, recipe = model.recipe.get("data", {}), model.recipe
    seq_len = data.get("seq_len", 8192) if arguments.seq_len is None else arguments.seq_len
    batch = data.get("global_batch", arguments.gpus)
    global_batch = batch if arguments.global_batch is None else arguments.global_batch
    sizes = {"gpus": arguments.gpus, "seq_len": seq_len, "global_batch": global_batch}
    for name, value in (sizes | {"micro_batch": data.get("micro_batch") or 1}).items():
        most = MOST_GPUS if name == "gpus" else 2**40
        if type(value) is not int or not 1 <= value <= most:
            raise UserError(f"{name} {value!r} is not a number from 1 to {most:,}")
    checkpoint = arguments.activation_checkpoint or recipe.get("activation_checkpoint")
    if checkpoint not in (None, *CHECKPOINTS):
        raise UserError(f"activation_checkpoint {checkpoint!r} is not one of {', '.join(CHECKPOINTS)}")
    reshard = recipe.get("fsdp", {}).get("reshard_after_forward")
    if reshard not in (None, *RESHARDS) and (not isinstance(reshard, int) or reshard < 2):
        raise UserError(
            f"fsdp.reshard_after_forward {reshard!r} is none of {', '.join(RESHARDS)} or a size of 2 or more"
        )
    if recipe.get("fsdp", {}).get("backward_prefetch"):
        # Asks for gathers in backward (`FsdpPolicy.resharding`).
        if reshard == "never":
            raise UserError(
                "fsdp.backward_prefetch with reshard_after_forward never: backward gathers nothing"
            )
        reshard = "but_last" if reshard in (None, "auto") else reshard
    cluster = _cluster(arguments)
    choices: dict[str, Any] = {"checkpoints": (checkpoint,)} if checkpoint else {}
    choices |= {"reshards": (reshard,)} if reshard is not None else {}
    # 0 is the recipe's word for all sequences of a rank at once, and its default: no choice.
    choices |= {"micro_batch": data["micro_batch"]} if data.get("micro_batch") else {}
    return Request(
        ModelShape.of(model.config),
        model.name,
        model.config.problems,
        arguments.gpus,
        cluster,
        seq_len,
        global_batch,
        _setup_of(arguments, recipe, cluster),
        **choices,
    )


def _setup_of(arguments: argparse.Namespace, recipe: dict[str, Any], cluster: Cluster) -> Setup:
    """What the search does not choose."""
    flag = {} if arguments.compile is None else {"compile": arguments.compile == "true"}
    chosen = {name: (recipe | flag).get(name, False) for name in ("compile", "async_tp")}
    for name, value in chosen.items():
        if not isinstance(value, bool):
            raise UserError(f"{name} {value!r} is neither true nor false")
    formats = formats_of(recipe.get("precision", {}))
    return Setup(1, 1, formats=formats, float8=_float8_of(recipe, cluster), **chosen)


def _float8_of(recipe: dict[str, Any], cluster: Cluster) -> bool:
    float8 = recipe.get("precision", {}).get("float8", "none")
    if float8 not in FLOAT8S:
        raise UserError(f"precision.float8 {float8!r} is not one of {', '.join(FLOAT8S)}")
    if float8 != "none" and not cluster.gpu.flops_float8:
        raise UserError(f"precision.float8 {float8}: {cluster.gpu.name} has no float8: use none")
    return bool(float8 != "none")


def _note_what_is_not_modelled(model: PlannedModel) -> None:
    """On stderr: stdout may be somebody's JSON."""
    fsdp = model.recipe.get("fsdp", {})
    found = {
        "freeze": model.recipe.get("freeze"),
        "fsdp.offload": fsdp.get("offload"),
        "fsdp.gradient_sync": fsdp.get("gradient_sync", "every") != "every",
        "fsdp.forward_prefetch": fsdp.get("forward_prefetch"),
        "fsdp.backward_prefetch": fsdp.get("backward_prefetch"),
        "precision.output": model.recipe.get("precision", {}).get("output"),
    }
    for key in (key for key, holds in found.items() if holds):
        print(f"note: {key} of {model.name} is not modelled: planned without it", file=sys.stderr)


def _mesh_of(text: str, request: Request) -> MeshShape:
    """DPxTP or RxSxTP, of as many GPUs as there are, and one that the model and the batch can have."""
    sizes = [
        int(size) if size.isascii() and size.isdigit() else 0 for size in text.replace("×", "x").split("x")
    ]
    if len(sizes) not in (2, 3) or not all(sizes):
        raise UserError(f"mesh {text!r} is not DPxTP (32x8), nor RxSxTP with R replicas (2x16x8)")
    mesh = MeshShape(*([1, *sizes] if len(sizes) == 2 else sizes))
    if mesh.world != request.gpus:
        raise UserError(f"mesh {text} has {mesh.world} ranks, not {request.gpus}")
    if found := problems_of(request, mesh):
        raise UserError("\n".join(found))
    return mesh


def _emit(model: PlannedModel, chosen: Prediction, file: Path) -> None:
    """The recipe that was given, or the model alone, with the mesh and how to run on it."""
    mesh, setup, recipe = chosen.mesh, chosen.setup, model.recipe
    data = {"seq_len": setup.seq_len, "global_batch": setup.micro_batch * setup.accumulation * mesh.dp}
    out = recipe | {
        "dp": mesh.dp,
        "tp": mesh.tp,
        "dp_replicate": mesh.dp_replicate,
        "activation_checkpoint": setup.checkpoint,
        "compile": setup.compile,
        "data": recipe.get("data", {}) | data | {"micro_batch": setup.micro_batch},
        "fsdp": recipe.get("fsdp", {}) | {"reshard_after_forward": setup.reshard},
    }
    try:
        with file.open("x") as new:
            yaml.safe_dump(out, new, sort_keys=False)
    except OSError as error:
        raise UserError(f"--emit {file} cannot be written: {error.strerror}") from None


def _plot(found: Plan, file: Path, top: int) -> None:
    try:
        from parallel2d.cli.plan_plot import draw
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "matplotlib":
            raise
        raise UserError("--plot needs matplotlib: pip install 'parallel2d[plot]'") from None
    draw(found, file, top)
