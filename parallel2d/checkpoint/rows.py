"""A stored tensor by bands of rows, so that one larger than the memory can be looked at."""

from collections.abc import Callable, Iterator

from parallel2d.checkpoint.files import StoredBlocks, bytes_of
from parallel2d.checkpoint.intact import Hash
from parallel2d.checkpoint.manifest import piece_rows
from parallel2d.shards import Box

_BAND_BYTES = 32 * 2**20


def row_boxes(shape: tuple[int, ...], itemsize: int, band_bytes: int = _BAND_BYTES) -> Iterator[Box]:
    """Blocks of whole rows (entries of dim 0), of about that size, which cover a tensor in order."""
    if 0 in shape:
        return
    if not shape:
        yield Box((), ())
        return
    rows = piece_rows(shape, itemsize, band_bytes)
    for first in range(0, shape[0], rows):
        yield Box((first, *(0 for _ in shape[1:])), (min(rows, shape[0] - first), *shape[1:]))


def content_hash(blocks: StoredBlocks, name: str, progress: Callable[[int], None]) -> str:
    """Of a tensor's numbers in row-major order: the same however it is cut into blocks."""
    stored, hashed = blocks.manifest.tensors[name], Hash()
    for box in row_boxes(stored.shape, stored.torch_dtype.itemsize):
        band = blocks.read(name, box)
        hashed.update(bytes_of(band))
        progress(band.nbytes)
    return hashed.hexdigest()
