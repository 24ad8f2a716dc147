"""Which parameters are trained."""

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from parallel2d.errors import UserError


def freeze(model: nn.Module, globs: Sequence[str]) -> None:
    """Set requires_grad by globs over parameter names, in place; call it before `parallelize`.

    `*` matches any characters, dots included. An entry that starts with `!` trains what it matches;
    later entries win over earlier ones, so that ["*", "!*norm*"] trains norms only. A tied parameter
    answers to each of its names. What no entry matches is left as it is.

    Raises UserError if an entry matches nothing or if nothing is left to train.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    faults = []
    for entry in globs:
        glob = entry.removeprefix("!")
        hits = [parameter for name, parameter in named if fnmatchcase(name, glob)]
        if not hits:
            words = {word for name, _ in named for word in (name, *name.split("."))}
            near = difflib.get_close_matches(glob.strip("*"), words, n=3, cutoff=0.4)
            faults.append(f"freeze: {entry!r} matches no parameter (nearest: {', '.join(near) or 'none'})")
        for parameter in hits:
            parameter.requires_grad_(entry.startswith("!"))
    if not faults and not any(parameter.requires_grad for _, parameter in named):
        faults.append(f"freeze {list(globs)} leaves nothing to train: end it with what stays, as '!*norm*'")
    if faults:
        raise UserError("\n".join(faults))
