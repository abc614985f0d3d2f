"""What people are told while the journal cannot be written: in `status`, in the log, and in programs that wait.

Nothing is lost meanwhile, but no call begins or ends for its program. So the manager tells connected programs without
being asked: a program's own questions are seldom, and its calls would just wait.
"""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import msgspec

from stoker.manager.live.journal import Journal
from stoker.protocol.status import JOURNAL
from stoker.protocol.to_client import Status
from stoker.units import show_seconds

log = logging.getLogger("stoker.manager")

TELL_S = 3.0
"""Programs hear of trouble that has lasted for so long."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


class JournalTrouble:
    """Why the journal at `folder` cannot be written just now (`text`), and whether programs know."""

    def __init__(self, journal: Journal, folder: Path) -> None:
        self.text = ""
        """In words, with what to do; empty while the journal can be written."""
        self._journal = journal
        self._folder = folder
        self._since = 0.0
        self._told = ""
        """What programs were told last."""

    @property
    def is_none(self) -> bool:
        """True if the journal can be written and everyone knows it."""
        return not (self._journal.trouble or self.text or self._told)

    def changed_notice(self, now: float) -> str:
        """A notice for the session if its journal can no longer be written, or can be again, since the last call."""
        if bool(self._journal.trouble) is bool(self.text):
            return ""
        if self._journal.trouble:
            self._since, self.text = now, words(self._journal, self._folder)
            log.warning("%s", self.text)
            return f"the journal cannot be written ({self._journal.trouble}): calls and results wait"
        self.text = ""
        return f"the journal can be written again, after {show_seconds(now - self._since)}"

    def is_untold(self, now: float) -> bool:
        """True once whenever the connected programs are to be told how it is."""
        if self.text == self._told or (self.text and now - self._since < TELL_S):
            return False
        self._told = self.text
        return True

    def program_came(self) -> None:
        """A program has said hello, which does not know yet."""
        if self.text:
            self._told = ""

    def added_to(self, status: Status) -> Status:
        """The session's status with this trouble in it."""
        if not self.text:
            return status
        return msgspec.structs.replace(status, trouble={**status.trouble, JOURNAL: self.text})


def words(journal: Journal, folder: Path) -> str:
    """Why a journal cannot be written, and what to do."""
    cannot = f"the journal cannot be written ({journal.trouble})"
    if journal.errno in _FULL:
        return f"{cannot}: the disk of {folder} is full; calls and results wait until it has room: make room there"
    if journal.errno == errno.EFBIG:
        return (
            f"{cannot}: {journal.path} is as large as this user's files may be (ulimit -f); calls and results wait"
            f" until the limit is raised (an admin may have to): prlimit --pid {os.getpid()} --fsize=unlimited"
        )
    return f"{cannot}: calls and results wait until {journal.path} can be written"
