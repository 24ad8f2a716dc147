"""`parallel2d plan --trace`: the formulas beside one step of the real code, on fake tensors."""

from dataclasses import replace

import torch

from parallel2d.cli.plan_model import PlannedModel
from parallel2d.errors import UserError
from parallel2d.fsdp import FsdpPolicy, Precision
from parallel2d.ledger import table
from parallel2d.models.llama import Llama
from parallel2d.planner.predict import Prediction, predict
from parallel2d.planner.setup import ON_CPU, Setup
from parallel2d.planner.trace import Model, Traced, Workload, trace_depth

_GIB = 2**30


def traced_beside(model: PlannedModel, chosen: Prediction) -> str:
    """Both, line by line, of at most two micro-batches. The trace runs a CPU's kernels, so the formulas
    are those of a CPU, which keeps more of a norm (`ON_CPU`)."""
    if chosen.setup.compile:
        raise UserError("compiled blocks cannot be traced: use --compile false")
    setup = replace(chosen.setup, accumulation=min(chosen.setup.accumulation, 2))
    formula = predict(chosen.shape, chosen.mesh, setup, None, ON_CPU)

    def build(layers: int) -> Model:
        with torch.device("meta"):
            module = Llama(replace(model.config, num_layers=layers))
        return module, module.tp_plan(), list(module.blocks)

    work = _workload(setup, model.config.vocab_size)
    traced = trace_depth(build, model.config.num_layers, chosen.mesh, work)
    return "\n".join(_lines(formula, traced))


def _workload(setup: Setup, vocab_size: int) -> Workload:
    formats = setup.formats
    names = (formats.param.name, formats.compute.name, formats.reduce.name)
    return Workload(
        setup.micro_batch,
        setup.seq_len,
        vocab_size,
        setup.accumulation,
        Precision(*(getattr(torch, name) for name in names)),
        FsdpPolicy(setup.reshard),  # type: ignore[arg-type]  # likewise
        activation_checkpoint=setup.checkpoint,  # type: ignore[arg-type]  # one of its words, from search.py
    )


def _lines(formula: Prediction, traced: Traced) -> list[str]:
    setup = formula.setup
    lines = [
        f"mesh {formula.mesh}, micro-batch {setup.micro_batch} × {setup.accumulation}, "
        f"checkpointing {setup.checkpoint}, reshard_after_forward {setup.reshard}",
        "",
        "by formula, and observed in a trace of the real code",
        table(formula.ledger, traced.ledger),
        "",
        _row("floating-point operations of a rank", "formula", "trace"),
        _row("", f"{formula.flops.total * setup.accumulation:,}", f"{traced.flops:,}"),
        "",
        _row("memory at the peak, GiB", "formula", "trace"),
    ]
    by_part = formula.memory.peak.by_part()
    lines += [_row(f"  {part}", _gib(by_part[part]), _gib(size)) for part, size in traced.parts.items()]
    lines.append(_row("  allocated", _gib(formula.memory.allocated), _gib(traced.peak_bytes)))
    lines.append(_row("  at", formula.memory.peak.name, traced.peak_phase))
    return [*lines, "", f"traced in {traced.cpu_seconds:.1f} CPU seconds"]


def _row(name: str, formula: str, trace: str) -> str:
    return f"{name:44}{formula:>26}{trace:>26}".rstrip()


def _gib(size: int) -> str:
    return f"{size / _GIB:.3f}"
