"""The console script: which command is called."""

import argparse
import importlib
import io
import os
import signal
import sys

from parallel2d.errors import UserError

# {command: (module, function that adds it)}. Only the one that is called is imported: torch takes seconds,
# and `plan` needs none of it.
_COMMANDS = {
    "plan": ("parallel2d.cli.plan", "add_plan"),
    "verify": ("parallel2d.cli.verify", "add_verify"),
    "checkpoint": ("parallel2d.cli.checkpoint", "add_checkpoint"),
}


def main() -> None:
    """The console script."""
    if sys.argv[1:2] == ["plan"]:
        _run_alone()
    else:
        from parallel2d import launch

        launch.run(_main)


def _main() -> None:
    parser = argparse.ArgumentParser(prog="parallel2d", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    called = [name for name in sys.argv[1:2] if name in _COMMANDS]
    for name in called or _COMMANDS:
        module, add = _COMMANDS[name]
        getattr(importlib.import_module(module), add)(commands)
    arguments, rest = parser.parse_known_args()
    # A command returns whether all is well, and refuses what it does not know of the rest.
    well = arguments.run(arguments, rest)
    sys.exit(0 if well else 1)


def _run_alone() -> None:
    """What `launch.run` does, for a command without other ranks."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that has no × must not end a plan.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        _main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        # Who read our output, `head` for one, has gone.
        os._exit(128 + signal.SIGPIPE)
