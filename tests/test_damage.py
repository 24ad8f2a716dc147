"""A checkpoint that is not what was written is named, or loads its very numbers; nothing is executed."""

import os
import pickle
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from parallel2d.models.llama import LlamaConfig

from parallel2d import MeshShape, UserError, launch
from parallel2d.checkpoint.find import open_checkpoint
from parallel2d.checkpoint.intact import DamagedCheckpoint, Hash
from parallel2d.checkpoint.load import load_checkpoint
from parallel2d.checkpoint.manifest import read_manifest
from parallel2d.checkpoint.store import CheckpointStore
from tests.ranks import run_ranks
from tests.spoils import BOMB, SPOILS, Bomb, a_forged_fact, rename_a_file, sealed
from tests.test_checkpoint import build, whole

TINY = LlamaConfig(vocab_size=13, width=8, num_layers=1, num_heads=2, num_kv_heads=1, ffn_width=6)
NAME = "step-00000001"


def save_tiny(folder: str, shape: MeshShape) -> None:
    with launch.world(shape.world, "cpu", 60):
        model, optimizer = build(shape, TINY)
        model(torch.arange(12).view(1, 12)).square().mean().backward()
        optimizer.step()
        CheckpointStore(Path(folder)).save(1, model, optimizer, {"model": {}})


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """Of two ranks: two data files."""
    folder = tmp_path_factory.mktemp("good")
    run_ranks(2, save_tiny, str(folder), MeshShape(1, 2, 1))
    return folder / NAME


class Reader:
    """Loads checkpoints into one model again and again."""

    def __init__(self, good: str, shape: MeshShape) -> None:
        self.model, self.optimizer = build(shape, TINY)
        self.expected = self.load(Path(good))

    def load(self, folder: Path) -> dict[str, torch.Tensor]:
        self.optimizer.state.clear()
        for parameter in self.model.parameters():
            parameter.detach().fill_(-1)
        load_checkpoint(open_checkpoint(folder), self.model, self.optimizer)
        return whole(self.model, self.optimizer)

    def outcome(self, folder: Path) -> str:
        """The error's text, "same" or "WRONG NUMBERS"."""
        try:
            found = self.load(folder)
        except UserError as error:
            return str(error)
        same = found.keys() == self.expected.keys() and all(
            torch.equal(found[name], self.expected[name]) for name in found
        )
        return "same" if same else "WRONG NUMBERS"


def spoil_and_load(good: str, scratch: str, count: int) -> list[tuple[str, str, str]]:
    """(what was done, to which file, what came of it), `count` times."""
    os.environ[BOMB] = f"{scratch}/bomb"
    found = []
    with launch.world(1, "cpu", 60):
        reader = Reader(good, MeshShape())
        for seed in range(count):
            spoil, dice = (SPOILS[seed % len(SPOILS)], random.Random(seed))
            folder = Path(scratch) / f"{seed}" / NAME
            shutil.copytree(good, folder)
            name = spoil(folder, dice)
            found.append((spoil.__name__, name, reader.outcome(folder)))
    return found


def test_200_spoiled_checkpoints_are_named_or_harmless(good, tmp_path):
    (found,) = run_ranks(1, spoil_and_load, str(good), str(tmp_path), 200)
    for spoil, name, outcome in found:
        assert outcome != "WRONG NUMBERS" and (outcome == "same" or name in outcome), (spoil, name, outcome)
    harmless = Counter(spoil for spoil, _, outcome in found if outcome == "same")
    # Bits of DCP's own index and of what torch.save puts around the numbers are not read.
    assert set(harmless) <= {"flip_a_bit", "a_key_twice"}, harmless
    assert harmless["flip_a_bit"] < len([f for f in found if f[0] == "flip_a_bit"])
    assert not (tmp_path / "bomb").exists()


def forge_and_load(good: str, scratch: str, count: int) -> list[str]:
    found = []
    with launch.world(1, "cpu", 60):
        reader = Reader(good, MeshShape())
        for seed in range(count):
            folder = Path(scratch) / f"{seed}" / NAME
            shutil.copytree(good, folder)
            a_forged_fact(folder, random.Random(seed))
            found.append(reader.outcome(folder))
    return found


def test_a_forged_manifest_is_refused_or_read_as_numbers(good, tmp_path):
    """A forger can give other numbers; no other exception, no hang, nothing outside the folder."""
    (found,) = run_ranks(1, forge_and_load, str(good), str(tmp_path), 100)
    assert Counter(outcome == "same" for outcome in found)[False] > 50


@pytest.mark.parametrize(
    "name", ["../outside", "/etc/passwd", "a/b", "", ".", "..", "\ud800", "x" * 300, "\0"]
)
def test_no_name_leads_out_of_the_folder(good, tmp_path, name):
    folder = tmp_path / NAME
    shutil.copytree(good, folder)
    shutil.copy(good / "__0_0.distcp", tmp_path / "outside")
    sealed(folder, lambda content: rename_a_file(content, name))
    with pytest.raises(DamagedCheckpoint):
        open_checkpoint(folder)


def load_bombs(good: str, scratch: str, file: str, seal: bool) -> str:
    """A pickle in place of a file, of its size; with `seal` the manifest has its hash."""
    os.environ[BOMB] = f"{scratch}/bomb"
    with launch.world(1, "cpu", 60):
        reader = Reader(good, MeshShape())
        folder = Path(scratch) / NAME
        shutil.copytree(good, folder)
        data = pickle.dumps(Bomb()).ljust((folder / file).stat().st_size, b"\0")
        (folder / file).write_bytes(data)
        if seal:
            sealed(folder, lambda content: content["files"][file].update(xxh3_128=Hash(data).hexdigest()))
        return reader.outcome(folder)


@pytest.mark.parametrize("seal", [False, True], ids=["plain", "sealed"])
@pytest.mark.parametrize(
    ("file", "outcome"), [(".metadata", "same"), ("__0_0.distcp", "__0_0.distcp is damaged")]
)
def test_a_hostile_pickle_is_not_unpickled(good, tmp_path, file, outcome, seal):
    (found,) = run_ranks(1, load_bombs, str(good), str(tmp_path), file, seal)
    assert outcome in found
    assert not (tmp_path / "bomb").exists()


def load_on_two(folder: str, shape: MeshShape) -> str:
    with launch.world(2, "cpu", 60):
        model, optimizer = build(shape, TINY)
        with pytest.raises(DamagedCheckpoint) as caught:
            load_checkpoint(open_checkpoint(Path(folder)), model, optimizer)
        return str(caught.value)


@pytest.mark.parametrize("shape", [MeshShape(1, 2, 1), MeshShape(1, 1, 2)], ids=str)
def test_what_one_rank_finds_all_ranks_say(good, tmp_path, shape):
    """The last byte of a file's last block: one rank reads it."""
    folder = tmp_path / NAME
    shutil.copytree(good, folder)
    blocks = [b for t in read_manifest(good).tensors.values() for b in t.blocks if b.file == "__1_0.distcp"]
    data = bytearray((folder / "__1_0.distcp").read_bytes())
    data[max(b.start for b in blocks)] ^= 1
    (folder / "__1_0.distcp").write_bytes(data)
    messages = run_ranks(2, load_on_two, str(folder), shape)
    assert messages[0] == messages[1] and "__1_0.distcp is damaged: bytes" in messages[0]
