"""Processes that do one task after another, and say how far they are.

Written for tasks of seconds to minutes that may want all the memory there is: a process that dies is told by its
connection, which breaks, with the task that it had. Processes whose parent is gone learn it in the same way, and end.
(`concurrent.futures` waits for running tasks when it is interrupted, and `multiprocessing.Pool` for ever for a task
whose process was killed.)
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

from stoker.errors import StokerError

Task = TypeVar("Task")
Result = TypeVar("Result")
Tell = Callable[..., None]


class DiedError(StokerError):
    """A process died over a task. Facts: `task`, `how` (a signal or an exit code, in words), `code`."""


class Workers(Generic[Task, Result]):
    """Processes that call `do(task, tell)`; what `do` gives `tell` is heard here. It must be picklable, as must tasks
    and results, and raise nothing but StokerErrors. Used as a context manager: when it is left, none of the processes
    is there any more."""

    def __init__(self, do: Callable[[Task, Tell], Result], *, count: int) -> None:
        spawning = multiprocessing.get_context("spawn")  # a fork would share locks with threads of this process
        self._processes: dict[Connection, BaseProcess] = {}
        self._tasks: dict[Connection, Task] = {}
        with _no_interrupts():
            for _ in range(count):
                ours, theirs = spawning.Pipe()
                process = spawning.Process(target=_work, args=(theirs, do), daemon=True)
                process.start()
                theirs.close()
                self._processes[ours] = process

    def __enter__(self) -> Workers[Task, Result]:
        return self

    def __exit__(self, *_: object) -> None:
        for connection, process in self._processes.items():
            connection.close()
            if connection in self._tasks:
                process.terminate()
        for process in self._processes.values():
            process.join()

    def each(self, todo: Sequence[Task], *, hear: Tell) -> Iterator[Result]:
        """What comes of the tasks, as they are done. Raises what `do` raised, and DiedError."""
        left = iter(todo)
        for connection in self._processes:
            self._give(connection, left)
        while self._tasks:
            ready = set(wait(list(self._tasks)))
            for connection in [each for each in self._tasks if each in ready]:
                kind, said = self._hear(connection)
                if kind is StokerError:
                    raise said
                if kind is None:
                    hear(*said)
                else:
                    self._give(connection, left)
                    yield said

    def _give(self, connection: Connection, left: Iterator[Task]) -> None:
        self._tasks.pop(connection, None)
        for task in left:
            self._tasks[connection] = task
            with contextlib.suppress(OSError):  # it is gone: hearing it will tell
                connection.send(task)
            return

    def _hear(self, connection: Connection) -> Any:
        try:
            return connection.recv()
        except (EOFError, OSError):
            process = self._processes[connection]
            process.join()
            code = process.exitcode or 0
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            task = self._tasks[connection]
            raise DiedError(f"the process that did {task} died ({how})", task=task, how=how, code=code) from None


@contextlib.contextmanager
def _no_interrupts() -> Iterator[None]:
    """Processes that are started meanwhile never hear of Ctrl-C: that is the parent's to answer, which keeps what is
    done. One that comes meanwhile is heard here afterwards."""
    resource_tracker.ensure_running()  # as starting a process does, which would end the blocking below
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _work(connection: Connection, do: Callable[[Any, Tell], Any]) -> None:
    """A process: task after task, until nobody asks for another."""

    def send(kind: type | None, what: Any) -> None:
        try:
            connection.send((kind, what))
        except OSError:
            raise SystemExit from None  # who asked is gone

    while True:
        try:
            task = connection.recv()
        except (EOFError, OSError):
            return
        try:
            send(object, do(task, lambda *progress: send(None, progress)))
        except StokerError as error:
            send(StokerError, error)
