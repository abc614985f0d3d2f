"""A client's open questions to its manager.

The manager answers questions of one kind in order, so each answer is known by its number over the connection. They
travel unnumbered and are not journalled: after a reconnection the client asks all open ones again. A question whose
future is cancelled is given up: it is forgotten with the next one that is asked, and its answer is dropped.
"""

from __future__ import annotations

from concurrent.futures import Future, InvalidStateError
from typing import Any, TypeVar

from stoker.protocol import to_client
from stoker.protocol.to_manager import AskStatus, AskStory

A = TypeVar("A")


class _Open:
    """A question without an answer. `number`: how many of its kind were sent before it; None while it is unsent."""

    def __init__(self, question: AskStatus | AskStory, kind: type[to_client.Status | to_client.Story]) -> None:
        self.question = question
        self.kind = kind
        self.number: int | None = None


class Questions:
    """The caller of `ask`, `take_unsent` and `ask_all_again` holds the link's lock. Another thread may fail all of them
    meanwhile: an open question never leaves `_open` for a moment."""

    def __init__(self) -> None:
        self.has_unsent = False
        self._open: dict[Future[Any], _Open] = {}
        self._sent = {to_client.Status: 0, to_client.Story: 0}
        """Questions that were sent over this connection."""
        self._answered = {to_client.Status: 0, to_client.Story: 0}

    def __len__(self) -> int:
        return len(self._open)

    def ask(self, question: AskStatus | AskStory, *, answer: type[to_client.Status | to_client.Story]) -> Future[Any]:
        """Add a question. The future gets the `answer`, a message of this type."""
        for given_up in [future for future in tuple(self._open) if future.done()]:
            self._open.pop(given_up, None)
        future: Future[Any] = Future()
        self._open[future] = _Open(question, answer)
        self.has_unsent = True
        return future

    def take_unsent(self) -> list[AskStatus | AskStory]:
        """The questions that are to be sent now."""
        self.has_unsent = False
        unsent = [asked for asked in tuple(self._open.values()) if asked.number is None]
        for asked in unsent:
            asked.number = self._sent[asked.kind]
            self._sent[asked.kind] += 1
        return [asked.question for asked in unsent]

    def ask_all_again(self) -> None:
        """Send all open questions again, over a new connection."""
        for kind in self._sent:
            self._sent[kind] = self._answered[kind] = 0
        for future, asked in tuple(self._open.items()):
            asked.number = None
            if future.cancelled():
                self._open.pop(future, None)
        self.has_unsent = bool(self._open)

    def answer(self, message: to_client.Status | to_client.Story) -> None:
        """Answer the oldest question of this kind."""
        kind = type(message)
        number = self._answered[kind]
        self._answered[kind] = number + 1
        for future, asked in tuple(self._open.items()):
            if asked.kind is kind and asked.number == number:
                self._open.pop(future, None)
                _end(future, answer=message)
                return

    def fail_all(self, error: Exception) -> None:
        """Fail all open questions."""
        for future in tuple(self._open):
            self._open.pop(future, None)
            _end(future, error=error)


def _end(future: Future[Any], *, answer: Any = None, error: Exception | None = None) -> None:
    try:
        if error is None:
            future.set_result(answer)
        else:
            future.set_exception(error)
    except InvalidStateError:  # it was given up, or ended by another thread
        pass


def wait_for_answer(asked: Future[A], *, timeout_s: float) -> A:
    """The answer to a question. Raises TimeoutError if it does not come in time: the question is then given up."""
    try:
        return asked.result(timeout_s)
    except BaseException:  # Ctrl-C too
        asked.cancel()  # no effect on one that has ended
        raise
