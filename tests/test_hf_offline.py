"""Checkpoints to Hugging Face folders and back by one process: bit by bit, in bounded memory, or refused."""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from parallel2d.models.gpt2 import GPT2Config
from parallel2d.models.hf import Config, from_hf, hf_names, to_hf
from parallel2d.models.llama import Llama, LlamaConfig
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from parallel2d import UserError
from parallel2d.checkpoint.files import DataFile, StoredBlocks, commit
from parallel2d.checkpoint.intact import DamagedCheckpoint, file_faults, hash_faults
from parallel2d.checkpoint.manifest import MANIFEST_FILE, Manifest, StoredBlock, StoredTensor, read_manifest
from parallel2d.cli.checkpoint_hf import _model_of
from parallel2d.hf import offline as hf_offline
from parallel2d.hf.companions import companions_of, kept_companions
from parallel2d.hf.offline import export_hf, import_hf
from parallel2d.hf.weights import load_hf, read_config, save_hf
from parallel2d.hf.write import Kind, write_folder
from parallel2d.shards import Box, share_of
from parallel2d.verify.hf import read_expected
from tests.ranks import ROOT, TEXT, run_recipe, try_ranks
from tests.test_hf import CPU, EXPORTED, NAMES, SMALL, filled, oracles, tensors  # noqa: F401  # a fixture
from tests.test_verify import command

FILE = "model.safetensors"
# Others differ in numbers of config.json only, or in what these have together.
QUICK = ("gpt2", "llama_bf16", "llama_sharded", "llama_tied", "qwen3")


@pytest.fixture(autouse=True)
def fast_disk(monkeypatch):
    """Nothing here cuts the power, and waiting for the disk is most of the time."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def checkpoint(
    path: Path, model: nn.Module, shape: tuple[int, int] = (3, 2), weights: dict[str, Tensor] | None = None
) -> Manifest:
    """A checkpoint as a dp × tp mesh would have written it, a file for each rank, with Adam's moments.

    Dim 0 is split by dp and dim 1 by tp, unevenly; a vector is dp's alone. `weights`: in place of the
    model's.
    """
    weights = weights or {name: p.detach() for name, p in model.named_parameters()}
    state = {f"model.{name}": t for name, t in weights.items()}
    state |= {f"optimizer.{name}.{key}": t + 1 for name, t in weights.items() for key in ("exp_avg", "step")}
    path.parent.mkdir(exist_ok=True)
    writing = path.with_name(path.name + ".tmp")
    writing.mkdir()
    blocks: dict[str, list[StoredBlock]] = {name: [] for name in state}
    files = {}
    for dp in range(shape[0]):
        for tp in range(shape[1]):
            file = DataFile(writing / f"__{dp * shape[1] + tp}_0.distcp")
            for name, tensor in state.items():
                if box := share(tensor, shape, dp, tp):
                    blocks[name].append(file.add(box.cut(tensor), box.offsets))
            files[file.path.name] = file.close()
    stored = {
        name: StoredTensor(str(t.dtype).removeprefix("torch."), tuple(t.shape), {}, tuple(blocks[name]))
        for name, t in state.items()
    }
    trainer = {"step": 7, "position": 21, "tokens_seen": 99, "data": "x", "model": asdict(model.config)}
    mesh = {"dp_replicate": 1, "dp_shard": shape[0], "tp": shape[1]}
    commit(writing, path, Manifest(7, mesh, {}, type(model).__name__, "AdamW", trainer, files, stored))
    return read_manifest(path)


def share(tensor: Tensor, shape: tuple[int, int], dp: int, tp: int) -> Box | None:
    """A rank's block, None if it has none or another rank writes it."""
    bounds = [share_of(tensor.shape[0], shape[0], dp)]
    if tensor.ndim > 1:
        bounds.append(share_of(tensor.shape[1], shape[1], tp))
    elif tp:
        return None
    box = Box(tuple(start for start, _ in bounds), tuple(stop - start for start, stop in bounds))
    return box if 0 not in box.sizes else None


def on_meta(model_class: type[nn.Module], config: Config) -> nn.Module:
    with torch.device("meta"):
        return model_class(config)


def exported(source: Path, folder: Path, **options) -> dict[str, Tensor]:
    """What export_hf writes, read by safetensors."""
    manifest = read_manifest(source)
    model = _model_of(source, manifest)
    export_hf(source, manifest, folder, model, hf_names(model), to_hf(model.config), **options)
    return tensors(folder)


def imported(folder: Path, destination: Path, **options) -> Manifest:
    model = on_meta(*from_hf(read_config(folder)))
    trainer = {"model": asdict(model.config)}
    return import_hf(folder, destination, model, hf_names(model), trainer, **options)


def read_all(path: Path) -> dict[str, Tensor]:
    manifest = read_manifest(path)
    assert file_faults(path, manifest.files, MANIFEST_FILE) == {}
    assert all(fault == "" for _, fault in hash_faults(path, manifest.files))
    with StoredBlocks(path, manifest) as blocks:
        return {name: blocks.read(name) for name in manifest.tensors}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Names, dtypes and bits."""
    return one.keys() == other.keys() and all(
        t.dtype == other[n].dtype and torch.equal(t, other[n]) for n, t in one.items()
    )


def save_hf_of(model: nn.Module, folder: Path, **options) -> dict[str, Tensor]:
    save_hf(folder, model, hf_names(model), to_hf(model.config), **options)
    return tensors(folder)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in NAMES]
)
def test_there_and_back_is_the_same_bit_by_bit(oracles, tmp_path, name):  # noqa: F811
    folder = oracles / name
    imported(folder, tmp_path / "a", dtype=None)
    assert equal(exported(tmp_path / "a", tmp_path / "b"), tensors(folder))
    assert from_hf(read_config(tmp_path / "b")) == from_hf(read_config(folder))
    # What load_hf reads, in float32.
    imported(folder, tmp_path / "c")
    model = on_meta(*from_hf(read_config(folder)))
    load_hf(folder, model, hf_names(model), CPU)
    wide = read_all(tmp_path / "c")
    assert equal(wide, {f"model.{n}": p.detach().float() for n, p in model.named_parameters()})
    exported(tmp_path / "c", tmp_path / "d", max_shard_bytes=1e5)
    imported(tmp_path / "d", tmp_path / "e")
    assert equal(read_all(tmp_path / "e"), wide)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama_vocab1003", "llama_tied"])
def test_transformers_computes_the_expected_logits_from_an_export(oracles, tmp_path, name):  # noqa: F811
    transformers = pytest.importorskip("transformers")
    model = on_meta(*from_hf(read_config(oracles / name)))
    load_hf(oracles / name, model, hf_names(model), CPU)
    checkpoint(tmp_path / "run" / "a", model)
    exported(tmp_path / "run" / "a", tmp_path / "b", dtype=torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b", dtype="auto")
    assert theirs.dtype == torch.float32
    expected = read_expected(oracles / name / "expected.npz")
    with torch.no_grad():
        logits = theirs.eval()(torch.as_tensor(expected.ids)).logits
    assert (logits - torch.as_tensor(expected.logits)).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("llama", (1, 1)),
        ("llama_tied", (3, 2)),
        ("llama_bias", (3, 2)),
        ("qwen3_bias", (5, 3)),
        ("gpt2", (3, 2)),
    ],
    ids=str,
)
def test_any_blocks_in_any_files_give_what_save_hf_gives(tmp_path, monkeypatch, name, shape):
    # A few rows at a time: pieces and buffers are cut across.
    monkeypatch.setattr(hf_offline, "_BUFFER_BYTES", 1500)
    model = filled(EXPORTED[name])
    checkpoint(tmp_path / "run" / "a", model, shape)
    assert equal(exported(tmp_path / "run" / "a", tmp_path / "b"), save_hf_of(model, tmp_path / "c"))
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "b" / file).read_bytes() == (tmp_path / "c" / file).read_bytes()
    assert ("lm_head.weight" in tensors(tmp_path / "b")) == (name not in ("llama_tied", "gpt2"))
    assert read_config(tmp_path / "b")["tie_word_embeddings"] == (name in ("llama_tied", "gpt2"))
    imported(tmp_path / "b", tmp_path / "d", max_file_bytes=20e3)
    weights = {f"model.{n}": p.detach() for n, p in model.named_parameters()}
    assert equal(read_all(tmp_path / "d"), weights)
    manifest = read_manifest(tmp_path / "d")
    assert max(len(t.blocks) for t in manifest.tensors.values()) > 10
    sizes = [file.bytes for name, file in manifest.files.items() if name.endswith(".distcp")]
    assert len(sizes) > 3 and max(sizes) <= 20e3
    assert (manifest.step, manifest.optimizer, set(manifest.mesh.values())) == (0, "", {1})


def test_files_are_as_large_as_asked_for_and_the_index_lists_them(tmp_path):
    model = filled(SMALL)
    checkpoint(tmp_path / "run" / "a", model)
    found = exported(tmp_path / "run" / "a", tmp_path / "b", max_shard_bytes=30e3)
    assert equal(found, save_hf_of(model, tmp_path / "c"))
    index = json.loads((tmp_path / "b" / "model.safetensors.index.json").read_text())
    held = {}
    for path in sorted((tmp_path / "b").glob("*.safetensors")):
        content = load_file(path)
        held |= dict.fromkeys(content, path.name)
        assert sum(t.nbytes for t in content.values()) <= 30e3
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
        header = int.from_bytes(path.read_bytes()[:8], "little")
        assert header % 8 == 0
    assert index["weight_map"] == held and len(set(held.values())) > 3
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())


def test_casts(tmp_path):
    model = filled(SMALL)
    checkpoint(tmp_path / "run" / "a", model)
    found = exported(tmp_path / "run" / "a", tmp_path / "b", dtype=torch.bfloat16)
    assert equal(found, save_hf_of(model, tmp_path / "c", dtype=torch.bfloat16))
    assert read_config(tmp_path / "b")["torch_dtype"] == "bfloat16"
    imported(tmp_path / "b", tmp_path / "d", dtype=torch.float64)
    assert equal(
        read_all(tmp_path / "d"),
        {f"model.{n}": p.detach().bfloat16().double() for n, p in model.named_parameters()},
    )
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    for bad in (1e6, float("inf"), float("nan"), -float("inf")):
        weights["norm.weight"][5] = bad
        where = tmp_path / "run" / str(bad)
        checkpoint(where, model, weights=weights)
        with pytest.raises(UserError, match=r"model\.norm\.weight has numbers that are not finite in .*16"):
            exported(where, tmp_path / "e", dtype=torch.float16)
    with pytest.raises(UserError, match=r"not finite in torch\.float32"):
        exported(tmp_path / "run" / "nan", tmp_path / "e")
    save_file(
        found | {"model.norm.weight": torch.full((48,), 1e300, dtype=torch.float64)}, tmp_path / "b" / FILE
    )
    with pytest.raises(UserError, match=r"model\.norm\.weight has numbers that are not finite"):
        imported(tmp_path / "b", tmp_path / "e")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "c", "d", "run"]


def test_several_dtypes_stay_what_they_are(tmp_path):
    """As transformers loads all as one dtype, config.json names the widest."""
    model = filled(EXPORTED["gpt2"])
    mixed = {
        name: p.detach().bfloat16() if "norm" in name or name.endswith(".q.weight") else p.detach()
        for name, p in model.named_parameters()
    }
    checkpoint(tmp_path / "run" / "a", model, weights=mixed)
    found = exported(tmp_path / "run" / "a", tmp_path / "b")
    assert {t.dtype for t in found.values()} == {torch.bfloat16, torch.float32}
    assert found["transformer.h.0.attn.c_attn.weight"].dtype == torch.float32
    assert read_config(tmp_path / "b")["torch_dtype"] == "float32"
    imported(tmp_path / "b", tmp_path / "c")
    assert equal(read_all(tmp_path / "c"), {f"model.{name}": t.float() for name, t in mixed.items()})


def test_wide_numbers_lie_where_they_are_aligned(tmp_path):
    """After an odd number of halves torch could not see them as numbers."""
    given = {"half": torch.ones(3).bfloat16(), "wide": torch.arange(2.0)}
    kinds = {name: Kind(t.dtype, tuple(t.shape)) for name, t in given.items()}
    with write_folder(tmp_path / "a", {}, kinds, 5e9) as writer:
        for name in writer.kinds:
            writer.add(name, given[name])
    content = (tmp_path / "a" / FILE).read_bytes()
    size = int.from_bytes(content[:8], "little")
    assert json.loads(content[8 : 8 + size])["wide"]["data_offsets"] == [0, 8]
    assert equal(tensors(tmp_path / "a"), given)


TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "merges.txt", "chat_template.jinja", "vocab.json")


def with_tokenizer(folder: Path) -> None:
    for name in TOKENIZER:
        (folder / name).write_text(name * 1000)
    (folder / "README.md").write_text("not carried")
    config = read_config(folder) | {"eos_token_id": 17, "max_position_embeddings": 77}
    (folder / "config.json").write_text(json.dumps(config))


def carried(folder: Path) -> bool:
    config = read_config(folder)
    return (
        {p.name for p in folder.iterdir()} == {*TOKENIZER, FILE, "config.json"}
        and all((folder / name).read_text() == name * 1000 for name in TOKENIZER)
        and (config["eos_token_id"], config["max_position_embeddings"]) == (17, 77)
    )


def run(*arguments: str | Path):
    """The real command."""
    return try_ranks(1, command, "checkpoint", *map(str, arguments))[0]


def test_the_commands_carry_the_tokenizer_over(tmp_path):
    model = filled(SMALL)
    save_hf_of(model, tmp_path / "a")
    with_tokenizer(tmp_path / "a")
    outcome = run("import-hf", tmp_path / "a", tmp_path / "new" / "b")
    assert outcome.exitcode == 0, outcome.stderr
    manifest = read_manifest(tmp_path / "new" / "b")
    assert manifest.files.keys() > {f"hf-{name}" for name in TOKENIZER}
    assert manifest.trainer["model"] == json.loads(json.dumps(asdict(SMALL)))
    assert manifest.trainer["position"] == manifest.trainer["tokens_seen"] == 0
    assert manifest.versions.keys() == {"torch", "parallel2d"}
    read_all(tmp_path / "new" / "b")
    outcome = run("export-hf", tmp_path / "new" / "b", tmp_path / "c")
    assert outcome.exitcode == 0 and carried(tmp_path / "c"), outcome.stderr
    assert equal(tensors(tmp_path / "c"), tensors(tmp_path / "a"))
    # Resharding takes them along.
    assert run("reshard", tmp_path / "new" / "b", tmp_path / "r", "--dp", "2").exitcode == 0
    assert run("export-hf", tmp_path / "r", tmp_path / "g").exitcode == 0 and carried(tmp_path / "g")
    # A training run's checkpoint keeps none.
    checkpoint(tmp_path / "run" / "d", model)
    more = ("--tokenizer", tmp_path / "a", "--dtype", "bfloat16", "--max-shard-bytes", "5e9")
    outcome = run("export-hf", tmp_path / "run" / "d", tmp_path / "e", *more)
    assert outcome.exitcode == 0 and carried(tmp_path / "e"), outcome.stderr
    assert "(step 7, Llama) exported to" in outcome.stdout and "bfloat16" in outcome.stdout
    # Of another kind of model the files come, and config.json says nothing of ours.
    config = to_hf(EXPORTED["gpt2"]) | {"eos_token_id": 18}
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    assert run("export-hf", tmp_path / "run" / "d", tmp_path / "f", *more).exitcode == 0
    assert "eos_token_id" not in read_config(tmp_path / "f")


def test_what_is_damaged_is_not_exported(tmp_path):
    path = tmp_path / "run" / "a"
    model = filled(SMALL)
    manifest = checkpoint(path, model)
    piece = next(iter(manifest.pieces("model.blocks.1.ffn.down.weight")))
    file = path / piece.file
    content = bytearray(file.read_bytes())
    content[piece.start + 3] ^= 1
    file.write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match=r"is damaged: bytes"):
        exported(path, tmp_path / "b")
    file.write_bytes(content[:-1])
    with pytest.raises(DamagedCheckpoint, match=r"is damaged: __\d_0.distcp: .* bytes instead of"):
        exported(path, tmp_path / "b")
    file.unlink()
    with pytest.raises(DamagedCheckpoint, match=r"is damaged: __\d_0.distcp: No such file"):
        exported(path, tmp_path / "b")
    save_hf_of(model, tmp_path / "c")
    with_tokenizer(tmp_path / "c")
    manifest = imported(tmp_path / "c", tmp_path / "d", companions=companions_of(tmp_path / "c"))
    (tmp_path / "d" / "hf-merges.txt").write_text("merges.tyt" * 1000)
    with pytest.raises(DamagedCheckpoint, match=r"hf-merges\.txt is damaged"):
        exported(tmp_path / "d", tmp_path / "b", companions=kept_companions(tmp_path / "d", manifest))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "d", "run"]


def test_a_file_that_does_not_read_back_is_told_and_removed(tmp_path, monkeypatch):
    checkpoint(tmp_path / "run" / "a", filled(SMALL))
    monkeypatch.setattr(os, "fsync", lambda handle: flip(handle) or None)
    with pytest.raises(UserError, match=r"does not read back as it was written: the disk or the memory"):
        exported(tmp_path / "run" / "a", tmp_path / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def flip(handle: int) -> None:
    """Change a byte of a file of tensors, as a failing disk would."""
    path = Path(os.readlink(f"/proc/self/fd/{handle}"))
    if path.suffix == ".safetensors":
        with open(path, "r+b") as file:
            file.seek(-5, os.SEEK_END)
            file.write(b"!")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("norm.weight"), r"1 missing: norm\.weight \[48\]"),
        (lambda w: w.update({"norm.bias": torch.ones(48)}), r"1 unexpected: norm\.bias \[48\]"),
        (lambda w: w.update({"norm.weight": torch.ones(49)}), r"norm\.weight \[49\] instead of \[48\]"),
    ],
)
def test_tensors_of_another_model_are_refused(tmp_path, change, message):
    model = filled(SMALL)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    change(weights)
    checkpoint(tmp_path / "run" / "a", model, weights=weights)
    with pytest.raises(UserError, match=message):
        exported(tmp_path / "run" / "a", tmp_path / "b")
    model = filled(EXPORTED["llama_tied"])
    found = save_hf_of(model, tmp_path / "c")
    save_file(found | {"lm_head.weight": torch.zeros(101, 48)}, tmp_path / "c" / FILE)
    with pytest.raises(UserError, match=r"lm_head\.weight is not equal to model\.embed_tokens\.weight"):
        imported(tmp_path / "c", tmp_path / "d")
    assert not (tmp_path / "d").exists()


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A checkpoint `a`, a Hugging Face folder `hf`, and checkpoints of what is not carried."""
    path = tmp_path_factory.mktemp("made")
    model = filled(SMALL)
    checkpoint(path / "a", model)
    save_hf_of(model, path / "hf")
    odd = LlamaConfig(vocab_size=101, width=48, num_layers=1, num_heads=4, num_kv_heads=2, o_bias=True)
    checkpoint(path / "odd", Llama(odd))
    mixer = filled(SMALL)
    mixer.__class__ = type("Mixer", (Llama,), {})
    checkpoint(path / "mixer", mixer)
    return path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("export-hf", "nowhere", "x"), "nowhere is neither a checkpoint"),
        (("export-hf", "hf", "x"), "hf is neither a checkpoint"),
        (("export-hf", "a", "hf"), "hf exists and is not an empty folder"),
        (("export-hf", "a", "a/x"), "lies inside the checkpoint a"),
        (("export-hf", "a", "x", "--tokenizer", "nowhere"), "nowhere is not a folder with tokenizer files"),
        (("export-hf", "a", "x", "--max-shard-bytes", "nan"), "--max-shard-bytes nan is not a size"),
        (("export-hf", "a", "x", "y", "--z=3"), "unknown: y --z=3"),
        (("export-hf", "a", "x", "--dtype", "int8"), "invalid choice: 'int8'"),
        (("export-hf", "mixer", "x"), "a 'Mixer', for which there is no Hugging Face model"),
        (("export-hf", "odd", "x"), "neither llama, mistral, qwen2 nor qwen3 computes a Llama with"),
        (("import-hf", "hf", "a"), "a exists and is not an empty folder"),
        (("import-hf", "a", "x"), "a/config.json cannot be read"),
        (("import-hf", "hf", "x", "y"), "unknown: y"),
        (("import-hf", "hf", "hf/config.json/x"), "cannot be written (Not a directory)"),
        (("export-hf", "a", "hf/config.json/x"), "cannot be written (Not a directory)"),
    ],
)
def test_mistakes(made, monkeypatch, arguments: Sequence[str], message):
    monkeypatch.chdir(made)
    before = sorted(made.iterdir())
    outcome = run(*arguments)
    assert outcome.exitcode == 2 and "Traceback" not in outcome.stderr, outcome.stderr
    assert message in outcome.stderr
    assert sorted(made.iterdir()) == before


@pytest.mark.parametrize(("name", "arguments"), [("export", ("a", "x")), ("import", ("hf", "x"))])
def test_a_full_disk(made, monkeypatch, name, arguments):
    monkeypatch.chdir(made)
    outcome = try_ranks(1, short_of_room, "checkpoint", f"{name}-hf", *arguments)[0]
    assert outcome.exitcode == 2 and "Traceback" not in outcome.stderr, outcome.stderr
    assert "cannot be written (File too large): it needs 159,552 bytes and" in outcome.stderr
    assert sorted(path.name for path in made.iterdir()) == ["a", "hf", "mixer", "odd"]


def short_of_room(*arguments: str) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    command(*arguments)


def measure(task: str, source: Path, out: Path) -> None:
    """Print this process's largest memory before and after, in KiB."""

    def peak() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

    before = peak()
    if task == "import":
        imported(source, out)
    else:
        manifest = read_manifest(source)
        model = _model_of(source, manifest)
        export_hf(source, manifest, out, model, hf_names(model), to_hf(model.config))
    print(before, peak())


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [LlamaConfig(4096, 1024, 12, 8, 8, 0, 2730), GPT2Config(4096, 1024, 12, 8, 4096)],
    ids=["llama", "gpt2"],
)
def test_memory_is_bounded_whatever_the_size(tmp_path, config):
    """600 MB in tensors of at most 40 MB."""
    made = filled(config)
    sizes = [parameter.nbytes for parameter in made.parameters()]
    assert sum(sizes) > 590e6 and max(sizes) < 40e6
    checkpoint(tmp_path / "run" / "a", made, (2, 1))
    for task, source, out in (("export", "run/a", "b"), ("import", "b", "c")):
        code = f"from tests.test_hf_offline import *; measure({task!r}, Path({source!r}), Path({out!r}))"
        command = (sys.executable, "-c", code)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        outcome = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
        assert outcome.returncode == 0, outcome.stderr
        before, after = map(int, outcome.stdout.split())
        print(f"{task}: {before / 1024:.0f} MiB before, {(after - before) / 1024:.0f} MiB more")
        assert after - before < 250 * 1024


@pytest.mark.slow
def test_a_run_starts_from_a_folder_and_ends_in_one(tmp_path):
    """Trained at a learning rate of zero on 1×2, what comes out is what went in."""
    save_hf_of(filled(replace(SMALL, vocab_size=256)), tmp_path / "a")
    assert run("import-hf", tmp_path / "a", tmp_path / "start").exitcode == 0
    (tmp_path / "start.yaml").write_text(run("show", tmp_path / "start", "--model-yaml").stdout)
    start = ["--config", str(tmp_path / "start.yaml"), "--checkpoint.resume", str(tmp_path / "start")]
    out = ["--out", str(tmp_path / "run"), "--steps", "2", "--optim.lr", "0", "--data.seq_len", "32"]
    outcomes = run_recipe(2, *TEXT, *start, *out, "--tp", "2", "--log.sample_tokens", "0")
    assert [o.exitcode for o in outcomes] == [0, 0], outcomes[0].stderr
    assert f"step 0, with the weights of {tmp_path / 'start'}" in outcomes[0].stdout
    assert run("export-hf", tmp_path / "run", tmp_path / "b").exitcode == 0
    came, went = tensors(tmp_path / "b"), tensors(tmp_path / "a")
    assert came.keys() == went.keys() and all(torch.equal(came[name], went[name]) for name in went)
