"""`stoker run ./my_app.py`: a program of the user's own, as `python ./my_app.py` would run it, in a session of choice.

The file runs as `__main__`. One that leaves a click command called `command`, and has no `if __name__ == "__main__"`
of its own, has that command run with the arguments.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence
from pathlib import Path

import click

from stoker.errors import ConfigError


def is_program(name: str) -> bool:
    """Whether this names a Python file, and no application."""
    return name.endswith(".py")


def read_program(path: Path) -> bytes:
    """The source of a program. Raises ConfigError for a file that cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be run: {error.strerror}", file=str(path)) from None


def run_program(path: Path, arguments: Sequence[str]) -> None:
    """Run a file as the main program, with these arguments. Raises ConfigError for a file that cannot be read."""
    source = read_program(path)
    module = types.ModuleType("__main__")
    module.__file__ = str(path.absolute())
    sys.modules["__main__"] = module
    sys.path.insert(0, str(path.absolute().parent))
    sys.argv = [str(path), *arguments]
    try:
        exec(compile(source, str(path), "exec", dont_inherit=True), vars(module))
    except Exception as error:  # as Python tells it, without the frames of this command
        frames = error.__traceback__
        sys.excepthook(type(error), error.with_traceback(frames.tb_next if frames is not None else None), None)
        raise SystemExit(1) from None
    command = vars(module).get("command")
    if isinstance(command, click.Command) and b"__main__" not in source:
        command.main(list(arguments), prog_name=f"stoker run {path}", standalone_mode=False)
