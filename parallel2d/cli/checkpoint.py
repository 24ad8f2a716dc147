"""`parallel2d checkpoint`: the commands on checkpoints."""

from typing import Any

from parallel2d.cli.checkpoint_hf import add_export_hf, add_import_hf


def add_checkpoint(commands: Any) -> None:
    """Add the command to argparse's subparsers."""
    parser = commands.add_parser(
        "checkpoint", allow_abbrev=False, help="checkpoints to and from Hugging Face folders"
    )
    subparsers = parser.add_subparsers(dest="subcommand", required=True)
    add_export_hf(subparsers)
    add_import_hf(subparsers)
