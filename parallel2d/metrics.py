"""What a run shows: console, TensorBoard, metrics.jsonl; throughput, MFU, memory. Rank 0 only."""

import json
import math
import resource
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from parallel2d.step import StepStats

# Dense bf16 peak, FLOP/s, by a part of the name that CUDA reports. From the vendors' data sheets.
_PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12, "MI300X": 1307e12}


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 peak of a device in FLOP/s; None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _PEAK_FLOPS.items() if part in name), None)


def memory_gib(device: torch.device) -> float:
    """Peak so far on this rank: CUDA's allocated memory, or the process's resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


@dataclass(frozen=True)
class Run:
    """What a monitor must know of the run to turn seconds into rates.

    Args:
        start_step: updates already done when this process started.
        total_steps: updates of the whole run.
        flops_per_token: forward and backward.
        device: of this rank.
        world: number of ranks.
    """

    start_step: int
    total_steps: int
    flops_per_token: int
    device: torch.device
    world: int


class Monitor:
    """Writes a run's curves below its folder; on ranks other than 0 it does nothing.

    A restarted run continues the same files: lines and points after start_step, of the part that is
    run again, are dropped.
    """

    def __init__(self, folder: Path, run: Run, *, every: int, config_text: str, rank: int) -> None:
        self.enabled = rank == 0
        if not self.enabled:
            return
        # Imported here: it costs a second, and only rank 0 writes.
        from torch.utils.tensorboard import SummaryWriter

        self.run, self.every = run, every
        self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=run.start_step + 1)
        self.board.add_text("config", f"```yaml\n{config_text}```", run.start_step)
        self.lines = _continue_lines(folder / "metrics.jsonl", run.start_step).open("a", buffering=1)
        self.steps_since, self.tokens_since, self.seconds_since = 0, 0, 0.0
        self.began = 0.0
        self.told_of_failure = False

    def begin_step(self) -> None:
        self.began = time.perf_counter()

    def end_step(self, step: int, stats: StepStats, lr: float, tokens_seen: int) -> None:
        """Record update number `step` (from 1); writes on every `every`-th, the first and the last.

        Args:
            lr: of this update.
            tokens_seen: since the run's beginning, this update included.
        """
        if not self.enabled:
            return
        self.steps_since += 1
        self.tokens_since += stats.tokens
        self.seconds_since += time.perf_counter() - self.began
        first, last = step == self.run.start_step + 1, step == self.run.total_steps
        if step % self.every and not first and not last:
            return
        tokens_per_s = self.tokens_since / self.seconds_since
        peak = peak_flops(self.run.device)
        values: dict[str, float | None] = {
            "loss": stats.loss,
            "grad_norm": stats.grad_norm,
            "lr": lr,
            "tokens": tokens_seen,
            "tokens_per_s": tokens_per_s,
            "step_s": self.seconds_since / self.steps_since,
            "memory_gib": memory_gib(self.run.device),
            "mfu": peak and tokens_per_s * self.run.flops_per_token / (peak * self.run.world),
        }
        self._write(step, values)
        self._print_progress(step, values)
        self.steps_since, self.tokens_since, self.seconds_since = 0, 0, 0.0

    def _print_progress(self, step: int, values: dict[str, Any]) -> None:
        # The first step warms caches up and would spoil the forecast.
        first = step == self.run.start_step + 1
        left = (self.run.total_steps - step) * values["step_s"]
        eta = "--:--" if first else f"{int(left) // 60}:{int(left) % 60:02d}"
        mfu = f"  mfu {values['mfu']:.1%}" if values["mfu"] else ""
        self.say(
            f"step {step:>{len(str(self.run.total_steps))}}/{self.run.total_steps}  "
            f"loss {values['loss']:.4f}  grad_norm {values['grad_norm']:.3f}  lr {values['lr']:.2e}  "
            f"{values['tokens_per_s']:,.0f} tokens/s{mfu}  ETA {eta}"
        )

    def validation(self, step: int, val_loss: float) -> None:
        """Record the validation loss after update number `step`."""
        if self.enabled:
            self._write(step, {"val_loss": val_loss})
            self.say(f"step {step}: validation loss {val_loss:.4f} nats per token")

    def checkpoint(self, step: int, stall_s: float) -> None:
        """Record for how many seconds training stood still for the checkpoint after update number `step`."""
        if self.enabled:
            self._write(step, {"checkpoint_stall_s": stall_s})

    def say(self, text: str) -> None:
        """One line for people, from rank 0."""
        if self.enabled:
            print(text, flush=True)

    def close(self) -> None:
        if self.enabled:
            for file in (self.board, self.lines):
                with suppress(OSError):  # was told
                    file.close()

    def _write(self, step: int, values: dict[str, float | None]) -> None:
        try:
            # json writes floats so that they read back to the same bits.
            self.lines.write(json.dumps({"step": step, **values}) + "\n")
            for name, value in values.items():
                if value is not None:
                    self.board.add_scalar(name, value, step)
        except OSError as error:
            # A full disk costs a run its curves and not itself.
            if not self.told_of_failure:
                self.say(f"NOT written  curves from step {step} on: {error.strerror}; the run goes on")
            self.told_of_failure = True


def _continue_lines(path: Path, start_step: int) -> Path:
    """Keep the lines up to start_step; what comes after them will be written again."""
    if path.exists():
        kept = [line for line in path.read_text().splitlines() if _step_of(line) <= start_step]
        rewritten = path.with_suffix(".tmp")
        rewritten.write_text("".join(line + "\n" for line in kept))
        rewritten.replace(path)
    return path


def _step_of(line: str) -> float:
    """A line that is not ours comes before every step, the half line of a killed process after."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        return math.inf
    step = record.get("step") if isinstance(record, dict) else None
    return step if isinstance(step, int) else -math.inf
