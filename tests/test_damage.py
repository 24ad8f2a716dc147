"""A checkpoint that is not what was written is named, or loads the very numbers; nothing in it is executed."""

import json
import os
import pickle
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel2d.models.llama import LlamaConfig

from parallel2d import MeshShape, UserError, launch
from parallel2d.checkpoint import manifest as manifests
from parallel2d.checkpoint.find import checkpoints_in, open_checkpoint
from parallel2d.checkpoint.intact import DamagedCheckpoint, Hash
from parallel2d.checkpoint.load import load_checkpoint
from parallel2d.checkpoint.manifest import MANIFEST_FILE, read_manifest
from parallel2d.checkpoint.store import CheckpointStore
from tests.ranks import TINY_RUN, run_ranks, run_recipe
from tests.test_checkpoint import build, whole

TINY = LlamaConfig(vocab_size=13, width=8, num_layers=1, num_heads=2, num_kv_heads=1, ffn_width=6)
NAME = "step-00000001"
# The environment variable that names the folder which an unpickled bomb makes.
BOMB = "PARALLEL2D_TEST_BOMB"


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


class Bomb:
    """Runs on being unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ[BOMB],)


# Each takes the checkpoint's folder and dice, spoils something, and returns a file that must be named.
Spoil = Callable[[Path, random.Random], str]


def some_file(folder: Path, dice: random.Random) -> Path:
    return dice.choice(sorted(folder.iterdir()))


def flip_a_bit(folder: Path, dice: random.Random) -> str:
    path = some_file(folder, dice)
    data = bytearray(path.read_bytes())
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    path.write_bytes(data)
    return path.name


def truncate(folder: Path, dice: random.Random) -> str:
    path = some_file(folder, dice)
    os.truncate(path, dice.randrange(path.stat().st_size))
    return path.name


def extend(folder: Path, dice: random.Random) -> str:
    path = some_file(folder, dice)
    with path.open("ab") as handle:
        handle.write(dice.randbytes(dice.randrange(1, 9)))
    return path.name


def empty(folder: Path, dice: random.Random) -> str:
    path = some_file(folder, dice)
    path.write_bytes(b"")
    return path.name


def remove(folder: Path, dice: random.Random) -> str:
    path = some_file(folder, dice)
    path.unlink()
    return path.name


def rename(folder: Path, dice: random.Random) -> str:
    path = some_file(folder, dice)
    path.rename(path.with_name(path.name + "x"))
    return path.name


def swap(folder: Path, dice: random.Random) -> str:
    one, other = dice.sample(sorted(folder.iterdir()), 2)
    one.rename(folder / "aside")
    other.rename(one)
    (folder / "aside").rename(other)
    return MANIFEST_FILE if MANIFEST_FILE in (one.name, other.name) else ""


def a_foreign_file(folder: Path, dice: random.Random) -> str:
    name = dice.choice(["__9_0.distcp", "x y.txt", ".hidden", "model.safetensors"])
    (folder / name).write_bytes(dice.randbytes(5))
    return name


def a_pickle(folder: Path, dice: random.Random) -> str:
    path = some_file(folder, dice)
    path.write_bytes(pickle.dumps(Bomb()))
    return path.name


def a_pickle_of_the_same_size(folder: Path, dice: random.Random) -> str:
    path = dice.choice(sorted(folder.glob("*.distcp")))
    bomb, size = pickle.dumps(Bomb()), path.stat().st_size
    path.write_bytes(bomb + bytes(size - len(bomb)))
    return path.name


def a_link(folder: Path, dice: random.Random) -> str:
    """To the very same content, elsewhere."""
    path = some_file(folder, dice)
    elsewhere = folder.with_name("elsewhere")
    elsewhere.mkdir(exist_ok=True)
    shutil.move(path, elsewhere / path.name)
    path.symlink_to(elsewhere / path.name)
    return path.name


def a_pipe(folder: Path, dice: random.Random) -> str:
    path = some_file(folder, dice)
    path.unlink()
    os.mkfifo(path)
    return path.name


def a_folder(folder: Path, dice: random.Random) -> str:
    path = some_file(folder, dice)
    path.unlink()
    path.mkdir()
    return path.name


def a_key_twice(folder: Path, dice: random.Random) -> str:
    path = folder / MANIFEST_FILE
    text = path.read_text().replace('"step": 1,', f'"step": {dice.randrange(9)},\n"step": 1,', 1)
    path.write_text(text)
    return MANIFEST_FILE


def other_words(folder: Path, dice: random.Random) -> str:
    path = folder / MANIFEST_FILE
    junk = ["{", "null", "[1]", '"x"', "{}", "[" * 10**5, '{"content": {}}', "\x00", "1e999", "9" * 5000]
    path.write_text(dice.choice(junk))
    return MANIFEST_FILE


SPOILS: list[Spoil] = [
    flip_a_bit,
    truncate,
    extend,
    empty,
    remove,
    rename,
    swap,
    a_foreign_file,
    a_pickle,
    a_pickle_of_the_same_size,
    a_link,
    a_pipe,
    a_folder,
    a_key_twice,
    other_words,
]


def sealed(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Edit the manifest's content and give it the right hash again, as a forger would."""
    path = folder / MANIFEST_FILE
    content = json.loads(path.read_text())["content"]
    change(content)
    path.write_text(json.dumps({"xxh3_128": manifests._hash_of(content), "content": content}))


JUNK = [
    None,
    -1,
    0,
    7,
    2**70,
    True,
    1.5,
    float("nan"),
    "",
    "x",
    "\ud800",
    "../x",
    "/etc/passwd",
    [],
    [[]],
    {},
]
JUNK += [{"x": 1}, "complex64", "dtype", "float32", [2**70, 0], ["0", 0]]


def a_forged_fact(folder: Path, dice: random.Random) -> str:
    """Some value somewhere in the manifest is another one."""

    def change(content: dict[str, Any]) -> None:
        here: Any = content
        while True:
            key = dice.choice(sorted(here) if isinstance(here, dict) else range(len(here)))
            if not (isinstance(here[key], dict | list) and here[key]) or dice.random() < 0.1:
                break
            here = here[key]
        here[key] = dice.choice(JUNK)

    sealed(folder, change)
    return ""


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
    (found,) = run_ranks(1, forge_and_load, str(good), str(tmp_path), 200)
    assert Counter(outcome == "same" for outcome in found)[False] > 100


def rename_a_file(content: dict[str, Any], name: str) -> None:
    content["files"][name] = content["files"].pop("__0_0.distcp")
    for tensor in content["tensors"].values():
        for block in tensor["blocks"]:
            block["file"] = name if block["file"] == "__0_0.distcp" else block["file"]


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


@pytest.fixture(scope="module")
def run_of_4(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("straight") / "run"
    assert (
        run_recipe(1, *TINY_RUN, "--steps", "4", "--checkpoint.every", "1", "--out", str(out))[0].exitcode
        == 0
    )
    return out


def spoil_newest(checkpoints: Path, count: int) -> list[str]:
    names = sorted((path.name for path in checkpoints.iterdir()), reverse=True)[:count]
    for name in names:
        block = next(iter(read_manifest(checkpoints / name).tensors.values())).blocks[0]
        data = bytearray((checkpoints / name / block.file).read_bytes())
        data[block.start] ^= 1
        (checkpoints / name / block.file).write_bytes(data)
    return names


def test_auto_falls_back_says_so_and_saves_that_step_again(run_of_4, tmp_path, read_metrics):
    out = tmp_path / "run"
    shutil.copytree(run_of_4, out)
    spoil_newest(out / "checkpoints", 1)
    flags = ["--steps", "5", "--checkpoint.every", "1", "--checkpoint.keep", "0", "--out", str(out)]
    outcomes = run_recipe(2, "--dp", "2", *TINY_RUN, *flags)
    assert [o.exitcode for o in outcomes] == [0, 0], outcomes
    said = outcomes[0].stdout
    assert "step-00000004/__0_0.distcp is damaged: bytes" in said and "passed over" in said
    assert "step-00000004 is now step-00000004.damaged" in said and "after step 3 of" in said
    whole, damaged = checkpoints_in(out / "checkpoints")
    assert [c.step for c in whole] == [2, 3, 4, 5] and not damaged
    assert (out / "checkpoints/step-00000004.damaged").is_dir()
    straight, again = read_metrics(run_of_4), read_metrics(out)
    assert again[4]["loss"] == pytest.approx(straight[4]["loss"], rel=1e-9)


@pytest.mark.parametrize("choice", ["auto", "step-00000004"])
def test_without_an_intact_one_nothing_is_trained(run_of_4, tmp_path, choice):
    out = tmp_path / "run"
    shutil.copytree(run_of_4, out)
    names = spoil_newest(out / "checkpoints", 3 if choice == "auto" else 1)
    before = (out / "metrics.jsonl").read_text()
    resume = choice if choice == "auto" else str(out / "checkpoints" / choice)
    flags = ["--steps", "5", "--checkpoint.resume", resume, "--out", str(out)]
    (outcome,) = run_recipe(1, *TINY_RUN, *flags)
    assert outcome.exitcode == 2 and "no checkpoint is intact" in outcome.stderr
    assert all(f"{name}/__0_0.distcp is damaged" in outcome.stderr for name in names)
    assert (out / "metrics.jsonl").read_text() == before
    assert not list((out / "checkpoints").glob("*.damaged"))
