"""The console script: which command is called."""

import argparse
import sys

from parallel2d import launch
from parallel2d.cli.checkpoint import add_checkpoint
from parallel2d.cli.verify import add_verify


def main() -> None:
    """The console script."""
    launch.run(_main)


def _main() -> None:
    parser = argparse.ArgumentParser(prog="parallel2d", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    add_checkpoint(commands)
    add_verify(commands)
    arguments, rest = parser.parse_known_args()
    # A command returns whether all is well, and refuses what it does not know of the rest.
    well = arguments.run(arguments, rest)
    sys.exit(0 if well else 1)
