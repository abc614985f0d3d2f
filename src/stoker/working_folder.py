"""The folder that this process works in. Somebody may have removed it: then `os.getcwd` raises FileNotFoundError."""

from __future__ import annotations

import os
from pathlib import Path

from stoker.errors import SessionError

REMOVED = "the folder that this was started in has been removed; change to another one (cd) and start it again there"


def working_folder() -> Path:
    """The folder that this process works in. Raises SessionError if it has been removed."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise SessionError(REMOVED) from None


def is_removed() -> bool:
    """True if the folder that this process works in has been removed."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def folders_here() -> tuple[str, ...]:
    """The folder that this process works in, as a place to search; no place if it has been removed."""
    return () if is_removed() else (os.getcwd(),)
