"""parallel2d checkpoint reshard: every rank's file holds what the rank holds; nothing half is left."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from parallel2d.models.llama import Llama
from torch import Tensor, nn

from parallel2d import MeshShape, UserError, build_mesh, launch, parallelize
from parallel2d.checkpoint import reshard as room
from parallel2d.checkpoint.files import DataFile, StoredBlocks
from parallel2d.checkpoint.layout import Layout
from parallel2d.checkpoint.manifest import Manifest, read_manifest
from parallel2d.cli.main import main
from parallel2d.shards import Box, local_block
from tests.ranks import Outcome, run_ranks, try_ranks
from tests.stored import (
    GPT,
    LLAMA,
    damage,
    llama_checkpoint,
    read_tensors,
    same_bits,
    tensors_of,
    write_checkpoint,
)


def commands(*lines: tuple[str, ...]) -> list[int]:
    """The command several times; the exit codes. A mistake of input ends the process."""
    codes = []
    for line in lines:
        sys.argv = ["parallel2d", "checkpoint", "reshard", *line]
        try:
            main()
        except SystemExit as ended:
            codes.append(ended.code)
    return codes


def run(*arguments: object) -> Outcome:
    return try_ranks(1, commands, tuple(map(str, arguments)))[0]


def flags(shape: MeshShape) -> tuple[str, ...]:
    return ("--dp", str(shape.dp), "--tp", str(shape.tp), "--dp_replicate", str(shape.dp_replicate))


def require_equal(path: Path, expected: dict[str, Tensor]) -> Manifest:
    found = read_tensors(path)
    assert found.keys() == expected.keys()
    assert [name for name in found if not same_bits(found[name], expected[name])] == []
    return read_manifest(path)


def blocks_by_rank(path: Path) -> dict[str, list[tuple[int, Tensor]]]:
    """{tensor: [(rank whose file has it, block)]}"""
    manifest = read_manifest(path)
    with StoredBlocks(path, manifest) as blocks:
        return {
            name: [
                (int(block.file.split("_")[2]), blocks.read(name, Box(block.offsets, block.sizes)))
                for block in tensor.blocks
            ]
            for name, tensor in manifest.tensors.items()
        }


MESHES = [MeshShape(1, 1, 1), MeshShape(2, 2, 1), MeshShape(1, 7, 1), MeshShape(2, 2, 3)]


def test_any_mesh_bit_by_bit(tmp_path):
    tensors = tensors_of("Llama", LLAMA)
    tensors["optimizer.norm.weight.exp_avg"][3] = torch.nan
    source = write_checkpoint(tmp_path / "source", tensors)
    targets = [tmp_path / f"{s.dp}x{s.tp}" for s in MESHES]
    targets[1].mkdir()  # an empty folder is as good as none
    lines = [(str(source), str(t), *flags(s)) for s, t in zip(MESHES, targets, strict=True)]
    assert run_ranks(1, commands, *lines) == [[0] * len(MESHES)]
    for shape, target in zip(MESHES, targets, strict=True):
        manifest, before = require_equal(target, tensors), read_manifest(source)
        sizes = {"dp_replicate": shape.dp_replicate, "dp_shard": shape.dp_shard, "tp": shape.tp}
        assert manifest.mesh == sizes and manifest.versions["torch"] == torch.__version__
        assert (manifest.step, manifest.optimizer, manifest.model) == (200, "AdamW", "Llama")
        assert manifest.trainer == before.trainer
        ranks = {int(name.split("_")[2]) for name in manifest.files if name.startswith("__")}
        assert ranks == set(range(shape.world))
        # Replicas share the writing.
        loads = [file.bytes for name, file in manifest.files.items() if name.startswith("__")]
        assert max(loads) < 1.8 * sum(loads) / len(loads)
        for blocks in blocks_by_rank(target).values():
            assert sum(block.numel() for _, block in blocks) == blocks[0][1].numel() or len(blocks) > 1
    # Back again, from blocks that are cut both ways.
    assert run("--dp", 3, targets[-1], tmp_path / "back").exitcode == 0
    require_equal(tmp_path / "back", tensors)
    # torch's own tools read it too.
    state = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    with pytest.warns(UserWarning, match="assuming the intent is to load in a single process"):
        dcp.load(state, checkpoint_id=targets[-1], no_dist=True)
    assert all(same_bits(state[name], tensor) for name, tensor in tensors.items())


def held_by_real_ranks(source: Path, shape: MeshShape) -> dict[str, Tensor]:
    """What FSDP and tensor parallelism leave on this rank of the checkpoint's weights."""
    with launch.world(shape.world, "cpu", 60):
        model = Llama(LLAMA)
        stored = read_tensors(source)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(stored[f"model.{name}"])
        parallelize(model, build_mesh(shape, "cpu"), plan=model.tp_plan(), units=list(model.blocks))
        return {name: local_block(p)[0].detach().clone() for name, p in model.named_parameters()}


REAL = [MeshShape(1, 3, 2), pytest.param(MeshShape(2, 2, 2), marks=pytest.mark.slow)]


@pytest.mark.parametrize("shape", REAL, ids=str)
def test_a_file_holds_what_its_real_rank_holds(tmp_path, shape):
    source = llama_checkpoint(tmp_path / "source")
    assert run(source, tmp_path / "target", *flags(shape)).exitcode == 0
    held = run_ranks(shape.world, held_by_real_ranks, source, shape)
    blocks = blocks_by_rank(tmp_path / "target")
    for name in held[0]:
        written = blocks[f"model.{name}"]
        assert all(same_bits(block, held[rank][name]) for rank, block in written), name
        # What a rank holds is in its own file, or once in that of a rank that holds the same.
        for rank, theirs in enumerate(local[name] for local in held):
            holding = [r for r, block in written if same_bits(block, theirs)]
            assert len(holding) == (theirs.numel() > 0), (name, rank)
    order = list(blocks)
    for rank in range(shape.world):
        starts = [
            (order.index(name), block.start)
            for name, tensor in read_manifest(tmp_path / "target").tensors.items()
            for block in tensor.blocks
            if block.file == f"__{rank}_0.distcp"
        ]
        assert starts == sorted(starts) and sorted(s for _, s in starts) == [s for _, s in starts]


def make_own() -> tuple[nn.Module, dict, list[nn.Module]]:
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5))
    model.register_buffer("seen", torch.zeros(3))
    return model, {"0": "colwise", "1": "rowwise"}, []


def test_other_models(tmp_path):
    """GPT-2, weights only; one's own model, with a buffer."""
    tensors = tensors_of("GPT2", GPT)
    gpt = write_checkpoint(tmp_path / "gpt", tensors, "GPT2", GPT)
    own_tensors = {f"model.{name}": t.detach() for name, t in make_own()[0].state_dict().items()}
    own = write_checkpoint(tmp_path / "own", own_tensors, "Sequential")
    target, own_target = tmp_path / "gpt32", tmp_path / "own71"
    lines = [
        (str(gpt), str(target), "--model-only", "--dp", "3", "--tp", "2"),
        (str(own), str(own_target), "--model", "tests.test_reshard:make_own", "--tp", "7"),
    ]
    assert run_ranks(1, commands, *lines) == [[0, 0]]
    weights = {name: tensor for name, tensor in tensors.items() if name.startswith("model.")}
    assert require_equal(target, weights).optimizer == ""
    assert len(require_equal(own_target, own_tensors).tensors["model.0.weight"].blocks) == 7


def test_mistakes_leave_nothing(tmp_path, ask):
    source = llama_checkpoint(tmp_path / "source")
    strange = write_checkpoint(tmp_path / "strange", tensors_of("Llama", LLAMA), "Mamba")
    unset = write_checkpoint(tmp_path / "unset", tensors_of("Llama", LLAMA), "GPT2")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").touch()
    hidden = llama_checkpoint(tmp_path / ".y.writing")
    before = sorted(tmp_path.rglob("*"))
    for arguments, message in [
        ((source, tmp_path / "new" / "x", "--dp", 3, "--tp", 4), "num_heads 6 is not divisible by tp 4: use"),
        ((source, tmp_path / "x", "--dp", 3, "--dp_replicate", 2), "dp 3 is not divisible by dp_replicate 2"),
        ((source, tmp_path / "x", "--dp", -1), "--dp -1 is not a positive number"),
        ((source, source / "x"), "lies in"),
        ((source, tmp_path / "full"), "is not empty"),
        ((hidden, tmp_path / "y"), "would be written at first"),
        ((strange, tmp_path / "x"), "is of a 'Mamba', which is none of Llama, GPT2: give the model with"),
        ((unset, tmp_path / "x"), "no model configuration of a GPT2"),
    ]:
        with pytest.raises(UserError) as error:
            ask("reshard", *arguments)
        assert message in str(error.value)
        assert sorted(tmp_path.rglob("*")) == before
    own = ("--model", "tests.test_reshard:make_own")
    for arguments, message in [
        (own, "the checkpoint holds other tensors than the model"),
        ((*own, "--tp", 3), "7 is not divisible by"),
    ]:
        outcome = run(source, tmp_path / "x", *arguments)
        assert outcome.exitcode == 2 and message in outcome.stderr, outcome.stderr
        assert "Traceback" not in outcome.stderr and sorted(tmp_path.rglob("*")) == before


def test_a_damaged_source_is_named_and_nothing_left(tmp_path):
    source = llama_checkpoint(tmp_path / "source")
    damage(source, at=read_manifest(source).tensors["model.norm.weight"].blocks[1].start)
    before = sorted(tmp_path.rglob("*"))
    outcome = run(source, tmp_path / "new" / "x", "--dp", 2)
    assert outcome.exitcode == 2 and "__1_0.distcp is damaged" in outcome.stderr, outcome.stderr
    assert sorted(tmp_path.rglob("*")) == before


def with_little_disk(*line: str) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
    commands(line)


def test_a_full_disk_is_told_and_nothing_left(tmp_path):
    source = llama_checkpoint(tmp_path / "source")
    outcome = try_ranks(1, with_little_disk, str(source), str(tmp_path / "x"))[0]
    assert outcome.exitcode == 2 and "cannot be written (File too large): it needs" in outcome.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


class Full:
    """No room for the numbers, but for the few bytes after them, as with a buffer."""

    def write(self, data: memoryview) -> int:
        if len(data) >= 4000:
            raise OSError(errno.ENOSPC, "no space")
        return len(data)


def test_a_full_disk_is_not_hidden_by_torch(tmp_path):
    with DataFile(tmp_path / "x") as file:
        real, file._handle = file._handle, Full()
        with pytest.raises(OSError, match="no space"):
            file.add(torch.ones(1000), (0,))
        file._handle = real


def killed_while_writing(*line: str) -> None:
    count, before = 0, room._write_tensor

    def write(*arguments):
        nonlocal count
        count += 1
        if count == 50:
            os.kill(os.getpid(), signal.SIGKILL)
        return before(*arguments)

    room._write_tensor = write
    commands(line)


def test_what_a_killed_run_left_is_no_obstacle(tmp_path):
    source, target = llama_checkpoint(tmp_path / "source"), tmp_path / "x"
    outcome = try_ranks(1, killed_while_writing, str(source), str(target), "--dp", "2")[0]
    assert outcome.exitcode == -signal.SIGKILL
    assert sorted(path.name for path in tmp_path.iterdir()) == [".x.writing", "source"]
    assert run(source, target, "--dp", 3).exitcode == 0
    require_equal(target, read_tensors(source))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "x"]


@pytest.mark.slow
def test_the_real_command_killed_and_started_again(tmp_path):
    tensors = tensors_of("Llama", LLAMA)
    source, target = write_checkpoint(tmp_path / "source", tensors, parts=2), tmp_path / "x"
    line = [Path(sys.executable).parent / "parallel2d", "checkpoint", "reshard", source, target, "--dp", "40"]
    process = subprocess.Popen(line)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".x.writing/__0_0.distcp")):
        assert process.poll() is None and time.monotonic() < deadline
    process.kill()
    assert process.wait() == -signal.SIGKILL and not target.exists()
    assert subprocess.run(line).returncode == 0
    require_equal(target, tensors)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "x"]


def test_a_write_that_does_not_read_back_is_refused(tmp_path):
    outcome = try_ranks(1, swapped, str(llama_checkpoint(tmp_path / "source")), str(tmp_path / "x"))[0]
    assert outcome.exitcode == 2 and "model.blocks.0.attention.k.weight is not what the source holds" in (
        outcome.stderr
    )
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def swapped(*line: str) -> None:
    """Blocks that land in each other's place, each with its right hash."""
    before = room._write_tensor

    def write(blocks, name, parts, files, progress):
        stored, hashed = before(blocks, name, parts, files, progress)
        if name.endswith("0.attention.k.weight") and name.startswith("model."):
            first, second = stored
            stored = (
                room.replace(second, offsets=first.offsets),
                room.replace(first, offsets=second.offsets),
            )
        return stored, hashed

    room._write_tensor = write
    commands((*line, "--dp", "2"))


def memory_of_a_rewrite(folder: Path, shapes: list[tuple[int, ...]], large_block: int) -> int:
    """Bytes that a rewrite to two ranks took at its peak, beside what the process had before."""
    tensors = {f"model.{i}": torch.zeros(shape) for i, shape in enumerate(shapes)}
    source = write_checkpoint(folder / "source", tensors, parts=1)
    del tensors
    manifest = read_manifest(source)
    layouts = {}
    for name, tensor in manifest.tensors.items():
        rows, columns = tensor.shape
        halves = {Box((0, i * columns // 2), (rows, columns // 2)): (i,) for i in (0, 1)}
        layouts[name] = Layout(tensor.shape, halves, {"tp": 1})
    room._LARGE_BLOCK_BYTES = large_block
    Path("/proc/self/clear_refs").write_text("5")
    before = status_bytes("VmRSS")
    room.reshard(room.Source(source, manifest), folder / "target", {"tp": 2}, layouts, lambda count: None)
    return status_bytes("VmHWM") - before


def status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


MIB = 2**20


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures by Linux's /proc")
@pytest.mark.parametrize(
    ("shapes", "large_block", "limit"),
    [
        # Many tensors of 16 MiB, 768 MiB together: two of them, and a band that is checked.
        ([(2048, 2048)] * 48, 256 * MIB, 96 * MIB),
        # One of 384 MiB in blocks above the (lowered) limit: never whole, nor with a copy.
        ([(49152, 2048)], 64 * MIB, (192 + 96) * MIB),
        # The same below the limit: whole, and a copy of a block.
        ([(49152, 2048)], 256 * MIB, (384 + 192 + 32) * MIB),
    ],
    ids=["many", "blocks", "whole"],
)
def test_memory_is_bounded_by_the_largest_tensor(tmp_path, shapes, large_block, limit):
    assert run_ranks(1, memory_of_a_rewrite, tmp_path, shapes, large_block)[0] < limit
