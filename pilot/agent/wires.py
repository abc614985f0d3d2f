"""Which sockets the loop waits for, and what it sends to libraries at the end of a turn."""

from __future__ import annotations

import select
from typing import Any

from stoker.pilot.agent.process import LibraryProcess
from stoker.pilot.zygote.client import Zygote

Source = LibraryProcess | Zygote


class Wires:
    """The loop's poller, its sources, and this turn's messages to libraries."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._sources: dict[int, Source] = {}
        self._watched: dict[int, int] = {}
        self._batches: dict[LibraryProcess, list[Any]] = {}

    def register(self, number: int) -> None:
        """Wait for a plain file descriptor too; `wait` answers it as None."""
        self._epoll.register(number, select.EPOLLIN)

    def wait(self, timeout_s: float) -> list[tuple[Source | None, int]]:
        """What is ready, and for what. None stands for plain file descriptors."""
        return [(self._sources.get(number), what) for number, what in self._epoll.poll(timeout_s)]

    def watch(self, source: Source) -> None:
        """Wait for this one; for a library with bytes to send, also for room."""
        number = source.fileno()
        if number < 0:
            return
        what = select.EPOLLIN | (select.EPOLLOUT if isinstance(source, LibraryProcess) and source.unsent else 0)
        if number not in self._watched:
            self._epoll.register(number, what)
        elif self._watched[number] != what:
            self._epoll.modify(number, what)
        self._watched[number] = what
        self._sources[number] = source

    def unwatch(self, source: Source) -> None:
        """Do not wait for this one any more. To be called before its socket is closed."""
        number = source.fileno()
        if self._sources.get(number) is source:
            self._epoll.unregister(number)
            del self._sources[number], self._watched[number]

    def tell(self, library: LibraryProcess, message: Any) -> None:
        """Say something to a library with this turn's frame."""
        self._batches.setdefault(library, []).append(message)

    def send_all(self) -> None:
        """Send this turn's frames."""
        if not self._batches:
            return
        batches, self._batches = self._batches, {}
        for library, messages in batches.items():
            library.send(messages)
            if library.unsent:
                self.watch(library)

    def close(self) -> None:
        """Close the poller."""
        self._epoll.close()
