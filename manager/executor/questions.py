"""A client's open questions to its manager.

The manager answers questions of one kind in order. They travel unnumbered and are not journalled: after a reconnection
the client asks all open ones again.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from typing import Any

from stoker.manager.protocol import to_client
from stoker.manager.protocol.to_manager import AskStatus, AskStory


class Questions:
    """`unsent` are to be sent. The caller of `ask` and `ask_all_again` holds the link's lock."""

    def __init__(self) -> None:
        self.unsent: list[AskStatus | AskStory] = []
        self._open: dict[type, deque[tuple[AskStatus | AskStory, Future[Any]]]] = {
            to_client.Status: deque(),
            to_client.Story: deque(),
        }

    def ask(self, question: AskStatus | AskStory, *, answer: type[to_client.Status | to_client.Story]) -> Future[Any]:
        """Add a question. The future gets the `answer`, a message of this type."""
        future: Future[Any] = Future()
        self._open[answer].append((question, future))
        self.unsent.append(question)
        return future

    def ask_all_again(self) -> None:
        """Send all open questions again, over a new connection."""
        self.unsent = [question for asked in self._open.values() for question, _ in asked]

    def answer(self, message: to_client.Status | to_client.Story) -> None:
        """Answer the oldest question of this kind."""
        asked = self._open[type(message)]
        if asked:
            asked.popleft()[1].set_result(message)

    def fail_all(self, error: Exception) -> None:
        """Fail all open questions."""
        for asked in self._open.values():
            while asked:
                asked.popleft()[1].set_exception(error)
