"""Our model with the weights of a Hugging Face folder against results computed elsewhere.

`python -m parallel2d.verify.hf FOLDER RESULTS.npz` computes them with transformers, if installed: in
a process of its own, because transformers looks for process groups and starts threads.
"""

import math
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.data import rows_of_rank
from parallel2d.errors import UserError
from parallel2d.loss import IGNORE_INDEX, VocabShard, cross_entropy_sum
from parallel2d.mesh import dp_rank, dp_size, sum_over_dp
from parallel2d.optim import gradient_norm
from parallel2d.verify.report import relative_error

# float32 in another order of sums; logits relative to the largest, where that is above 1.
LOGITS_TOLERANCE, SCALAR_TOLERANCE = 1e-4, 1e-5


@dataclass(frozen=True)
class Expected:
    """What somebody else computed: ids (b, s), logits (b, s, v), mean next-token loss, gradient norm.

    What is None is not compared.
    """

    ids: Tensor
    logits: Tensor | None
    loss: float | None
    grad_norm: float | None

    @property
    def dtype(self) -> torch.dtype:
        """To compute in, as they did: float64 where their logits are, else float32."""
        wide = self.logits is not None and self.logits.dtype == torch.float64
        return torch.float64 if wide else torch.float32

    def require_vocabulary(self, size: int) -> None:
        """One UserError if ids or logits are of another vocabulary."""
        if self.ids.min() < 0 or self.ids.max() >= size:
            raise UserError(f"input_ids from {self.ids.min()} to {self.ids.max()}: the vocabulary has {size}")
        if self.logits is not None and self.logits.shape[-1] != size:
            raise UserError(f"logits of {self.logits.shape[-1]} ids: the model's vocabulary has {size}")

    def padded_length(self, tp: int) -> int:
        """Positions of a sequence that tp can split."""
        return -(-self.ids.shape[1] // tp) * tp


def read_expected(file: Path) -> Expected:
    """An .npz with input_ids and any of logits, loss, grad_norm."""
    try:
        arrays = dict(np.load(file, allow_pickle=False))
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"--expected {str(file)!r} is not an .npz file of plain arrays: {error}") from None
    if "input_ids" not in arrays:
        raise UserError(f"--expected {str(file)!r} has no input_ids, but {', '.join(arrays)}")
    ids, logits = arrays["input_ids"], arrays.get("logits")
    if ids.dtype.kind not in "iu" or ids.ndim != 2 or ids.shape[0] < 1 or ids.shape[1] < 2:
        raise UserError(
            f"{str(file)!r}: input_ids {ids.dtype}{list(ids.shape)} are not ids (batch, length ≥ 2)"
        )
    if logits is not None and (logits.ndim != 3 or logits.shape[:2] != ids.shape):
        shapes = f"input_ids {list(ids.shape)}, logits {list(logits.shape)}"
        raise UserError(f"{str(file)!r}: {shapes}, not (batch, length[, vocabulary])")
    scalars = [
        _positive(file, name, arrays[name]) if name in arrays else None for name in ("loss", "grad_norm")
    ]
    if logits is None and scalars == [None, None]:
        raise UserError(f"--expected {str(file)!r} has none of logits, loss, grad_norm")
    if logits is not None and not np.isfinite(logits).all():
        raise UserError(f"{str(file)!r}: logits that are not finite compare with nothing")
    wide = None if logits is None else torch.from_numpy(logits)
    return Expected(torch.from_numpy(ids.astype(np.int64)), wide, *scalars)


def _positive(file: Path, name: str, value: Any) -> float:
    if value.ndim or not 0 < value < math.inf:
        raise UserError(f"{str(file)!r}: {name} {value} is not one positive number")
    return float(value)


def ask_transformers(folder: Path) -> Expected:
    """Logits, loss and gradient norm of random ids by transformers, on one process.

    In float64: real weights have large activations, for which float32's rounding hides what differs.
    """
    with tempfile.TemporaryDirectory() as scratch:
        results = Path(scratch, "results.npz")
        command = [sys.executable, "-m", "parallel2d.verify.hf", str(folder), str(results)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise UserError(
                f"transformers could not compute {folder}: give --expected, or pip install transformers\n"
                f"{done.stderr.strip()[-1000:]}"
            )
        return read_expected(results)


def compare(model: nn.Module, vocab_size: int, expected: Expected, mesh: DeviceMesh) -> dict[str, Any]:
    """Forward and backward of the model on the mesh against what is expected; the same on every rank.

    Rows are padded to a multiple of dp and positions to one of tp; causal attention keeps the padding
    out of sight and the loss does not count it. Besides what the model issues: a few small all-reduces.
    """
    longer = (0, expected.padded_length(mesh["tp"].size()) - expected.ids.shape[1])
    whole = F.pad(F.pad(expected.ids[:, 1:], (0, 1), value=IGNORE_INDEX), longer, value=IGNORE_INDEX)
    tokens = int((whole != IGNORE_INDEX).sum())
    place = (dp_rank(mesh), dp_size(mesh))
    ids = rows_of_rank(F.pad(expected.ids, longer), *place)
    targets = rows_of_rank(whole, *place, IGNORE_INDEX)
    mine = slice(dp_rank(mesh) * len(ids), (dp_rank(mesh) + 1) * len(ids))
    vocab = VocabShard.of(vocab_size, mesh["tp"])
    logits = model(ids)
    loss = cross_entropy_sum(logits, targets, vocab)
    (loss * (dp_size(mesh) / tokens)).backward()
    mean_loss = float(sum_over_dp(loss.detach().double(), mesh)) / tokens
    found = {
        "logits_max_abs_err": _largest_error(logits.detach(), expected, mine, vocab),
        "loss": mean_loss,
        "loss_rel_err": _relative(mean_loss, expected.loss),
        "grad_norm": (norm := float(gradient_norm(model.parameters()))),
        "grad_norm_rel_err": _relative(norm, expected.grad_norm),
    }
    return {"same": _is_same(found, expected), **found}


def _largest_error(logits: Tensor, expected: Expected, mine: slice, vocab: VocabShard) -> float | None:
    """Of this rank's rows and columns, then over all ranks. One all-reduce."""
    if expected.logits is None:
        return None
    theirs = expected.logits[mine, :, vocab.start : vocab.stop]
    error = torch.zeros((), dtype=torch.float64)
    if theirs.numel():
        ours = logits[: theirs.shape[0], : theirs.shape[1]]
        error = (ours - theirs).abs().max().double().nan_to_num(nan=math.inf, posinf=math.inf)
    dist.all_reduce(error, op=dist.ReduceOp.MAX)
    return error.item()


def _relative(ours: float, theirs: float | None) -> float | None:
    return None if theirs is None else relative_error(ours, theirs)


def _is_same(found: dict[str, Any], expected: Expected) -> bool:
    scale = 1.0 if expected.logits is None else max(1.0, expected.logits.abs().max().item())
    bounds = {
        "logits_max_abs_err": LOGITS_TOLERANCE * scale,
        "loss_rel_err": SCALAR_TOLERANCE,
        "grad_norm_rel_err": SCALAR_TOLERANCE,
    }
    return all(found[key] is None or found[key] <= bound for key, bound in bounds.items())


def _compute_with_transformers(folder: Path, results: Path) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    ).eval()
    # transformers gives a padding id's embedding no gradient; our batch has no padding.
    model.get_input_embeddings().padding_idx = None
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (2, 33), generator=draw)
    logits = model(ids).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    np.savez(results, input_ids=ids, logits=logits.detach(), loss=loss.item(), grad_norm=norm.item())


if __name__ == "__main__":
    _compute_with_transformers(Path(sys.argv[1]), Path(sys.argv[2]))
