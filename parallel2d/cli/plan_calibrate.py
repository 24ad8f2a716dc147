"""`parallel2d plan --calibrate`: the constants of one's own cluster from the curves of its runs."""

import dataclasses
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from parallel2d.cli.plan_model import formats_of, planned_model
from parallel2d.errors import UserError
from parallel2d.mesh_shape import MeshShape
from parallel2d.planner.calibrate import FITTED, Measured, fit, predicted
from parallel2d.planner.hardware import Cluster
from parallel2d.planner.model import ModelShape
from parallel2d.planner.predict import SPEED_INTERVAL
from parallel2d.planner.search import CHECKPOINTS, FLOAT8S, RESHARDS
from parallel2d.planner.setup import Setup


def calibrated(files: Sequence[Path], cluster: Cluster, gpus: int) -> str:
    """An entry for --hardware, with what was predicted before and after in comments.

    Each metrics.jsonl lies in its run folder, whose config.yaml says what ran.
    """
    if gpus < 1:
        raise UserError(f"gpus {gpus} is not a positive number")
    runs = [_run(file, gpus) for file in files]
    fitted = fit(runs, cluster)
    name, reached = cluster.gpu.name, dataclasses.asdict(fitted.gpu.reached)
    lines = [f"# measured tokens/s per GPU, and predicted with the constants of {name} and with these:"]
    for file, run in zip(files, runs, strict=True):
        before, after = predicted(run, cluster), predicted(run, fitted)
        if abs(after / run.tokens_per_s - 1) > SPEED_INTERVAL:
            raise UserError(
                f"--calibrate {file}: measured {run.tokens_per_s:.0f} tokens/s per GPU, fitted {after:.0f}, "
                f"which is no fit: is it {gpus} × {name}, and a model large enough that the GPU, not the "
                f"host, sets the pace?"
            )
        lines.append(f"#   {run.tokens_per_s:10.0f} {before:10.0f} {after:10.0f}  {file}")
    entry = {
        f"my-{name}": {
            "like": name,
            "names": [],
            "reached": {key: round(reached[key], 4) for key in FITTED},
            "fitted_on": ", ".join(map(str, files)),
        }
    }
    return "\n".join(lines) + "\n" + yaml.safe_dump(entry, sort_keys=False)


def _run(file: Path, gpus: int) -> Measured:
    """What a run folder tells of a run on so many GPUs."""
    config_file = file.parent / "config.yaml"
    config = planned_model(str(config_file))
    recipe = config.recipe
    _require_sound(recipe, config_file)
    tp, replicas = recipe.get("tp", 1), recipe.get("dp_replicate", 1)
    if isinstance(dp := recipe.get("dp"), int) and dp > 0 and dp * tp != gpus:
        raise UserError(f"{config_file}: its run had {dp * tp} processes, not --gpus {gpus}")
    if gpus % (tp * replicas):
        raise UserError(f"{config_file}: tp {tp} × dp_replicate {replicas} does not divide --gpus {gpus}")
    mesh = MeshShape(replicas, gpus // tp // replicas, tp)
    data = recipe["data"]
    per_rank = data["global_batch"] // mesh.dp
    micro_batch = data.get("micro_batch") or per_rank
    if per_rank * mesh.dp != data["global_batch"] or per_rank % micro_batch:
        raise UserError(f"{config_file}: its batch does not divide over {mesh}: is --gpus {gpus} right?")
    setup = Setup(
        micro_batch,
        data["seq_len"],
        per_rank // micro_batch,
        recipe.get("activation_checkpoint", "none"),
        recipe.get("fsdp", {}).get("reshard_after_forward", "auto"),
        recipe.get("compile", False),
        formats=formats_of(recipe.get("precision", {})),
        float8=recipe.get("precision", {}).get("float8", "none") != "none",
        async_tp=recipe.get("async_tp", False),
    )
    return Measured(ModelShape.of(config.config), mesh, setup, _tokens_per_s(file) / mesh.world)


def _require_sound(recipe: dict[str, Any], file: Path) -> None:
    """A run writes nothing else; a file that was edited might."""
    data, fsdp = recipe["data"], recipe.get("fsdp", {})
    sizes = {"tp": recipe.get("tp", 1), "dp_replicate": recipe.get("dp_replicate", 1)}
    sizes |= {f"data.{key}": data[key] for key in ("seq_len", "global_batch")}
    sizes["data.micro_batch"] = data.get("micro_batch") or 1
    found = [f"{key} {size!r} is not a positive number" for key, size in sizes.items() if not _is_size(size)]
    words = {
        "activation_checkpoint": (recipe.get("activation_checkpoint", "none"), CHECKPOINTS),
        "fsdp.reshard_after_forward": (fsdp.get("reshard_after_forward", "auto"), RESHARDS),
        "compile": (recipe.get("compile", False), (False, True)),
        "async_tp": (recipe.get("async_tp", False), (False, True)),
        "precision.float8": (recipe.get("precision", {}).get("float8", "none"), FLOAT8S),
    }
    found += [
        f"{key} {word!r} is not one of {', '.join(map(str, known))}"
        for key, (word, known) in words.items()
        if word not in known and not (key.startswith("fsdp") and _is_size(word))
    ]
    if found:
        raise UserError("\n".join(f"{file}: {line}" for line in found))


def _is_size(value: object) -> bool:
    return type(value) is int and value > 0


def _tokens_per_s(file: Path) -> float:
    """The median of a run's logged rates, its first apart, which warmed up."""
    try:
        lines = [json.loads(line) for line in file.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise UserError(f"--calibrate {file} cannot be read: {error}") from None
    rates = [line["tokens_per_s"] for line in lines if isinstance(line, dict) and "tokens_per_s" in line][1:]
    if wrong := [r for r in rates if not (isinstance(r, int | float) and 0 < r < math.inf)]:
        raise UserError(f"--calibrate {file}: tokens_per_s {wrong[0]!r} is no rate")
    if not rates:
        raise UserError(f"--calibrate {file} has no two logged steps: run more of them, with --log.every 1")
    return statistics.median(rates)
