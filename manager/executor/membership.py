"""A client's membership in a session.

Every second the client reads the session file, to find a restarted manager's address or the session's end.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Callable

from stoker.errors import SessionError
from stoker.manager.executor.processes import folder_removed_error
from stoker.manager.live.interfaces import explain_missing_route, is_listening
from stoker.manager.live.presence import describe_remote_manager
from stoker.protocol.session import SessionFile, SessionFolder

logger = logging.getLogger(__name__)

CHECK_EVERY_S = 1.0
SLOW_S = 5.0
ABSENCE_REPORT_S = 30.0
"""Seconds after which an absent manager is reported."""


class SessionMembership:
    """A client's connection state. `joined` is set from the manager's welcome until the connection is lost."""

    def __init__(self, folder: SessionFolder) -> None:
        self.joined = threading.Event()
        self.was_joined = False
        self.session = folder.read()
        self.session_end_reason = ""
        """Why the session has ended; empty while it runs."""
        self._folder = folder
        self._check_at = 0.0
        self._report_at = math.inf
        self._is_reported = False

    def handle_welcome(self) -> None:
        self.joined.set()
        self.was_joined = True

    def has_joined(self, *, within_s: float) -> bool:
        return self.was_joined or self.joined.wait(within_s)

    def handle_lost_connection(self, now: float) -> None:
        if self.joined.is_set():
            self.joined.clear()
            self._report_at, self._is_reported = now + ABSENCE_REPORT_S, False

    def wait_until_joined(self, timeout_s: float, *, journal_trouble: Callable[[], str]) -> None:
        if self.joined.wait(min(timeout_s, SLOW_S)):
            return
        if timeout_s > SLOW_S:
            why = self._why_not_joined(journal_trouble())
            logger.warning("%s; this program waits up to %.0f s for it", why, timeout_s)
            if self.joined.wait(timeout_s - SLOW_S):
                return
        why = self._why_not_joined(journal_trouble())
        raise self._not_joined_error(f"{why}; this program waited for {timeout_s:.0f} s")

    def read_session_file_if_due(self, now: float) -> SessionFile | None:
        """Read the session file, report a long absence of the manager, and set `session_end_reason`."""
        if now < self._check_at or self.session_end_reason:
            return None
        self._check_at = now + CHECK_EVERY_S
        if why := self._folder.end_reason():
            self.session_end_reason = why
            return None
        if now >= self._report_at:
            if not os.path.isdir(self._folder.path):
                raise folder_removed_error(self._folder)
            self._report_at = now + ABSENCE_REPORT_S
            report = logger.debug if self._is_reported else logger.warning
            self._is_reported = True
            text = "session %s: its manager is gone; running calls continue. If it does not return: stoker attach %s"
            report(text, self.session.session, self.session.session)
        try:
            self.session = self._folder.read()
        except SessionError as error:  # the file system may not answer; the next check retries
            logger.debug("session file: %s", error)
            return None
        return self.session

    def explain_silence(self) -> str:
        return (
            f"session {self.session.session}: its manager does not answer: its process is stopped, or the file system"
            f" of {self._folder.path} hangs; calls and results wait for it, and running calls continue"
        )

    def _why_not_joined(self, journal_trouble: str) -> str:
        address, log = self.session.address, self._folder.manager_log
        subject = f"session {self.session.session}: its manager{describe_remote_manager(self._folder)} at {address}"
        if journal_trouble:
            return f"{subject} accepts no programs: {journal_trouble}"
        if why := explain_missing_route(address):
            raise self._not_joined_error(f"{subject} cannot be reached: {why}")
        if is_listening(address):
            return f"{subject} accepts connections but does not answer; its log may show why: {log}"
        return f"{subject} no longer listens there; its log may show why: {log}"

    def _not_joined_error(self, why: str) -> SessionError:
        return SessionError(why, session=self.session.session, log=str(self._folder.manager_log))
