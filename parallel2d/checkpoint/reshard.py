"""Rewrite a checkpoint for another mesh, a file for each rank of it, without any rank.

A tensor at a time is read, cut and written, so that the memory needed is one tensor's. The folder is
written under another name and takes its own when all of it has been read back: it exists as a whole
or not at all.
"""

import fcntl
import os
import resource
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from parallel2d.checkpoint.files import DataFile, StoredBlocks, bytes_of, commit, copy, write_error
from parallel2d.checkpoint.find import open_checkpoint
from parallel2d.checkpoint.intact import DamagedCheckpoint, Hash, StoredFile, hash_faults, open_file
from parallel2d.checkpoint.layout import Layout
from parallel2d.checkpoint.manifest import (
    DCP_METADATA_FILE,
    OPTIMIZER,
    Manifest,
    StoredBlock,
    read_manifest,
    versions,
)
from parallel2d.checkpoint.rows import content_hash
from parallel2d.errors import UserError
from parallel2d.shards import Box

# Besides the tensor itself a copy of one block is in memory; blocks above this are read one by one.
_LARGE_BLOCK_BYTES = 256 * 2**20
# Open files have a buffer each, and there is one for each rank.
_BUFFERS_BYTES = 64 * 2**20
_SPARE_FILES = 64

Progress = Callable[[int], None]
# {tensor: [(block, the rank that writes it)]}
Assignment = Mapping[str, list[tuple[Box, int]]]


@dataclass(frozen=True)
class Source:
    """A checkpoint to be rewritten."""

    folder: Path
    manifest: Manifest


def weights_only(manifest: Manifest) -> Manifest:
    """What is left of a checkpoint without its optimizer."""
    weights = {name: tensor for name, tensor in manifest.tensors.items() if not name.startswith(OPTIMIZER)}
    return replace(manifest, tensors=weights, optimizer="")


def bytes_to_move(manifest: Manifest) -> int:
    """What `reshard` reports as progress in all: each tensor is copied, then read back."""
    return 2 * sum(tensor.bytes for tensor in manifest.tensors.values())


def require_apart(source: Path, destination: Path) -> None:
    """UserError for a destination that is there already, or that would touch the source."""
    ours, theirs = destination.resolve(), source.resolve()
    if destination.is_symlink() or (destination.exists() and not destination.is_dir()):
        raise UserError(f"{destination} is not a folder: give a path that does not exist")
    if destination.is_dir() and any(destination.iterdir()):
        raise UserError(f"{destination} is not empty: a checkpoint is never overwritten")
    if ours.is_relative_to(theirs):
        raise UserError(f"{destination} lies in {source}, which holds that checkpoint alone: choose another")
    if theirs.is_relative_to(writing_folder(ours)):
        raise UserError(f"{source} lies where {destination} would be written at first: choose another name")


def writing_folder(destination: Path) -> Path:
    return destination.with_name(f".{destination.name}.writing")


def reshard(
    source: Source,
    destination: Path,
    mesh: Mapping[str, int],
    layouts: Mapping[str, Layout],
    progress: Progress,
) -> Manifest:
    """Write the source's tensors to `destination` as the ranks of another mesh would; its manifest.

    The step, the optimizer's class and the trainer's state are the source's. What an interrupted call
    left is removed at the next start; after an error nothing is left.

    Args:
        source: its manifest says which tensors are taken; UserError names what of it is damaged.
        mesh: {axis: size} of the target.
        layouts: of each tensor of the source, on the target.
        progress: called with numbers of bytes, `bytes_to_move` in all.
    """
    require_apart(source.folder, destination)
    assignment = assign(source.manifest, layouts)
    ranks = {rank for blocks in assignment.values() for _, rank in blocks}
    _allow_open_files(len(ranks) + len(source.manifest.files) + _SPARE_FILES)
    needed_bytes = sum(tensor.bytes for tensor in source.manifest.tensors.values())
    try:
        with _written_aside(destination) as writing:
            with StoredBlocks(source.folder, source.manifest) as blocks:
                files, stored, hashes = _write(blocks, writing, assignment, sorted(ranks), progress)
            files |= _carry_over(source, writing)
            tensors = {
                name: replace(tensor, blocks=stored[name], split=dict(layouts[name].split))
                for name, tensor in source.manifest.tensors.items()
            }
            manifest = replace(
                source.manifest,
                mesh=dict(mesh),
                versions=versions(),
                files=files,
                tensors=tensors,
                piece_bytes=Manifest.piece_bytes,
            )
            _require_same(StoredBlocks(writing, manifest), hashes, progress)
            commit(writing, destination, manifest)
    except OSError as error:
        raise UserError(write_error(destination.parent, error, needed_bytes)) from None
    # As everybody else will read it.
    return open_checkpoint(destination).manifest


def _carry_over(source: Source, writing: Path) -> dict[str, StoredFile]:
    """Copy what a checkpoint keeps besides its tensors: a tokenizer, for example."""
    manifest = read_manifest(source.folder)  # of all of it: `source` may lack some tensors
    blocks = {block.file for tensor in manifest.tensors.values() for block in tensor.blocks}
    carried = {}
    for name in manifest.files.keys() - blocks - {DCP_METADATA_FILE}:
        with open_file(source.folder, name) as reading:
            carried[name] = copy(reading, writing / name)
        if carried[name] != manifest.files[name]:
            raise DamagedCheckpoint(f"{source.folder / name} is damaged: its content was changed")
    return carried


def assign(manifest: Manifest, layouts: Mapping[str, Layout]) -> Assignment:
    """Each block to a rank that holds it: where several do, to the one with the fewest bytes to write."""
    load: dict[int, int] = {}
    chosen: dict[tuple[str, Box], int] = {}
    held = [(name, box, ranks) for name in manifest.tensors for box, ranks in layouts[name].holders.items()]
    # What only one rank can write comes first: the rest evens it out.
    for name, box, ranks in sorted(held, key=lambda entry: len(entry[2]) > 1):
        rank = min(ranks, key=lambda r: (load.get(r, 0), r))
        load[rank] = load.get(rank, 0) + box.numel * manifest.tensors[name].torch_dtype.itemsize
        chosen[name, box] = rank
    return {name: [(box, chosen[name, box]) for box in layouts[name].holders] for name in manifest.tensors}


def _write(
    blocks: StoredBlocks, writing: Path, assignment: Assignment, ranks: list[int], progress: Progress
) -> tuple[dict[str, StoredFile], dict[str, tuple[StoredBlock, ...]], dict[str, str]]:
    """The data files; of each tensor the blocks, and the hash of what was read."""
    buffer_bytes = min(2**20, max(2**12, _BUFFERS_BYTES // max(1, len(ranks))))
    with ExitStack() as opened:
        files = {
            rank: opened.enter_context(DataFile(writing / f"__{rank}_0.distcp", buffer_bytes))
            for rank in ranks
        }
        stored, hashes = {}, {}
        for name, parts in assignment.items():
            stored[name], hashes[name] = _write_tensor(blocks, name, parts, files, progress)
        return {file.path.name: file.close() for file in files.values()}, stored, hashes


def _write_tensor(
    blocks: StoredBlocks,
    name: str,
    parts: list[tuple[Box, int]],
    files: Mapping[int, DataFile],
    progress: Progress,
) -> tuple[tuple[StoredBlock, ...], str]:
    tensor = blocks.manifest.tensors[name]
    itemsize, written = tensor.torch_dtype.itemsize, []
    if len(parts) > 1 and max(box.numel for box, _ in parts) * itemsize > _LARGE_BLOCK_BYTES:
        for box, rank in parts:
            written.append(files[rank].add(blocks.read(name, box), box.offsets))
            progress(box.numel * itemsize)
        return tuple(written), content_hash(blocks, name, lambda _: None)
    whole = blocks.read(name)
    for box, rank in parts:
        written.append(files[rank].add(box.cut(whole), box.offsets))
        progress(box.numel * itemsize)
    return tuple(written), Hash(bytes_of(whole)).hexdigest()


def _require_same(written: StoredBlocks, hashes: Mapping[str, str], progress: Progress) -> None:
    """DamagedCheckpoint unless the files on disk are what was written, and their tensors the source's."""
    for name in written.manifest.files:
        _drop_from_cache(written.folder / name)
    faults = [f"{n}: {fault}" for n, fault in hash_faults(written.folder, written.manifest.files) if fault]
    with written:
        faults += [
            f"{name} is not what the source holds"
            for name in ([] if faults else hashes)
            if content_hash(written, name, progress) != hashes[name]
        ]
    if faults:
        raise DamagedCheckpoint("\n".join(["what was written does not read back:", *faults]))


def _drop_from_cache(path: Path) -> None:
    """So that reading it reads the disk, where the system knows of it. The file is on disk."""
    if hasattr(os, "posix_fadvise"):
        with open(path, "rb") as handle:
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def _written_aside(destination: Path) -> Iterator[Path]:
    """A new empty folder beside the destination, to be renamed to it; removed if anything fails."""
    writing = writing_folder(destination)
    made = [folder for folder in destination.parents if not folder.exists()]
    destination.parent.mkdir(parents=True, exist_ok=True)
    try:
        if writing.exists():
            os.close(_lock(writing))
            shutil.rmtree(writing)
        writing.mkdir()
        held = _lock(writing)
    except BaseException:
        _remove_empty(made)
        raise
    try:
        yield writing
    except BaseException:
        shutil.rmtree(writing, ignore_errors=True)
        _remove_empty(made)
        raise
    finally:
        os.close(held)


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def _lock(writing: Path) -> int:
    """Held until it is closed, or until the process ends however it ends."""
    handle = os.open(writing, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise UserError(f"{writing} is being written by another process: wait for it") from None
    except OSError:
        # Some network file systems lock no folders.
        pass
    return handle


def _allow_open_files(needed: int) -> None:
    """Raise the process's own limit of open files as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise UserError(
            f"{needed} files must be open at once, a file for each rank among them, and this system allows "
            f"{hard} (ulimit -Hn): choose a smaller mesh, or raise the limit"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
