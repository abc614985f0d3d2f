"""Sessions that have begun: made by `stoker up`, and without a manager that listens yet.

The command that began one may be killed at any moment, and its manager comes up all the same. So a session is known by
its id before its manager is started, and commands that look for a session wait for those that are coming up.
"""

from __future__ import annotations

import time
from pathlib import Path

from stoker.contexts.folders import state_folder
from stoker.locks import is_locked
from stoker.protocol.session import changed_at, is_begun

_MANAGER_STARTS_S = 5.0
"""A manager has taken its lock so long after its session was made."""
_LISTENS_S = 60.0
"""A manager that has its lock listens within this."""
_POLL_S = 0.02


def is_coming_up(folder: Path) -> bool:
    """Whether the manager of a session that has begun may still come: it holds its lock, or had no time to take it."""
    if not is_begun(folder):
        return False
    age_s = time.time() - changed_at(folder / "manager.json")
    return 0 <= age_s < _MANAGER_STARTS_S or (age_s < _LISTENS_S and is_locked(folder / "manager.lock") is True)


def wait_for_begun(name: str = "") -> None:
    """Wait until each session that has just begun, and whose id begins so, has a manager that listens, or will have
    none."""
    links = state_folder() / "sessions"
    while any(is_coming_up(link) for link in links.glob("*") if link.name.startswith(name)):
        time.sleep(_POLL_S)
