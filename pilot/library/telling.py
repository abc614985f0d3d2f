"""An exception in short, for people: what it is, and where it was raised. `stoker explain` shows it."""

from __future__ import annotations

import os
import sysconfig
import traceback
from types import FrameType

_TEXT_MOST = 400
_FRAMES = 4
_INSTALLED = tuple({os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("purelib", "platlib", "stdlib")})
_OURS = ("stoker.pilot.", "stoker.contexts.")


def in_short(error: BaseException) -> str:
    """`KeyError: 'claim'`, and a line for each of the last frames in the user's own code, the innermost last; where
    none is, for the innermost of all. Nothing that the exception's own methods do can hinder it."""
    try:
        said = [part.strip() for part in traceback.format_exception_only(error) if part.strip()]
        frames = list(traceback.walk_tb(error.__traceback__))
        own = [(frame, line) for frame, line in frames if _is_own(frame)][-_FRAMES:] or frames[-1:]
        places = [f"at {frame.f_code.co_filename}:{line} in {frame.f_code.co_name}" for frame, line in own]
        return "\n".join([" ".join(said)[:_TEXT_MOST], *places])
    except Exception:  # a class of the user's may do anything when it is shown
        return type(error).__name__


def _is_own(frame: FrameType) -> bool:
    """Whether a frame's code is neither installed nor the library's own."""
    file, module = frame.f_code.co_filename, str(frame.f_globals.get("__name__", ""))
    return not (os.path.realpath(file).startswith(_INSTALLED) or module.startswith(_OURS) or file.startswith("<frozen"))
