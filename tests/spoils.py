"""Ways to spoil a checkpoint: each takes its folder and dice, and returns the file that must be named."""

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from parallel2d.checkpoint import manifest as manifests
from parallel2d.checkpoint.manifest import MANIFEST_FILE, read_manifest

# The environment variable that names the folder which an unpickled bomb makes.
BOMB = "PARALLEL2D_TEST_BOMB"


class Bomb:
    """Runs on being unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ[BOMB],)


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


def rename_a_file(content: dict[str, Any], name: str) -> None:
    content["files"][name] = content["files"].pop("__0_0.distcp")
    for tensor in content["tensors"].values():
        for block in tensor["blocks"]:
            block["file"] = name if block["file"] == "__0_0.distcp" else block["file"]


def spoil_newest(checkpoints: Path, count: int) -> list[str]:
    """Change one of the numbers in each of the newest `count` checkpoints; their names."""
    names = sorted((path.name for path in checkpoints.iterdir()), reverse=True)[:count]
    for name in names:
        block = next(iter(read_manifest(checkpoints / name).tensors.values())).blocks[0]
        data = bytearray((checkpoints / name / block.file).read_bytes())
        data[block.start] ^= 1
        (checkpoints / name / block.file).write_bytes(data)
    return names
