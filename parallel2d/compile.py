"""torch.compile, unit by unit: each unit's forward and backward as one graph, collectives included."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn


def apply_compile(units: Sequence[nn.Module]) -> None:
    """Replace each unit's forward by a compiled one, in place; units of one kind share the graph.

    The graph is made in the first call with gradients, once for each kind of unit and of input (a second
    length of sequences makes it dynamic in that dimension), and sends what eager code sends. A unit that
    is not one graph is an error of torch's. Without gradients units run as they are: a validation or a
    text would take longer to compile than to compute, and a text has another length with each token.

    https://docs.pytorch.org/docs/stable/generated/torch.compile.html
    """
    for unit in units:
        unit.forward = _compiled_for_training(unit.forward)


def _compiled_for_training(eager: Callable[..., Any]) -> Callable[..., Any]:
    # Styles shadow a weight while a module runs and are done with it when it returns: nothing that
    # selective checkpointing, traced into the same graph, would have to repeat in backward.
    nothing_to_replay = torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True)
    compiled = nothing_to_replay(torch.compile(eager, fullgraph=True))

    def forward(*args: Any, **kwargs: Any) -> Any:
        return compiled(*args, **kwargs) if torch.is_grad_enabled() else eager(*args, **kwargs)

    return forward


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
