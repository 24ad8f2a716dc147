"""`parallel2d plan --calibrate`: the constants of one's own cluster from the curves of its runs."""

import dataclasses
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

import yaml

from parallel2d.cli.plan_model import formats_of, planned_model
from parallel2d.errors import UserError
from parallel2d.mesh_shape import MeshShape
from parallel2d.planner.calibrate import FITTED, Measured, fit, predicted
from parallel2d.planner.hardware import Cluster
from parallel2d.planner.model import ModelShape
from parallel2d.planner.setup import Setup


def calibrated(files: Sequence[Path], cluster: Cluster, gpus: int) -> str:
    """An entry for --hardware, with what was predicted before and after in comments.

    Each metrics.jsonl lies in its run folder, whose config.yaml says what ran.
    """
    runs = [_run(file, gpus) for file in files]
    fitted = fit(runs, cluster)
    name, reached = cluster.gpu.name, dataclasses.asdict(fitted.gpu.reached)
    lines = [f"# measured tokens/s per GPU, and predicted with the constants of {name} and with these:"]
    for file, run in zip(files, runs, strict=True):
        before, after = predicted(run, cluster), predicted(run, fitted)
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
    tp, replicas = recipe.get("tp", 1), recipe.get("dp_replicate", 1)
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
    )
    return Measured(ModelShape.of(config.config), mesh, setup, _tokens_per_s(file) / mesh.world)


def _tokens_per_s(file: Path) -> float:
    """The median of a run's logged rates, its first apart, which warmed up."""
    try:
        lines = [json.loads(line) for line in file.read_text().splitlines()]
    except (OSError, json.JSONDecodeError) as error:
        raise UserError(f"--calibrate {file} cannot be read: {error}") from None
    rates = [line["tokens_per_s"] for line in lines if "tokens_per_s" in line][1:]
    if not rates:
        raise UserError(f"--calibrate {file} has no two logged steps: run more of them, with --log.every 1")
    return statistics.median(rates)
