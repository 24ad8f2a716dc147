"""torch.compile, unit by unit: each unit's forward and backward as one graph, collectives included."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def apply_compile(units: Sequence[nn.Module], overlapped: dist.ProcessGroup | None = None) -> None:
    """Replace each unit's forward by a compiled one, in place; units of one kind share the graph.

    The graph is made in the first call with gradients, once for each kind of unit and of input (a second
    length of sequences makes it dynamic in that dimension), and sends what eager code sends. A unit that
    is not one graph is an error of torch's. Without gradients units run as they are: a validation or a
    text would take longer to compile than to compute, and a text has another length with each token.

    overlapped: the tp group, for asynchronous tensor parallelism: a gather runs in pieces with the product
    that needs it, a scatter with the one that makes it, through memory that GPUs map of each other. CUDA.

    https://docs.pytorch.org/docs/stable/generated/torch.compile.html
    """
    options: dict[str, Any] = {}
    if overlapped is not None:
        _let_gpus_share_memory(overlapped)
        options["_micro_pipeline_tp"] = True
    for unit in units:
        unit.forward = _compiled_for_training(unit.forward, options)


def _let_gpus_share_memory(group: dist.ProcessGroup) -> None:
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    with warnings.catch_warnings():
        # torch 2.13 says that it is not needed any more, but its pass still looks whether it was called.
        warnings.filterwarnings("ignore", message=".*enable_symm_mem_for_group", category=FutureWarning)
        enable_symm_mem_for_group(group.group_name)


def _compiled_for_training(eager: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    # Styles shadow a weight while a module runs and are done with it when it returns: nothing that
    # selective checkpointing, traced into the same graph, would have to repeat in backward.
    nothing_to_replay = torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True)
    compiled = nothing_to_replay(torch.compile(eager, fullgraph=True, options=options))

    def forward(*args: Any, **kwargs: Any) -> Any:
        return compiled(*args, **kwargs) if torch.is_grad_enabled() else eager(*args, **kwargs)

    return forward


def async_tp_problems(compile: bool, tp: int, device_type: str) -> list[str]:
    """What asynchronous tensor parallelism lacks in a run; empty if nothing."""
    found = [] if compile else ["async_tp true is a pass of the compiler: use --compile true"]
    found += [] if tp > 1 else ["async_tp true has nothing to overlap with tp 1: use --async_tp false"]
    if device_type != "cuda":
        found.append("async_tp true needs GPUs that map each other's memory: use --async_tp false")
    return found


def compile_problems() -> list[str]:
    """What this machine lacks for compiling; empty if nothing. On a CPU the graphs become C++.

    Also imports the compiler, which takes seconds: once, if this is called before workers are forked.
    """
    import torch._inductor.compile_fx  # noqa: F401  # for its effect on the forks
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return ["compile true needs a C++ compiler: install g++, or name one in CXX, or use --compile false"]
    return []
