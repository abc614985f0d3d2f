"""Copies the session's notices, which `stoker status` shows, to the manager's log."""

from __future__ import annotations

import logging
from collections.abc import Mapping

log = logging.getLogger("stoker.manager")


class NoticeLog:
    """Logs each notice once. A notice that is given again has another time, and is logged again."""

    def __init__(self) -> None:
        self._logged: dict[str, float] = {}

    def copy_new(self, notices: Mapping[str, float]) -> None:
        """Log new notices. `notices`: each text with its time."""
        logged = self._logged
        if len(notices) == len(logged) and notices == logged:
            return
        for text, at in notices.items():
            if logged.get(text) != at:
                log.warning("%s", text)
        self._logged = dict(notices)
