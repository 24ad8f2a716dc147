"""`parallel2d plan --trace`: the formulas beside one step of the real code, on fake tensors."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from parallel2d.cli.plan_model import PlannedModel
from parallel2d.errors import UserError
from parallel2d.fsdp import FsdpPolicy, Precision
from parallel2d.ledger import table
from parallel2d.models.llama import Llama
from parallel2d.planner.hardware import GIB
from parallel2d.planner.predict import Prediction, predict
from parallel2d.planner.report import as_collectives, described, prediction_as_json
from parallel2d.planner.setup import ON_CPU, OURS, Setup
from parallel2d.planner.trace import Model, Traced, Workload, trace_depth


@dataclass(frozen=True)
class Beside:
    """One step by formula and as a trace of the real code saw it."""

    formula: Prediction
    traced: Traced
    on_gpu: Prediction

    @property
    def flops(self) -> int:
        """By formula, of a step as the trace's are."""
        return self.formula.flops.total * self.formula.setup.accumulation


def trace_beside(model: PlannedModel, chosen: Prediction) -> Beside:
    """Of at most two micro-batches. The trace runs a CPU's kernels, so the formulas are those of a CPU,
    which keeps more of a norm (`ON_CPU`)."""
    if chosen.setup.compile:
        raise UserError("compiled blocks cannot be traced: use --compile false")
    if chosen.setup.float8:
        raise UserError("float8 blocks cannot be traced: use precision.float8 none")
    setup = replace(chosen.setup, accumulation=min(chosen.setup.accumulation, 2))

    def build(layers: int) -> Model:
        with torch.device("meta"):
            module = Llama(replace(model.config, num_layers=layers))
        return module, module.tp_plan(), list(module.blocks)

    work = _workload(setup, model.config.vocab_size)
    traced = trace_depth(build, model.config.num_layers, chosen.mesh, work)
    formula, on_gpu = (predict(chosen.shape, chosen.mesh, setup, None, where) for where in (ON_CPU, OURS))
    return Beside(formula, traced, on_gpu)


def _workload(setup: Setup, vocab_size: int) -> Workload:
    formats = setup.formats
    names = (formats.param.name, formats.compute.name, formats.reduce.name)
    return Workload(
        setup.micro_batch,
        setup.seq_len,
        vocab_size,
        setup.accumulation,
        Precision(*(getattr(torch, name) for name in names)),
        FsdpPolicy(setup.reshard),  # type: ignore[arg-type]  # one of its words, or a number; it checks
        activation_checkpoint=setup.checkpoint,  # type: ignore[arg-type]  # one of its words, from search.py
    )


def as_text(beside: Beside) -> str:
    """Line by line, formula and trace."""
    formula, traced = beside.formula, beside.traced
    return "\n".join(
        [
            described(formula),
            "",
            "by formula, and observed in a trace of the real code",
            table(formula.ledger, traced.ledger),
            "",
            _row("", "formula", "trace"),
            _row("floating-point operations of a rank", f"{beside.flops:,}", f"{traced.flops:,}"),
            *_memory_rows(formula, traced),
            "",
            "A trace runs a CPU's kernels, which keep more of a norm; so do the formulas beside it:",
            f"on a GPU they say {_gib(beside.on_gpu.memory.allocated)} GiB allocated.",
            f"traced in {traced.cpu_seconds:.1f} CPU seconds",
        ]
    )


def _memory_rows(formula: Prediction, traced: Traced) -> Iterator[str]:
    by_part = formula.memory.peak.by_part()
    yield _row("memory at the peak, GiB: at", formula.memory.peak.name, traced.peak_phase)
    yield from (_row(f"  {part}", _gib(by_part[part]), _gib(size)) for part, size in traced.parts.items())
    yield _row("  allocated", _gib(formula.memory.allocated), _gib(traced.peak_bytes))
    if traced.reserved_bytes is not None:
        yield _row(
            "  reserved by a GPU's allocator", _gib(formula.memory.reserved), _gib(traced.reserved_bytes)
        )


def _row(name: str, formula: str, trace: str) -> str:
    return f"{name:44}{formula:>26}{trace:>36}".rstrip()


def _gib(size: int) -> str:
    return f"{size / GIB:.3f}"


def as_json(beside: Beside) -> dict[str, Any]:
    """The formula's as --explain has it, and what the trace has of the same keys."""
    traced = beside.traced
    return {
        "formula": prediction_as_json(beside.formula) | {"flops_per_step": beside.flops},
        "trace": {
            "collectives": as_collectives(traced.ledger),
            "flops_per_step": traced.flops,
            "allocated_bytes": traced.peak_bytes,
            "reserved_bytes": traced.reserved_bytes,
            "peak": traced.peak_phase,
            "memory": dict(traced.parts),
            "cpu_seconds": traced.cpu_seconds,
        },
    }
