"""A plan {glob over module names: style} -> strict match -> parallelize_module. Its only caller."""

import difflib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.nn.modules.dropout import _DropoutNd

from parallel2d.errors import UserError
from parallel2d.local_weights import Owned, show_local
from parallel2d.styles import (
    SEQUENCE_STYLES,
    STYLE_NAMES,
    Colwise,
    ColwiseLocal,
    GatherSequence,
    LocalStyle,
    Replicated,
    style_of,
)
from parallel2d.ties import find_ties, restore_ties

Plan = Mapping[str, str | ParallelStyle]


def apply_tensor_parallel(
    model: nn.Module,
    tp_mesh: DeviceMesh,
    plan: Plan,
    units: Sequence[nn.Module] = (),
    methods: Sequence[str] = (),
) -> None:
    """Shard the model's weights over tp, in place, and give the named modules their styles' forward.

    Modules that the plan does not name keep whole weights (style `replicated`), as DTensors too, so
    that every parameter lives on the same mesh; a plan that splits the sequence must name them all.
    Parameters tied before stay tied. On a tp axis of size 1 the plan is only checked. No communication.

    Args:
        plan: globs over dotted module names, `*` standing for one component, "" for the model
            itself; values are names of `styles.STYLE_NAMES` or ParallelStyle objects. A glob that matches
            nothing, or two that match the same module, are errors.
        units: what FSDP will gather one at a time. Each shows its modules their shares while it runs,
            the model those of all modules outside units.
        methods: of the model, besides forward, that run modules outside units.
    """
    styles = match_plan(model, plan)
    if tp_mesh.size() == 1:
        return
    for name, module in model.named_modules():
        if name not in styles and any(True for _ in module.parameters(recurse=False)):
            styles[name] = Replicated()
    styles_of = {model.get_submodule(name): style for name, style in styles.items()}
    ties = find_ties(model)
    for name, style in styles.items():
        try:
            parallelize_module(model.get_submodule(name), tp_mesh, style)
        except UserError as error:
            raise UserError(f"{name or 'the model itself'}: {error}") from None
    restore_ties(ties)
    of_units = {module for unit in units for module in unit.modules()}
    for unit in units:
        _show_local(unit, list(unit.modules()), styles_of, tp_mesh)
    outside = [module for module in model.modules() if module not in of_units]
    _show_local(model, outside, styles_of, tp_mesh, methods)


def _show_local(
    caller: nn.Module,
    modules: Sequence[nn.Module],
    styles: Mapping[nn.Module, ParallelStyle],
    tp_mesh: DeviceMesh,
    methods: Sequence[str] = (),
) -> None:
    """Whatever FSDP gathers together is shown together, and its partial gradients are summed together."""
    owned = [
        Owned(module, name, partial=name in style.partial(module, tp_mesh))
        for module in modules
        if isinstance(style := styles.get(module), LocalStyle)
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]
    for name in ("forward", *methods):
        setattr(caller, name, show_local(getattr(caller, name), owned, tp_mesh))


def match_plan(model: nn.Module, plan: Plan) -> dict[str, ParallelStyle]:
    """{module name: style object} for every module the plan names; one UserError with all its faults."""
    names = [name for name, _ in model.named_modules() if name]
    matched: dict[str, str] = {}
    faults = []
    for glob, style in plan.items():
        if isinstance(style, str) and style_of(style) is None:
            faults.append(f"plan entry {glob!r}: unknown style {style!r} (known: {', '.join(STYLE_NAMES)})")
        hits = [name for name in names if _matches(name, glob)] if glob else [""]
        if not hits:
            near = difflib.get_close_matches(glob, names, n=3, cutoff=0.4)
            faults.append(
                f"plan entry {glob!r} matches no module (nearest names: {', '.join(near) or 'none'})"
            )
        faults += [f"plan entries {matched[n]!r} and {glob!r} both match {n!r}" for n in hits if n in matched]
        matched.update({name: glob for name in hits})
    if faults:
        raise UserError("\n".join(faults))
    styles = {name: _style(plan[glob]) for name, glob in matched.items()}
    _require_gathers(styles)
    _require_all_named(model, styles)
    return styles


def _require_gathers(styles: Mapping[str, ParallelStyle]) -> None:
    """A linear's input gradient is summed once: by the gather around it or by the linear itself."""
    for name, style in styles.items():
        parts = name.split(".")
        around = [styles.get(".".join(parts[:n])) for n in range(1, len(parts))]
        gathered = any(isinstance(s, GatherSequence) for s in around)
        if isinstance(style, ColwiseLocal) and not gathered:
            raise UserError(f"{name}: style colwise_local needs a gather_sequence around it, or use colwise")
        if isinstance(style, Colwise) and not isinstance(style, ColwiseLocal) and gathered:
            raise UserError(f"{name}: inside a gather_sequence the style is colwise_local, not colwise")


def _require_all_named(model: nn.Module, styles: Mapping[str, ParallelStyle]) -> None:
    """Where activations are split by sequence, a weight that is only `replicated` gets a wrong gradient,
    and dropout that no style knows of would repeat its mask on each share."""
    splitting = next((name for name, style in styles.items() if isinstance(style, SEQUENCE_STYLES)), None)
    if splitting is None:
        return
    unnamed = [
        name or "the model itself"
        for name, module in model.named_modules()
        if name not in styles
        and (any(True for _ in module.parameters(recurse=False)) or isinstance(module, _DropoutNd))
    ]
    if unnamed:
        raise UserError(
            f"a plan that splits the sequence (as for {splitting or 'the model itself'}) must name every "
            f"module with parameters, as `sequence` (it sees some positions), `per_head` (some heads) or "
            f"`replicated` (the same on each rank), and every dropout, as `sharded_dropout` or `replicated`; "
            f"it leaves out {', '.join(unnamed[:10])}{', …' if len(unnamed) > 10 else ''}"
        )


def entry_of(plan: Plan, name: str) -> str:
    """The entry of a plan that decides for a module, for people."""
    globs = [glob for glob in plan if (_matches(name, glob) if glob else not name)]
    if not globs:
        return "not in the plan: replicated"
    style = plan[globs[0]]
    return f"plan entry {globs[0]!r}: {style if isinstance(style, str) else type(style).__name__}"


def _matches(name: str, glob: str) -> bool:
    parts, globs = name.split("."), glob.split(".")
    return len(parts) == len(globs) and all(map(fnmatchcase, parts, globs))


def _style(style: str | ParallelStyle) -> ParallelStyle:
    found = style_of(style) if isinstance(style, str) else style
    assert found is not None, "match_plan has refused unknown names"
    return found
