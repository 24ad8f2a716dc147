"""How two sets of tensors differ by name and shape, for people."""

from collections.abc import Mapping, Sequence

_SHOWN = 10


def mismatches(expected: Mapping[str, Sequence[int]], found: Mapping[str, Sequence[int]]) -> list[str]:
    """A line for each kind of difference: its count and the first ten, with shapes. [] if there is none."""
    faults = {
        "missing": [f"{n} {list(s)}" for n, s in expected.items() if n not in found],
        "unexpected": [f"{n} {list(s)}" for n, s in found.items() if n not in expected],
        "of another shape": [
            f"{n} {list(found[n])} instead of {list(s)}"
            for n, s in expected.items()
            if n in found and tuple(found[n]) != tuple(s)
        ],
    }
    return [
        f"{len(of)} {fault}: {', '.join(sorted(of)[:_SHOWN])}{', …' if len(of) > _SHOWN else ''}"
        for fault, of in faults.items()
        if of
    ]
