"""`stoker.amap`: the results of a `stoker.map`, for programs that live in an event loop.

A map hands its results to whoever waits for them, takes its items as there is room, and unpickles what it hands on. All
of that happens on one thread here, which the event loop asks for one result after the other: the loop never waits.
"""

from __future__ import annotations

import asyncio
import os
import queue
import sys
import threading
import weakref
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import Future, InvalidStateError
from types import TracebackType
from typing import Any

from stoker.errors import ConfigError
from stoker.manager.executor.mapping import map as map_items
from stoker.manager.executor.progress import Follow
from stoker.manager.executor.stream import ResultStream

_END = object()


def amap(
    function: Callable[..., Any],
    items: Iterable[Any] | AsyncIterable[Any],
    *,
    batch_size: int | None = None,
    ordered: bool = True,
    progress: bool | Follow = False,
    window: int | None = None,
    return_exceptions: bool = False,
    keep: str | os.PathLike[str] | None = None,
    reuse: bool = False,
) -> AsyncResults:
    """Call `function` on every item; `async for` over the results as they come.

    The options are those of `stoker.map`, and so is what they mean. `items` may be an async iterable too. To leave the
    loop, or to cancel the task that waits in it, cancels what is left.
    """
    given: Iterable[Any]
    if isinstance(items, AsyncIterable):
        try:
            given = _AwaitedItems(items, asyncio.get_running_loop())
        except RuntimeError:
            raise ConfigError("stoker.amap: items that are awaited need a running event loop: call it in one") from None
    else:
        given = items
    results = map_items(
        function,
        given,
        batch_size=batch_size,
        ordered=ordered,
        progress=progress,
        window=window,
        return_exceptions=return_exceptions,
        keep=keep,
        reuse=reuse,
    )
    return AsyncResults(results, interrupt=given.close if isinstance(given, _AwaitedItems) else lambda: None)


class AsyncResults(AsyncIterator[Any]):
    """The results of a map, for `async for`. `close()` cancels the calls that are left. `interrupt` ends a wait for the
    next item."""

    def __init__(self, results: ResultStream, *, interrupt: Callable[[], None]) -> None:
        self._results = results
        self._interrupt = interrupt
        self._asked: queue.SimpleQueue[Future[Any] | None] = queue.SimpleQueue()
        self._is_closed = False
        weakref.finalize(self, self._asked.put, None)
        threading.Thread(target=_serve, args=(results, self._asked), name="stoker-amap", daemon=True).start()

    @property
    def taken(self) -> int:
        """How many results were handed over."""
        return self._results.taken

    @property
    def items(self) -> int:
        """The items that they belong to."""
        return self._results.items

    def __aiter__(self) -> AsyncResults:
        return self

    async def __anext__(self) -> Any:
        if self._is_closed:
            raise StopAsyncIteration
        asked: Future[Any] = Future()
        self._asked.put(asked)
        try:
            value = await asyncio.wrap_future(asked)
        except asyncio.CancelledError:
            self.close()
            raise
        if value is _END:
            self._is_closed = True
            raise StopAsyncIteration
        return value

    def close(self) -> None:
        """Cancel the calls that are left, and drop their results."""
        if not self._is_closed:
            self._is_closed = True
            self._results.stop()
            self._interrupt()
            self._asked.put(None)

    async def aclose(self) -> None:
        """As `close`, for `contextlib.aclosing`."""
        self.close()

    async def __aenter__(self) -> AsyncResults:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not getattr(self, "_is_closed", True) and not _ending():
            self.close()

    def __repr__(self) -> str:
        return f"<async {repr(self._results)[1:]}"


def _serve(results: ResultStream, asked: queue.SimpleQueue[Future[Any] | None]) -> None:
    """The thread that takes the results, until it is told that no one asks for more."""
    while (wanted := asked.get()) is not None:
        error, value = None, _END
        try:
            value = next(results, _END)
        except BaseException as raised:  # Ctrl-C does not come to this thread; what a call raised goes to who asked
            error = raised
        try:
            if error is None:
                wanted.set_result(value)
            else:
                wanted.set_exception(error)
        except InvalidStateError:  # its task was cancelled
            pass
        del wanted, error, value
    results.close()


class _AwaitedItems(Iterator[Any]):
    """What an async iterable gives, for a thread that is not its event loop's."""

    def __init__(self, items: AsyncIterable[Any], loop: asyncio.AbstractEventLoop) -> None:
        self._items = aiter(items)
        self._loop = loop
        self._awaited: Future[Any] | None = None
        self._is_closed = False

    def __next__(self) -> Any:
        async def item() -> Any:
            try:
                return await anext(self._items)
            except StopAsyncIteration:  # which no future may hold
                return _END

        self._awaited = asyncio.run_coroutine_threadsafe(item(), self._loop)
        if self._is_closed:
            self._awaited.cancel()
        value = self._awaited.result()
        if value is _END:
            raise StopIteration
        return value

    def close(self) -> None:
        """No more items are wanted."""
        self._is_closed = True
        if self._awaited is not None:
            self._awaited.cancel()
