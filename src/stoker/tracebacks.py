"""Remove Stoker's frames from the tracebacks of a user's errors.

After `install_traceback_hooks`, tracebacks of uncaught errors show only the user's frames, in programs and in
notebooks. The traceback of an unexpected exception in Stoker stays complete. `error.__traceback__` of a caught error is
also complete.
"""

from __future__ import annotations

import itertools
import os
import sys
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from stoker.errors import StokerError

CALL_NOTE_PREFIX = "call c-"
"""Prefix of the note that Stoker adds to the exception of a call."""
_STOKER_FOLDER = os.path.dirname(os.path.abspath(__file__)) + os.sep
_APPS_FOLDER = os.path.join(_STOKER_FOLDER, "apps") + os.sep


def install_traceback_hooks() -> None:
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        remove_stoker_frames(error)
        before(kind, error, error.__traceback__ if trace is not None else None)

    if getattr(before, "__module__", "") != __name__:
        sys.excepthook = hook
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", None)  # missing during IPython's own import
    shell = get_shell() if get_shell is not None else None
    if shell is not None and not shell.custom_exceptions:  # keep a user's own handler
        shell.set_custom_exc((Exception,), _show_notebook_traceback)


def _show_notebook_traceback(
    shell: Any, kind: Any, error: BaseException, trace: Any, tb_offset: int | None = None
) -> None:
    del trace
    remove_stoker_frames(error)
    shell.showtraceback((kind, error, error.__traceback__), tb_offset=tb_offset, running_compiled_code=True)


def user_traceback_lines(error: BaseException) -> list[str]:
    """Return the lines of a traceback from its first frame outside Stoker."""
    frames = itertools.dropwhile(
        lambda each: each[0].f_globals.get("__name__", "").startswith("stoker."), traceback.walk_tb(error.__traceback__)
    )
    own = traceback.StackSummary.extract(frames)
    if not own:
        return []
    return "".join([*traceback.format_list(own), *traceback.format_exception_only(error)]).rstrip().splitlines()


def remove_stoker_frames(error: BaseException) -> None:
    """Remove Stoker's frames from the tracebacks of a user's error and of its causes."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            left += [each.__cause__, None if each.__suppress_context__ else each.__context__]
            if _is_user_error(each):
                each.__traceback__ = _keep_user_frames(each.__traceback__)


def _is_user_error(error: BaseException) -> bool:
    """Return True if Stoker raised the error on purpose, or if code outside Stoker raised the error."""
    notes = getattr(error, "__notes__", ())
    if isinstance(error, StokerError | KeyboardInterrupt) or any(
        str(note).startswith(CALL_NOTE_PREFIX) for note in notes
    ):
        return True
    frames = [*_iter_frames(error.__traceback__)]
    return bool(frames) and not _is_stoker_frame(frames[-1])


def _keep_user_frames(trace: TracebackType | None) -> TracebackType | None:
    parsl = sys.modules.get("parsl")
    theirs = os.path.dirname(str(parsl.__file__)) + os.sep if parsl is not None else "\0"
    frames = [
        each for each in _iter_frames(trace) if not _is_stoker_frame(each) and not _frame_file(each).startswith(theirs)
    ]
    kept: TracebackType | None = None
    for each in reversed(frames):
        kept = TracebackType(kept, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return kept if frames else trace  # a traceback without user frames stays complete


def _iter_frames(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _is_stoker_frame(trace: TracebackType) -> bool:
    file = _frame_file(trace)
    return file.startswith(_STOKER_FOLDER) and not file.startswith(_APPS_FOLDER)


def _frame_file(trace: TracebackType) -> str:
    name = trace.tb_frame.f_code.co_filename
    try:
        return os.path.abspath(name)
    except OSError:  # the working folder has been removed
        return name
