"""Rows of published runs: how they are read, and which of them are compared with the planner.

A row is a dict of texts, as the CSV has them; whatever is asked of it goes by its columns.
"""

import csv
import math
import re
from collections.abc import Callable
from pathlib import Path

from parallel2d.planner.hardware import find_gpu, load_gpus

Row = dict[str, str]
GPUS = load_gpus()

TEXTS = ("source", "model", "gpu", "ac", "compile", "float8", "async_tp", "optimizer", "notes")
SHAPE = ("n_layers", "dim", "ffn_dim", "n_heads", "vocab")
MESH = ("dp_replicate", "dp_shard", "tp")
SIZES = (*SHAPE, "n_kv_heads", "seq_len", "local_batch", "n_gpus", *MESH, "pp", "cp")
MEASURED = ("tps_per_gpu", "peak_mem_gib")
COLUMNS = (*TEXTS, *SIZES, "params_b", *MEASURED)

_NOT_STATED = ("", "-", "?", "n/a", "na", "nan", "none", "null", "unknown")
# {checkpointing in a row: ours}; two where every second block is checkpointed.
CHECKPOINTING = {
    "none": ("none",),
    "full": ("full",),
    "selective": ("selective",),
    "selective_op": ("selective",),
    "selective_layer": ("none", "full"),
}
# There is no column for the program; its source or the notes tell it.
_OTHER_PROGRAMS = ("graph_trainer", "megatron", "nanotron", "deepspeed")


def read_rows(file: Path) -> tuple[list[Row], list[str]]:
    """All rows, "" where a column says nothing, and the columns that the file lacks."""
    with file.open(newline="", encoding="utf-8-sig", errors="replace") as lines:
        read = csv.DictReader(lines)
        lacks = [column for column in COLUMNS if column not in (read.fieldnames or ())]
        return [{column: (row.get(column) or "").strip() for column in COLUMNS} for row in read], lacks


def is_stated(row: Row, column: str) -> bool:
    """ "none" is a kind of checkpointing, and elsewhere nothing."""
    return row[column].lower() not in _NOT_STATED or (column == "ac" and row[column].lower() == "none")


def number(row: Row, column: str, default: float = 0.0) -> float:
    """A column's value, the default where it is not stated; ValueError where it is no number."""
    if not is_stated(row, column):
        return default
    value = float(re.sub(r"(?<=\d),(?=\d{3})", "", row[column]))
    if not math.isfinite(value):
        raise ValueError(f"{column} {row[column]!r} is not finite")
    return value


def size(row: Row, column: str, default: int = 1) -> int:
    return int(number(row, column, default))


def is_set(row: Row, column: str) -> bool:
    return row[column].lower() in ("1", "1.0", "true", "yes")


def ran_out_of_memory(row: Row) -> bool:
    return "OOM" in row["notes"] and not any(number(row, column) for column in MEASURED)


def _is_readable(row: Row) -> bool:
    try:
        return all(0 <= number(row, column) < 1e15 for column in ("params_b", *SIZES, *MEASURED))
    except ValueError:
        return False


def _are_whole(row: Row) -> bool:
    values = [number(row, column) for column in SIZES if is_stated(row, column)]
    return all(value >= 1 and value == int(value) for value in values)


def _are_stated(row: Row, *columns: str) -> bool:
    return all(is_stated(row, column) for column in columns)


def _ranks(row: Row) -> int:
    return math.prod(size(row, axis) for axis in MESH)


def _fits_heads(row: Row) -> bool:
    heads, tp = size(row, "n_heads"), size(row, "tp")
    return size(row, "dim") >= heads and heads % size(row, "n_kv_heads", heads) == 0 and heads % tp == 0


def _is_of_another_program(row: Row) -> bool:
    text = (row["source"] + row["notes"]).lower()
    return any(name in text for name in _OTHER_PROGRAMS)


def _needs_float8_of_a_gpu_without(row: Row) -> bool:
    gpu = find_gpu(row["gpu"], GPUS)
    return is_set(row, "float8") and gpu is not None and not gpu.flops_float8


# (why, the rule): the first that holds excludes the row; later ones may rely on the earlier.
EXCLUDED: list[tuple[str, Callable[[Row], bool]]] = [
    ("a number that cannot be read", lambda r: not _is_readable(r)),
    ("a size that is no positive whole number", lambda r: not _are_whole(r)),
    ("pipeline or context parallel", lambda r: size(r, "pp") != 1 or size(r, "cp") != 1),
    ("model's shape not stated", lambda r: not _are_stated(r, *SHAPE)),
    ("mesh not stated", lambda r: not _are_stated(r, "n_gpus", "dp_shard", "tp")),
    ("mesh is not the number of GPUs", lambda r: _ranks(r) != size(r, "n_gpus")),
    ("heads that tp or their own number does not divide", lambda r: not _fits_heads(r)),
    ("weights not sharded", lambda r: size(r, "dp_shard") == 1 and size(r, "dp_replicate") > 1),
    ("a part of the weights is trained", lambda r: "lora" in r["optimizer"].lower()),
    (
        "batch or checkpointing not stated",
        lambda r: not _are_stated(r, "local_batch", "ac", "seq_len"),
    ),
    ("checkpointing of another kind", lambda r: r["ac"].lower() not in CHECKPOINTING),
    ("not FSDP's eager hooks", _is_of_another_program),
    ("GPU not known", lambda r: find_gpu(r["gpu"], GPUS) is None),
    ("float8 on a GPU that has none", _needs_float8_of_a_gpu_without),
    (
        "nothing to compare",
        lambda r: not any(number(r, column) for column in MEASURED) and not ran_out_of_memory(r),
    ),
]


def why_excluded(row: Row) -> str | None:
    return next((why for why, rule in EXCLUDED if rule(row)), None)
