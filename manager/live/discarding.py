"""Removes result files that no program will read."""

from __future__ import annotations

import logging
from pathlib import Path

from stoker.log_files import SeldomLog
from stoker.protocol.session import SessionFolder

_lines = SeldomLog(logging.getLogger("stoker.manager"))


def discard_result(folder: SessionFolder, path: str) -> None:
    """Remove a result file of the session. A pilot names it: no other file is removed, and a name that is none, or a
    file that cannot be removed, costs a line in the log."""
    file = Path(path)
    if file.parent != folder.objects or not file.name.startswith("result-"):
        return
    try:
        file.unlink(missing_ok=True)
    except (OSError, ValueError) as error:  # a name may hold a zero, or be too long
        _lines.warning("results", f"cannot remove a result that no program reads, {path!r:.300}: {error}")
