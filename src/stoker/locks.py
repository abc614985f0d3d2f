"""Whether a file is locked (flock), asked by somebody who does not want the lock."""

from __future__ import annotations

import fcntl
from pathlib import Path


def is_locked(file: Path, *, exclusively: bool = False) -> bool | None:
    """Whether somebody holds a lock on a file, or an exclusive one; None where that cannot be told.

    It is asked by taking the lock for a moment: `exclusively`, several can ask at once and none finds another.
    """
    try:
        with file.open("rb") as opened:
            fcntl.flock(opened, (fcntl.LOCK_SH if exclusively else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    except OSError:  # a file that is not ours, a file system without locks
        return None
    return False
