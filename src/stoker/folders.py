"""Find this process's working folder (another program may have removed it), and check paths."""

from __future__ import annotations

import os
from pathlib import Path

from stoker.errors import SessionError

FOLDER_REMOVED = "the working folder has been removed; change to another folder (cd) and start the program again"


def working_folder() -> Path:
    """Return the working folder. Raises SessionError if it was removed."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise SessionError(FOLDER_REMOVED) from None


def is_working_folder_removed() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def working_folder_if_exists() -> tuple[str, ...]:
    return () if is_working_folder_removed() else (os.getcwd(),)


def refuse_non_utf8_path(path: str | Path, *, what: str, advice: str) -> None:
    """Raise SessionError if a path is not valid UTF-8, because messages and scripts are UTF-8."""
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:
        raise SessionError(
            f"{what}, {os.fsencode(path)!r}, has a name that is not valid UTF-8, which Stoker cannot use: {advice}"
        ) from None
