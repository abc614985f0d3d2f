"""The errors with which a client's link to its session ends."""

from __future__ import annotations

import sys

from stoker.errors import SessionError
from stoker.protocol.session import PYTHON, SessionFile, SessionFolder


def other_python(session: SessionFile) -> SessionError:
    """The session's libraries run under another Python than this program."""
    return SessionError(
        f"session {session.session} is one of Python {session.python}, and this program runs under"
        f" Python {PYTHON} ({sys.executable}), whose functions cannot run there; run the program with Python"
        f" {session.python}, or start another session with this one (`stoker up`)",
        session=session.session,
    )


def refused_key(folder: SessionFolder, session: str) -> SessionError:
    """The manager does not accept the key in the client's session folder."""
    return SessionError(
        f"the manager of session {session} refused this client's key; "
        f"{folder.path} is a copy of another session's folder, or its keys were changed",
        session=session,
    )


def session_over(session: str, reason: str) -> SessionError:
    """The manager has ended the session."""
    return SessionError(
        f"session {session} is over: {reason or 'it was ended'}; "
        "load a new one with stoker.load(), and submit the calls again that have no result",
        session=session,
    )


def forked_process(session: str) -> SessionError:
    """A forked child uses the link of its parent."""
    return SessionError(
        f"this process was forked from the program that loaded session {session}, and cannot use it; "
        "make calls in that program, or load a session here",
        session=session,
    )
