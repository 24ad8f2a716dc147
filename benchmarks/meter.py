"""What the two programs of train.py take and print, so that they are measured alike."""

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

MESH = {"dp": (1, "data-parallel ranks, over which FSDP shards"), "tp": (1, "tensor-parallel ranks")}
SIZES = {
    "width": (256, "of the residual stream"),
    "layers": (6, "blocks"),
    "heads": (16, "query, and as many key/value heads"),
    "vocab_size": (2048, "token ids"),
    "seq_len": (256, "tokens per sequence"),
    "global_batch": (8, "sequences per step"),
    "warm_up": (3, "steps before the clock starts"),
    "steps": (10, "steps that are measured"),
}


def with_arguments(description: str | None, *tables: dict[str, tuple[int, str]]) -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=raw)
    for name, (default, text) in (item for table in tables for item in table.items()):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default %(default)s)")
    return parser


def ffn_width(width: int) -> int:
    """8/3 of the width, rounded up to a multiple of 256."""
    return 256 * -(-int(8 * width / 3) // 256)


def measure(
    arguments: argparse.Namespace, step: Callable[[int], float], outside: Sequence[float] = ()
) -> None:
    """Run step(number) -> loss, and print one line of JSON: seconds are means over the measured steps, CPU
    seconds of all ranks together, memory is each rank's peak resident set from start to end.

    outside: to which each step adds its seconds outside training (data, metrics, logging); rank 0's are told.
    """
    losses = [step(number) for number in range(arguments.warm_up)]
    _barrier()
    began, cpu_began, seconds = time.perf_counter(), _cpu_s(), []
    for number in range(arguments.warm_up, arguments.warm_up + arguments.steps):
        step_began = time.perf_counter()
        losses.append(step(number))
        seconds.append(time.perf_counter() - step_began)
    _barrier()
    step_s = (time.perf_counter() - began) / arguments.steps
    cpu_s = sum(_of_all_ranks(_cpu_s() - cpu_began)) / arguments.steps
    rss_mib = _of_all_ranks(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    tokens = arguments.global_batch * arguments.seq_len
    row = {
        "step_s": step_s,
        "median_step_s": statistics.median(seconds),
        "cpu_s_per_step": cpu_s,
        "tokens_per_s": tokens / step_s,
        "tokens_per_cpu_s": tokens / cpu_s,
        "max_rss_mib": max(rss_mib),
        "outside_share": sum(outside[-arguments.steps :]) / sum(seconds),
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(json.dumps(row), flush=True)


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _of_all_ranks(value: float) -> list[float]:
    if not dist.is_initialized():
        return [value]
    values = [torch.zeros(1, dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(values, torch.tensor([value], dtype=torch.float64))
    return [float(v) for v in values]
