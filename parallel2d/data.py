"""Tokens on disk, one global order, this rank's share.

There is no iterator and no state: a batch is a function of (seed, position), where position counts
the sequences consumed since the start. So a resume needs one number, on any mesh.
"""

import functools
import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from parallel2d.errors import UserError

Tokens = NDArray[np.integer]


def load_tokens(path: str | None) -> Tokens:
    """All tokens, in a fixed order.

    Args:
        path: a `.bin` file (uint16 tokens, memory-mapped) or `.npy` file (1-D, memory-mapped); any
            other file, or all files below a folder, read as bytes; None: the source text of the
            running Python's standard library, as bytes.
    """
    if path is None:
        return _bytes_of(_standard_library_sources())
    file = Path(path)
    if not path or not file.exists():
        raise UserError(f"data.path {path!r} does not exist")
    if file.is_dir():
        return _bytes_of(sorted(f for f in file.rglob("*") if f.is_file()))
    if file.stat().st_size == 0:
        raise UserError(f"data.path {path!r} is empty")
    if file.suffix == ".bin":
        if file.stat().st_size % 2:
            raise UserError(f"data.path {path!r} has an odd number of bytes, and uint16 tokens have two each")
        return np.memmap(file, dtype=np.uint16, mode="r")
    if file.suffix == ".npy":
        try:
            tokens = np.load(file, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError, OSError) as error:
            raise UserError(f"data.path {path!r} is not a .npy file: {error}") from None
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise UserError(f"data.path {path!r} holds {tokens.dtype}{tokens.shape}, not 1-D integer tokens")
        return tokens
    return _bytes_of([file])


def _standard_library_sources() -> list[Path]:
    skipped = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    found = []
    for folder, below, names in os.walk(sysconfig.get_path("stdlib")):
        below[:] = [name for name in below if name not in skipped]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found)


def _bytes_of(files: list[Path]) -> Tokens:
    return np.frombuffer(b"".join(f.read_bytes() for f in files), dtype=np.uint8)


@dataclass(frozen=True)
class Corpus:
    """Tokens cut into windows of seq_len (+ 1, the last target); the end of the text is held out.

    Args:
        tokens: 1-D.
        seq_len: tokens per sequence.
        vocab_size: every token must be below it.
        val_fraction: share of the text, at its end, that is only for validation.
        seed: of the order.
    """

    tokens: Tokens
    seq_len: int
    vocab_size: int
    val_fraction: float
    seed: int

    def __post_init__(self) -> None:
        if self.num_train < 1 or self.num_val < 1:
            raise UserError(
                f"{len(self.tokens)} tokens make {max(self.num_train, 0)} training and "
                f"{max(self.num_val, 0)} validation sequences of data.seq_len {self.seq_len}: "
                f"give more text or a smaller seq_len"
            )

    @property
    def split(self) -> int:
        """Index of the first token held out."""
        return int(len(self.tokens) * (1 - self.val_fraction))

    @property
    def num_train(self) -> int:
        """Training sequences per epoch."""
        return (self.split - 1) // self.seq_len

    @property
    def num_val(self) -> int:
        return (len(self.tokens) - self.split - 1) // self.seq_len

    def fingerprint(self) -> str:
        """Changes with the sequences or their order: text (length, dtype, ends), seq_len, split, seed."""
        ends = self.tokens[: 1 << 20].tobytes() + self.tokens[-(1 << 20) :].tobytes()
        facts = (
            f"{len(self.tokens)} {self.tokens.dtype} {self.seq_len} {self.val_fraction} {self.seed}".encode()
        )
        return hashlib.blake2b(facts + ends, digest_size=8).hexdigest()

    def prompt(self, text: str) -> list[int]:
        """The text's bytes; the first held-out tokens where tokens are not bytes, or not all of them."""
        ids = list(text.encode())
        usable = self.tokens.dtype == np.uint8 and max(ids) < self.vocab_size
        return ids if usable else self.tokens[self.split :][:16].tolist()

    def decode(self, ids: list[int]) -> str:
        """Text where tokens are bytes, else the numbers."""
        if self.tokens.dtype != np.uint8:
            return " ".join(map(str, ids))
        # A vocabulary larger than 256 has ids that are no byte.
        return b"".join(bytes([i]) if i < 256 else b"?" for i in ids).decode(errors="replace")

    def unigram_loss(self) -> float:
        """Held-out nats per token of a model that knows only the training text's token frequencies.

        Counted on at most 2^24 tokens of each part.
        """
        train, held_out = self.tokens[: self.split][: 1 << 24], self.tokens[self.split :][: 1 << 24]
        self._require_known(train)
        self._require_known(held_out)
        counts = np.bincount(train, minlength=self.vocab_size) + 1.0
        return float(-np.log(counts / counts.sum())[held_out].mean())

    def train_batch(self, positions: range) -> tuple[Tensor, Tensor]:
        """Sequences of the endless shuffled stream, each once per epoch: ids (b, s), targets (b, s)."""
        return self._batch([self._train_start(position) for position in positions])

    def val_batch(self, positions: range) -> tuple[Tensor, Tensor]:
        """Held-out sequences, in order, starting over at the end: ids (b, s), targets (b, s)."""
        return self._batch([self.split + (p % self.num_val) * self.seq_len for p in positions])

    def _require_known(self, tokens: Tokens) -> None:
        """A sharded embedding would answer an id outside the vocabulary with zeros, silently."""
        for token in (tokens.min(), tokens.max()):
            if not 0 <= token < self.vocab_size:
                raise UserError(f"the data holds token {token}, outside model.vocab_size {self.vocab_size}")

    def _train_start(self, position: int) -> int:
        epoch, index = divmod(position, self.num_train)
        return int(_order(self.seed, epoch, self.num_train)[index]) * self.seq_len

    def _batch(self, starts: list[int]) -> tuple[Tensor, Tensor]:
        rows = np.stack([self.tokens[start : start + self.seq_len + 1] for start in starts]).astype(np.int64)
        self._require_known(rows)
        whole = torch.from_numpy(rows)
        return whole[:, :-1].contiguous(), whole[:, 1:].contiguous()


@functools.lru_cache(maxsize=2)
def _order(seed: int, epoch: int, size: int) -> NDArray[np.int64]:
    return np.random.default_rng((seed, epoch)).permutation(size)


def rows_of_rank(batch: Tensor, rank: int, ranks: int, fill: int = 0) -> Tensor:
    """(b, …) -> this rank's ⌈b/ranks⌉ rows; where the batch has ended, rows of `fill`.

    Every rank gets as many, because every rank must take part in every collective: the last batch of
    an epoch may be smaller than dp. Targets are filled with -100, which counts nothing.
    """
    share = -(-len(batch) // ranks)
    mine = batch[rank * share : (rank + 1) * share]
    return torch.cat((mine, mine.new_full((share - len(mine), *batch.shape[1:]), fill)))


@dataclass(frozen=True)
class RankData:
    """What one rank trains on: its part of each global batch, in micro-batches, on its device.

    Only the data-parallel coordinate matters: tp peers get the same sequences.

    Args:
        corpus: the sequences.
        global_batch: sequences per step, over all ranks; a multiple of ranks × micro_batch.
        micro_batch: sequences per forward.
        rank: data-parallel coordinate.
        ranks: size of the data-parallel axis.
        device: of the batches.
    """

    corpus: Corpus
    global_batch: int
    micro_batch: int
    rank: int
    ranks: int
    device: torch.device

    def train_step(self, position: int) -> list[tuple[Tensor, Tensor]]:
        """Micro-batches of the step that takes sequences [position, position + global_batch)."""
        return [self._to_device(self.corpus.train_batch(part)) for part in self._parts(position)]

    def validation(self, num_batches: int) -> list[tuple[Tensor, Tensor]]:
        """Micro-batches of the first num_batches global batches of the held-out text."""
        firsts = [i * self.global_batch for i in range(num_batches)]
        return [
            self._to_device(self.corpus.val_batch(part)) for first in firsts for part in self._parts(first)
        ]

    def _parts(self, position: int) -> list[range]:
        share = self.global_batch // self.ranks
        start = position + self.rank * share
        return [range(i, i + self.micro_batch) for i in range(start, start + share, self.micro_batch)]

    def _to_device(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        ids, targets = batch
        if self.device.type == "cuda":
            # From pinned memory the copy runs beside what the GPU still computes, and nobody waits for it.
            ids, targets = ids.pin_memory(), targets.pin_memory()
        return ids.to(self.device, non_blocking=True), targets.to(self.device, non_blocking=True)
