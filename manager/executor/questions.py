"""What a client has asked its manager, and what it has not been answered yet.

Questions are answered in order, those of each kind. They travel unnumbered, so that they need not be kept in the
journal: what was not answered when a connection broke is asked again.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from typing import Any

from stoker.manager.protocol import to_client
from stoker.manager.protocol.to_manager import AskStatus, AskStory


class Questions:
    """`unsaid` are those that wait to be sent. All but `answer` and `fail_all` are for who holds the link's lock."""

    def __init__(self) -> None:
        self.unsaid: list[AskStatus | AskStory] = []
        self._open: dict[type, deque[tuple[AskStatus | AskStory, Future[Any]]]] = {
            to_client.Status: deque(),
            to_client.Story: deque(),
        }

    def ask(self, question: AskStatus | AskStory, *, answer: type[to_client.Status | to_client.Story]) -> Future[Any]:
        """A question that is answered with a message of this kind."""
        future: Future[Any] = Future()
        self._open[answer].append((question, future))
        self.unsaid.append(question)
        return future

    def again(self) -> None:
        """There is a new connection: all that is open is to be sent."""
        self.unsaid = [question for asked in self._open.values() for question, _ in asked]

    def answer(self, message: to_client.Status | to_client.Story) -> None:
        """The oldest question of its kind is answered."""
        asked = self._open[type(message)]
        if asked:
            asked.popleft()[1].set_result(message)

    def fail_all(self, error: Exception) -> None:
        """Nothing will be answered."""
        for asked in self._open.values():
            while asked:
                asked.popleft()[1].set_exception(error)
