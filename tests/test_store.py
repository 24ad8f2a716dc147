"""Saving: in the background, when the disk fails, and what is kept."""

import errno
import os
import resource
import signal
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from parallel2d.models.llama import LlamaConfig
from torch import nn

from parallel2d import MeshShape, UserError, build_mesh, init_weights, launch, parallelize
from parallel2d.checkpoint import files, find, writer
from parallel2d.checkpoint import store as stores
from parallel2d.checkpoint.files import StoredBlocks
from parallel2d.checkpoint.find import Checkpoint, checkpoints_in, name_of, open_checkpoint, remove_leftovers
from parallel2d.checkpoint.load import Resumed, load_checkpoint
from parallel2d.checkpoint.manifest import Manifest
from parallel2d.checkpoint.retention import VAL_LOSS, Retention
from parallel2d.checkpoint.store import CheckpointStore
from tests.ranks import run_ranks, try_ranks
from tests.test_checkpoint import build

TINY = LlamaConfig(vocab_size=13, width=8, num_layers=1, num_heads=2, num_kv_heads=1, ffn_width=6)


def stored(path: Path) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(path)
    with StoredBlocks(path, checkpoint.manifest) as blocks:
        return {name: blocks.read(name) for name in checkpoint.manifest.tensors}


def fill(model, value: float) -> None:
    for parameter in model.parameters():
        parameter.detach().fill_(value)


def train_on_while_saving(folder: str) -> None:
    """The thread may write only after the weights, and what was given beside them, have changed."""
    with launch.world(2, "cpu", 60):
        model, optimizer = build(MeshShape(1, 2, 1), TINY)
        changed = threading.Event()
        add = files.DataFile.add

        def add_later(self, tensor, offsets):
            assert changed.wait(60)
            return add(self, tensor, offsets)

        files.DataFile.add = add_later
        with CheckpointStore(Path(folder), background=True) as store:
            for step in (1, 2):
                fill(model, step)
                beside = {"done": {"step": step}}
                store.save(step, model, optimizer, beside)
                fill(model, -1)
                beside["done"]["step"] = -1
                changed.set()
        for step in (1, 2):
            path = Path(folder) / name_of(step)
            assert all((tensor == step).all() for tensor in stored(path).values())
            assert open_checkpoint(path).manifest.trainer["done"] == {"step": step}


def test_what_is_saved_is_of_the_moment_of_the_save(tmp_path):
    run_ranks(2, train_on_while_saving, str(tmp_path))


def saves_that_fail(folder: str, how: str, background: bool) -> list[str]:
    """Save 1, fail at 2, save 3; the lines that were told on this rank."""
    told: list[str] = []
    with launch.world(2, "cpu", 60):
        model, optimizer = build(MeshShape(1, 2, 1), TINY)
        path = Path(folder)
        with CheckpointStore(path, Retention(last=1), background=background, tell=told.append) as store:
            fill(model, 1)
            store.save(1, model, optimizer, {})
            store._finish()
            dist.barrier()
            mend = spoil(path, how)
            dist.barrier()
            fill(model, 2)
            store.save(2, model, optimizer, {})
            store._finish()
            dist.barrier()  # rank 0 clears up
            assert [c.step for c in checkpoints_in(path)[0]] == [1]
            assert sorted(p.name for p in path.iterdir()) == [name_of(1)]
            dist.barrier()
            mend()
            dist.barrier()
            fill(model, 3)
            store.save(3, model, optimizer, {})
        dist.barrier()
        assert [c.step for c in checkpoints_in(path)[0]] == [3]
        assert all((tensor == 3).all() for tensor in stored(path / name_of(3)).values())
    return told


def spoil(folder: Path, how: str):
    """Make writes fail on rank 1 alone, or on rank 0 alone; returns what ends that."""
    rank = dist.get_rank()
    if how == "disk full on rank 1" and rank == 1:
        # A limit that the kernel itself keeps; the signal that comes with it would end the process.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    if how == "disk full for the manifest" and rank == 0:
        write_text, files.write_text = files.write_text, full_disk
        return lambda: setattr(files, "write_text", write_text)
    if how == "no folder can be made" and rank == 0:
        mkdir, Path.mkdir = Path.mkdir, full_disk
        return lambda: setattr(Path, "mkdir", mkdir)
    return lambda: None


def full_disk(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("background", [False, True], ids=["at once", "in the background"])
@pytest.mark.parametrize(
    "how", ["disk full on rank 1", "disk full for the manifest", "no folder can be made"]
)
def test_a_save_that_fails_is_told_and_the_next_one_works(tmp_path, how, background):
    for told in run_ranks(2, saves_that_fail, str(tmp_path), how, background):
        assert len(told) == 3 and "step-00000001 in" in told[0] and "step-00000003 in" in told[2]
        assert told[1].startswith("NOT saved") and "bytes and" in told[1] and "bytes are free" in told[1]
        assert "the run goes on with the checkpoints it has" in told[1]


def end_with_a_pending_save(folder: str, how: str) -> None:
    with launch.world(2, "cpu", 60):
        model, optimizer = build(MeshShape(1, 2, 1), TINY)
        commit = files.commit

        def commit_late(*arguments):
            threading.Event().wait(1)
            if how == "disk full":
                full_disk()
            commit(*arguments)

        writer.commit = commit_late
        with CheckpointStore(Path(folder), background=True) as store:
            assert store.save(1, model, optimizer, {}) < 1
            store.poll()
            if how == "mistake":
                raise UserError("a mistake in the loop")


def test_the_end_waits_for_the_last_save(tmp_path):
    for how, message in {"": None, "mistake": "a mistake in the loop"}.items():
        outcomes = try_ranks(2, end_with_a_pending_save, str(tmp_path / f"run{how}"), how)
        assert stored(tmp_path / f"run{how}" / name_of(1))
        assert all(o.exitcode == 0 if message is None else message in o.stderr for o in outcomes)


def test_a_last_save_that_fails_is_an_error(tmp_path):
    for outcome in try_ranks(2, end_with_a_pending_save, str(tmp_path), "disk full"):
        assert "UserError: the last checkpoint was not saved: " in outcome.stderr
    assert not list(tmp_path.iterdir())


def save_beside_what_cannot_go(folder: str) -> list[str]:
    told: list[str] = []
    with launch.world(1, "cpu", 60):
        model, optimizer = build(MeshShape(), TINY)
        with CheckpointStore(Path(folder), Retention(last=1), tell=told.append) as store:
            store.save(1, model, optimizer, {})
            stores.delete = full_disk
            store.save(2, model, optimizer, {})
            stores.delete = find.delete
            # JSON has strings for keys: 10 comes before 9 there.
            store.save(3, model, optimizer, {"of epochs": {9: 0.5, 10: 0.25}})
    return told


def test_an_old_one_that_cannot_be_deleted_ends_no_run(tmp_path):
    (told,) = run_ranks(1, save_beside_what_cannot_go, str(tmp_path))
    assert "step-00000002" in told[1] and "an older one cannot be deleted" in told[1]
    (left,) = checkpoints_in(tmp_path)[0]
    assert left.step == 3 and left.manifest.trainer == {"of epochs": {"9": 0.5, "10": 0.25}}


class Small(nn.Module):
    """Too small for three ranks: the last one has a share of nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2, bias=False)


def save_shares_of_nothing(folder: str) -> None:
    with launch.world(3, "cpu", 60) as device:
        with torch.device("meta"):
            model = Small()
        parallelize(model, build_mesh(MeshShape(1, 3, 1), "cpu"), plan={}, units=[])
        init_weights(model, device, 0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for background in (False, True):
            with CheckpointStore(Path(folder), background=background) as store:
                store.save(1 + background, model, optimizer, {})
        dist.barrier()
        load_checkpoint(store.latest(), model, optimizer)


def test_a_rank_that_has_nothing_saves_and_loads_it(tmp_path):
    run_ranks(3, save_shares_of_nothing, str(tmp_path))
    assert (
        stored(tmp_path / name_of(1)).keys() == stored(tmp_path / name_of(2)).keys() == {"model.layer.weight"}
    )


def of_steps(*steps: int, **val_losses: float) -> list[Checkpoint]:
    losses = {int(name[1:]): loss for name, loss in val_losses.items()}
    return [
        Checkpoint(
            Path(name_of(step)),
            Manifest(step, {}, {}, "", "", {VAL_LOSS: losses[step]} if step in losses else {}, {}, {}),
        )
        for step in steps
    ]


@pytest.mark.parametrize(
    ("retention", "kept"),
    [
        (Retention(), [2, 4, 6, 8, 10]),
        (Retention(last=1), [10]),
        (Retention(last=9), [2, 4, 6, 8, 10]),
        (Retention(last=1, every=4), [4, 8, 10]),
        (Retention(last=1, best=1), [4, 10]),
        (Retention(last=1, best=2), [4, 6, 10]),
        (Retention(last=2, every=6, best=1), [4, 6, 8, 10]),
        (Retention(every=4, best=1), [2, 4, 6, 8, 10]),
    ],
    ids=str,
)
def test_what_stays(retention, kept):
    """Step 6 is as good as step 2, later; step 8 is not a number, and the newest was not validated."""
    found = of_steps(2, 4, 6, 8, 10, s2=2.0, s4=1.0, s6=1.5, s8=float("nan"))
    gone = {c.step for c in retention.expendable(found)}
    assert sorted({2, 4, 6, 8, 10} - gone) == kept


def test_of_equals_the_earlier_is_the_best():
    found = of_steps(1, 2, 3, s1=1.0, s2=1.0)
    assert [c.step for c in Retention(last=1, best=1).expendable(found)] == [2]


def keep_one(folder: str) -> list[str]:
    with launch.world(1, "cpu", 60):
        model, optimizer = build(MeshShape(), TINY)
        path = Path(folder)
        went_on = Resumed(Checkpoint(path / name_of(8), of_steps(8)[0].manifest), False, (), "")
        with CheckpointStore(path, Retention(1, every=5, best=1), resumed=went_on) as store:
            for step in range(4, 13):
                store.save(step, model, optimizer, {VAL_LOSS: 1.0 if step == 7 else 2.0})
                assert store.latest().step == step
        return sorted(p.name for p in path.iterdir())


def test_a_run_keeps_the_best_the_every_the_newest_and_where_it_began(tmp_path):
    (tmp_path / "step-00000005-backup").mkdir()
    (left,) = run_ranks(1, keep_one, str(tmp_path))
    assert left == [*map(name_of, (5,)), "step-00000005-backup", *map(name_of, (7, 8, 10, 12))]


def test_leftovers_of_any_kind_go(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    folder = tmp_path / "checkpoints"
    (folder / "step-00000001.tmp" / "below").mkdir(parents=True)
    (folder / "step-00000002.tmp").write_text("")
    (folder / "step-00000003.tmp").symlink_to(elsewhere)
    (folder / "step-00000004.tmp").symlink_to(tmp_path / "nowhere")
    (folder / "step-00000005.tmp-mine").mkdir()
    remove_leftovers(folder)
    assert [p.name for p in folder.iterdir()] == ["step-00000005.tmp-mine"] and elsewhere.is_dir()
