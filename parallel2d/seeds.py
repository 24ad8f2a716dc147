"""Random seeds as functions of what they are for, so that no random state is ever saved or sent."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def seed_of(*key: int | str) -> int:
    """A 56-bit seed from the key's parts: equal keys, equal seeds; anything else, unrelated ones."""
    digest = hashlib.blake2b(":".join(map(str, key)).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")


@contextmanager
def random_branch(branch: int, device_type: str) -> Iterator[None]:
    """Inside, draws of this branch only; after it the stream goes on alike on all branches.

    The branch's seed is drawn from the stream itself, so that activation checkpointing, which puts
    the stream back to where it was, gets the same numbers a second time.
    """
    drawn = int(torch.randint(1 << 62, (), device="cpu"))
    devices = [torch.cuda.current_device()] if device_type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed_of(drawn, branch))
        yield
