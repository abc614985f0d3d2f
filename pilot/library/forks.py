"""Children that user code forks from a library's process: none of them goes on as the library."""

from __future__ import annotations

import os
import sys
import traceback
from typing import NoReturn


def leave_fork() -> None:
    """End a forked child that has returned from the user's function, without the parent's exit handlers."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue
    os._exit(0)


def leave_child(error: BaseException | None) -> NoReturn:
    """End a child that user code forked and did not end: only the library itself reports a call's end."""
    code = error.code if isinstance(error, SystemExit) else error
    try:
        if error is not None and not isinstance(error, SystemExit):
            traceback.print_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)
