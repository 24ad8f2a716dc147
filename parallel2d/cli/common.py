"""What the commands on checkpoints have in common."""

import argparse
import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped]  # it has no types of its own

from parallel2d.checkpoint.find import find_checkpoint
from parallel2d.errors import UserError

PATH = "a checkpoint (…/step-00000200), or a run folder, whose newest one is taken"


def add_command(
    inner: Any, name: str, run: Callable[[argparse.Namespace], bool], about: str, description: str = ""
) -> Any:
    """One of them, which returns whether all is well, and knows all of its flags."""

    def checked(arguments: argparse.Namespace, rest: list[str]) -> bool:
        if rest:
            raise UserError(f"unknown: {' '.join(rest)} (see parallel2d checkpoint {name} --help)")
        try:
            return run(arguments)
        except OSError as error:
            # Of paths that cannot even be looked at.
            if error.errno not in (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG):
                raise
            raise UserError(f"{error.filename} cannot be read or written: {error.strerror}") from None

    parser = inner.add_parser(name, allow_abbrev=False, help=about, description=description or about)
    parser.set_defaults(run=checked)
    return parser


def found_checkpoint(path: Path) -> Path:
    """The checkpoint that is meant; on stderr, which, if that was not said."""
    meant = find_checkpoint(path)
    if meant != path:
        print(f"newest checkpoint of {path}: {meant}", file=sys.stderr)
    return meant


@contextmanager
def progress_bar(what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, if that is a terminal; takes numbers of bytes."""
    with tqdm(desc=what, total=total_bytes, unit="B", unit_scale=True, disable=None) as bar:

        def advance(count: int) -> None:
            bar.update(count)

        yield advance


def absolute(path: str | Path) -> Path:
    """Of a folder to make: `.` has no name that a temporary one could be made of."""
    return Path(os.path.abspath(path))
