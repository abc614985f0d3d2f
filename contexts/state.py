"""Where the user's state lies on this machine: measurements, digests of files, snapshots of models.

`STOKER_HOME` names it; else `$XDG_STATE_HOME/stoker`, else `~/.local/state/stoker`. A home may be shared by all nodes
of a cluster, so a pilot keeps snapshots elsewhere: on its own disk (it sets `STOKER_SNAPSHOTS` for its libraries).
"""

from __future__ import annotations

import os
from pathlib import Path

SNAPSHOTS = "STOKER_SNAPSHOTS"
"""The variable that names the folder of snapshots."""


def state_folder() -> Path:
    """The user's state folder (it may not exist yet)."""
    named = os.environ.get("STOKER_HOME")
    if named:
        return Path(named).absolute()
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base).absolute() / "stoker"


def snapshot_folder() -> Path:
    """Where snapshots of models are kept: `STOKER_SNAPSHOTS`, else `snapshots` in the state folder."""
    named = os.environ.get(SNAPSHOTS)
    return Path(named).absolute() if named else state_folder() / "snapshots"
