"""Read the status of a session repeatedly in one program."""

from __future__ import annotations

import time

from stoker.errors import SessionError
from stoker.manager.cli import session_choice
from stoker.manager.cli.ask import Observer, SessionEndedError
from stoker.manager.cli.session_choice import SessionAnswer
from stoker.protocol.session import SessionFolder

_ENDED_AGAIN_S = 10.0
"""Seconds after which an ended session is checked again. `stoker attach` may have restarted the session's manager."""


class FollowedSession:
    """A session whose status is read repeatedly, also after restarts of its manager and after its end.

    Args:
        name: The session's id, a prefix of the id, or its folder. By default the session that `stoker status` shows.

    Raises:
        SessionError: The session does not exist.
    """

    def __init__(self, name: str = "") -> None:
        folder = session_choice.session_to_show(name, hint="stoker dashboard")
        file = folder.read()
        self.folder = str(folder.path)
        self.session = file.session
        self.site = file.site
        self.log = str(folder.manager_log)
        self._folder: SessionFolder = folder
        self._observer: Observer | None = None
        self._ended: SessionAnswer | None = None
        self._ended_at = 0.0

    def answer(self) -> SessionAnswer:
        """Return the session's status. For an ended session, return its last status from its journal.

        Raises:
            SessionError: The manager does not answer, or the journal cannot be read.
        """
        if self._ended is not None and time.monotonic() - self._ended_at < _ENDED_AGAIN_S:
            return self._ended
        try:
            if self._observer is None:
                observer = Observer(self._folder)
                self._observer = observer.__enter__()
            status = self._observer.status()
        except SessionEndedError as ended:
            self.close()
            if self._ended is None:
                self._ended = session_choice.last_status(self._folder, ended)
            self._ended_at = time.monotonic()
            return self._ended
        except SessionError:
            self.close()
            raise
        self._ended = None
        return SessionAnswer(status)

    def close(self) -> None:
        """Close the connection to the manager. The next call of `answer` opens the connection again."""
        if self._observer is not None:
            self._observer.close()
            self._observer = None
