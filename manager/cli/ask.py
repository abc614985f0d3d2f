"""Ask a session's manager as an observer: a client that submits no calls and does not keep the session alive. An
observer's frames have no numbers (see `protocol.wire`), so the caller repeats a question after a lost connection."""

from __future__ import annotations

import datetime
import time
from typing import Any, TypeVar
from uuid import uuid4

import zmq

from stoker.dealer import CurveKeys, open_socket
from stoker.errors import SessionError
from stoker.manager.executor import detached
from stoker.manager.live import lease, presence
from stoker.protocol import to_client, to_manager, wire
from stoker.protocol.calls import ListedState
from stoker.protocol.session import SessionFile, SessionFolder, modification_time

TIMEOUT_S = 5.0

_POLL_S = 0.2

A = TypeVar("A")


class SessionEndedError(SessionError):
    """No process listens at the session's address."""


class NoAnswerError(SessionError):
    """A process listens at the session's address but does not answer in time."""


class Observer:
    """A context manager: a connection to the manager of a running session.

    Args:
        folder: The session's folder.
        timeout_s: Seconds to wait for each answer.

    Raises:
        SessionEndedError: No process listens.
        SessionError: The manager refuses or does not answer in time.
    """

    def __init__(self, folder: SessionFolder, *, timeout_s: float = TIMEOUT_S) -> None:
        self.folder = folder
        self.file = folder.read()
        self._timeout_s = timeout_s
        self._decode = wire.to_client_decoder()
        if not detached.is_manager_up(folder):
            if why := detached.explain_unreachable_manager(folder):
                raise SessionError(why, session=self.file.session)
            raise SessionEndedError(explain_silent_manager(folder, self.file))
        pair = folder.read_key("client")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        keys = CurveKeys(self.file.server_key, pair.public, pair.secret)
        self._socket = open_socket(self._context, name=f"client-{uuid4().hex[:12]}", keys=keys)
        self._socket.connect(self.file.address)

    def __enter__(self) -> Observer:
        try:
            hello = to_manager.ClientHello(protocol=wire.VERSION, session=self.file.session, observer=True)
            self._ask(hello, to_client.ClientWelcome)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._context.destroy(linger=0)

    def status(self) -> to_client.Status:
        """Return the session's current state.

        Raises:
            SessionError: The manager does not answer.
        """
        return self._ask(to_manager.AskStatus(), to_client.Status)

    def story(self, subject: str) -> to_client.Story:
        """Return why a call, pilot, library or context is in its state.

        Args:
            subject: The id or name of the object.

        Raises:
            SessionError: The manager does not answer.
        """
        return self._ask(to_manager.AskStory(subject), to_client.Story)

    def calls(self, *, limit: int, only: ListedState | None) -> to_client.Calls:
        """Return the session's calls, by state.

        Args:
            limit: Maximum calls per state.
            only: Return only calls in this state.

        Raises:
            SessionError: The manager does not answer.
        """
        return self._ask(to_manager.AskCalls(limit, only), to_client.Calls)

    def end(self, reason: str) -> None:
        """End the session.

        Args:
            reason: Text for the session's programs and pilots.

        Raises:
            SessionError: The manager does not answer.
        """
        self._ask(to_manager.EndSession(reason), to_client.SessionOver)

    def _ask(self, question: Any, kind: type[A]) -> A:
        self._socket.send(wire.encode([question]))
        until = time.monotonic() + self._timeout_s
        while (left := until - time.monotonic()) > 0:
            if not self._socket.poll(int(min(left, _POLL_S) * 1000) + 1):
                if self.folder.end_reason():  # do not wait for an answer, because the session has ended
                    raise SessionEndedError(explain_silent_manager(self.folder, self.file))
                continue
            for message in self._decode(self._socket.recv()).messages:
                if isinstance(message, kind):
                    return message
                if isinstance(message, to_client.ClientRefused):
                    text = f"the manager of session {self.file.session} refused the question: {message.reason}"
                    raise SessionError(text + _version_advice(self.folder, self.file))
                if isinstance(message, to_client.SessionOver):
                    raise SessionEndedError(f"session {self.file.session} is over: {message.reason}")
        holder = lease.read_lease_or_none(self.folder.lease)
        where = f"{presence.describe_remote_manager(self.folder)} at {self.file.address}"
        text = (
            f"the manager of session {self.file.session}{where} does not answer within {self._timeout_s:g} s; its log"
            f" may show why: {self.folder.manager_log}"
        )
        if holder is not None and lease.is_holder_alive(holder):
            text += (
                f"; if the manager stays silent, kill it (kill -9 {holder.pid}): its program, or `stoker attach"
                f" {self.folder.path}`, starts another manager, which continues from the journal"
            )
        raise NoAnswerError(text, session=self.file.session, log=str(self.folder.manager_log))


def _version_advice(folder: SessionFolder, file: SessionFile) -> str:
    if file.protocol == wire.VERSION:
        return ""
    holder = lease.read_lease(folder.lease)
    who = f"its manager ({holder})" if holder is not None else "its manager"
    return (
        f". Use the version of Stoker that started the session. If that version is no longer installed, kill {who} by"
        f" hand, then run `stoker down {file.session}` to end the other processes and jobs"
    )


def explain_silent_manager(folder: SessionFolder, file: SessionFile) -> str:
    why = folder.end_reason()
    if why or not detached.is_detached(folder):
        newest = max(map(modification_time, (folder.journal, folder.manager_log, folder.file)))
        at = datetime.datetime.fromtimestamp(newest)  # the manager's last write shows when it ended
        day = "" if at.date() == datetime.date.today() else f"{at:%Y-%m-%d} "
        return f"session {file.session} ended at {day}{at:%H:%M:%S}" + (f" ({why})" if why else "")
    holder = lease.read_lease_or_none(folder.lease)
    if holder is not None and lease.is_holder_alive(holder):
        who = f"the manager of session {file.session} ({holder})"
        return f"{who} does not listen yet, because it still reads its journal; its log: {folder.manager_log}"
    return f"the manager of session {file.session} has ended; `stoker attach {file.session}` restarts the manager"
