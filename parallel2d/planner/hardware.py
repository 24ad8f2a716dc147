"""GPUs: hardware.yaml, and a user's own file in the same form."""

import dataclasses
import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import yaml

from parallel2d.errors import UserError

GIB = 2**30
_OURS = Path(__file__).with_name("hardware.yaml")


@dataclass(frozen=True)
class Reached:
    """Parts of the peaks that runs reach; hardware.yaml says of what each is one."""

    arithmetic: float
    attention: float
    network: float
    float8: float
    bandwidth: float


_PARTS = tuple(f.name for f in dataclasses.fields(Reached))


@dataclass(frozen=True)
class Gpu:
    """One entry of hardware.yaml, where the fields are explained."""

    name: str
    memory_gib: float
    flops: float
    flops_float8: float
    bandwidth: float
    node_bandwidth: float
    net_bandwidth: float
    reached: Reached
    names: tuple[str, ...] = ()
    fitted_on: str = ""

    @property
    def memory_bytes(self) -> float:
        return self.memory_gib * GIB


@dataclass(frozen=True)
class Cluster:
    """A kind of GPU, how many a node has, and what each has of network to other nodes."""

    gpu: Gpu
    gpus_per_node: int = 8
    net_bandwidth: float = field(default=0.0)

    @classmethod
    def of(cls, gpu: Gpu, gpus_per_node: int = 8, network_gbps: float | None = None) -> "Cluster":
        """network_gbps: of a node, gigabits per second in each direction; default: hardware.yaml's."""
        if gpus_per_node < 1:
            raise UserError(f"--gpus-per-node {gpus_per_node} is not a positive number")
        if network_gbps is not None and not network_gbps > 0:
            raise UserError(f"--network-gbps {network_gbps} is not a positive number")
        of_gpu = gpu.net_bandwidth if network_gbps is None else network_gbps * 1e9 / 8 / gpus_per_node
        return cls(gpu, gpus_per_node, of_gpu)


def load_gpus(own: Path | None = None) -> dict[str, Gpu]:
    """{name: Gpu} of hardware.yaml, with a user's file over it."""
    entries = _read(_OURS)
    if own:
        entries |= _read(own)
    return {name: _gpu(name, _with_bases(name, entries)) for name in entries}


def find_gpu(name: str, gpus: Mapping[str, Gpu]) -> Gpu | None:
    """The entry of that name, or the one with the longest name of which all pieces are in it."""
    if name.lower() in gpus:
        return gpus[name.lower()]
    fits = [(len(alias), gpu) for gpu in gpus.values() for alias in gpu.names if _contains(name, alias)]
    return max(fits, key=lambda fit: fit[0])[1] if fits else None


def require_gpu(name: str, gpus: Mapping[str, Gpu]) -> Gpu:
    gpu = find_gpu(name, gpus)
    if gpu is None:
        near = difflib.get_close_matches(name.lower(), gpus, n=3, cutoff=0.4) or list(gpus)
        raise UserError(
            f"gpu {name!r} is not known: nearest names: {', '.join(near)} (all: {', '.join(gpus)}; your own: "
            f"--hardware FILE, see docs/planner.md)"
        )
    return gpu


def _contains(name: str, alias: str) -> bool:
    """All pieces of the alias, none of them inside a longer word or number: B200 is not in GB200."""
    return all(
        re.search(rf"(?<![a-z0-9]){re.escape(piece)}(?![a-z0-9])", re.sub(r"(\d)gb", r"\1 gb", name.lower()))
        for piece in alias.lower().split()
    )


def _read(path: Path) -> dict[str, dict[str, Any]]:
    if not path.is_file():
        raise UserError(f"--hardware {str(path)!r} is not a file")
    try:
        read = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not YAML: {error}") from None
    if not isinstance(read, dict) or not all(isinstance(entry, dict) for entry in read.values()):
        raise UserError(f"{path} is not a mapping of names to entries (docs/planner.md shows one)")
    return {str(name).lower(): entry for name, entry in read.items()}


def _with_bases(name: str, entries: Mapping[str, Any], seen: tuple[str, ...] = ()) -> dict[str, Any]:
    """The entry over the one that it is like; what that was fitted on it was not fitted on itself."""
    entry = dict(entries[name])
    base = entry.pop("like", None)
    if not isinstance(entry.get("reached", {}), dict):
        raise UserError(f"gpu {name}: reached must be a mapping of {', '.join(_PARTS)}")
    if base is None:
        return entry
    base, others = str(base).lower(), [other for other in entries if other not in (*seen, name)]
    if base not in others:
        raise UserError(f"gpu {name}: like {base!r} is no other entry (these are: {', '.join(others)})")
    under = _with_bases(base, entries, (*seen, name)) | {"fitted_on": ""}
    return {**under, **entry, "reached": {**under.get("reached", {}), **entry.get("reached", {})}}


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e30


def _gpu(name: str, entry: dict[str, Any]) -> Gpu:
    """One entry, checked."""
    known = {f.name for f in dataclasses.fields(Gpu)} - {"name"}
    numbers = known - {"names", "fitted_on", "reached"}
    reached = entry.get("reached", {})
    found = [f"{key} is not known (these are: {', '.join(sorted(known))})" for key in entry.keys() - known]
    found += [f"{key} is missing" for key in sorted(numbers - entry.keys())]
    found += [f"reached.{key} is missing or unknown" for key in sorted(set(_PARTS) ^ set(reached))]
    values = {**{key: entry.get(key) for key in numbers}, **{f"reached.{k}": v for k, v in reached.items()}}
    found += [
        f"{key} {value!r} is not a number above 0 (YAML reads 989e12 as text: write 989.0e+12)"
        for key, value in values.items()
        if key in entry | {f"reached.{k}": 0 for k in reached}
        and not (_is_number(value) and (value > 0 or (key == "flops_float8" and value == 0)))
    ]
    # More than the peak is no fraction of it; a fit may end a little above.
    found += [
        f"reached.{k} {v} is a fraction, at most 1.5" for k, v in reached.items() if _is_number(v) and v > 1.5
    ]
    names = entry.get("names", [])
    if not (isinstance(names, list) and all(isinstance(n, str) and n.strip() for n in names)):
        found.append(f"names {names!r} is not a list of names")
    if found:
        raise UserError("\n".join(f"gpu {name}: {line}" for line in found))
    return Gpu(
        name,
        **{key: float(entry[key]) for key in numbers},
        reached=Reached(**{key: float(value) for key, value in reached.items()}),
        names=tuple(names),
        fitted_on=str(entry.get("fitted_on", "")),
    )
