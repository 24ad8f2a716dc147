"""What a comparison of two runs found, for people and as data."""

import math
from dataclasses import asdict, dataclass
from typing import Any

TOLERANCE = 1e-9
_SHOWN = 10


@dataclass(frozen=True)
class Difference:
    """Of one parameter: largest error, relative to its largest value, of first gradient and last weight."""

    parameter: str
    plan_entry: str
    gradient: float
    weight: float


@dataclass(frozen=True)
class Report:
    """Largest relative errors of a mesh against one process, over all steps.

    place: where a difference begins, in words; empty where there is none.
    """

    mesh: str
    steps: int
    loss: float
    grad_norm: float
    parameters: list[Difference]
    place: str = ""

    @property
    def same(self) -> bool:
        return not self.place and not self.differing and max(self.loss, self.grad_norm) < TOLERANCE

    @property
    def differing(self) -> list[Difference]:
        """Parameters above the tolerance; the worst gradients first."""
        found = [p for p in self.parameters if not max(p.gradient, p.weight) < TOLERANCE]
        return sorted(found, key=lambda p: -p.gradient)

    def worst(self, what: str) -> tuple[float, str]:
        """(largest error, its parameter); what: "gradient" or "weight"."""
        return max(((getattr(p, what), p.parameter) for p in self.parameters), default=(0.0, ""))

    def as_dict(self) -> dict[str, Any]:
        """For JSON: `parameters` are those that differ."""
        found = {
            "same": self.same,
            "tolerance": TOLERANCE,
            "mesh": self.mesh,
            "steps": self.steps,
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "gradients": self.worst("gradient")[0],
            "weights": self.worst("weight")[0],
            "place": self.place,
            "parameters": [finite(asdict(p)) for p in self.differing],
        }
        return finite(found)

    def __str__(self) -> str:
        if not self.parameters:
            return f"{self.mesh} against one process\n{self.place}\nNOT the same numbers"
        rows = [
            ("loss", self.loss, ""),
            ("gradient norm", self.grad_norm, ""),
            ("gradients of step 1", *self.worst("gradient")),
            (f"weights after step {self.steps}", *self.worst("weight")),
        ]
        lines = [f"{self.mesh} against one process, float64{'largest relative error':>28}"]
        lines += [f"{what:38}{error:>12.1e}   {where}".rstrip() for what, error, where in rows]
        lines += self._differing_lines()
        verdict = "same numbers" if self.same else "NOT the same numbers"
        return "\n".join([*lines, f"{verdict} (tolerance {TOLERANCE:.0e})"])

    def _differing_lines(self) -> list[str]:
        lines = self.place.split("; ") if self.place else []
        if self.differing:
            lines.append(f"{'parameter that differs':38}{'gradient':>12}{'weight':>12}   decided by")
        wrong = [p for p in self.differing if not p.gradient < TOLERANCE] or self.differing
        for p in wrong[:_SHOWN]:
            lines.append(f"{p.parameter:38}{p.gradient:>12.1e}{p.weight:>12.1e}   {p.plan_entry}")
        if len(wrong) > _SHOWN:
            lines.append(f"… and {len(wrong) - _SHOWN} more")
        if len(self.differing) > len(wrong):
            lines.append(
                f"and the weights of {len(self.differing) - len(wrong)} more, whose gradients began right"
            )
        return lines


def finite(found: dict[str, Any]) -> dict[str, Any]:
    """JSON has neither infinity nor NaN: None stands for them."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in found.items()}


def relative_error(ours: float, theirs: float) -> float:
    """|ours - theirs| / |theirs|; infinity where either is not a number, which would compare as smaller."""
    error = abs(ours - theirs) / max(abs(theirs), 1e-30)
    return error if math.isfinite(error) else math.inf
