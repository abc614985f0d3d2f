"""`stoker.amap`: read the results of a `stoker.map` with `async for`. A thread iterates over the map."""

from __future__ import annotations

import asyncio
import os
import queue
import sys
import threading
import weakref
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any

from stoker.errors import ConfigError
from stoker.manager.executor.mapping import ResultStream, map
from stoker.manager.executor.outgoing import end_future
from stoker.manager.executor.progress import Follow

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
    """Return an iterator for `async for` over the results of `function` on every item, as they arrive.

    Leaving the loop, or cancelling the waiting task, cancels the remaining calls.

    Args:
        function: See `stoker.map`.
        items: See `stoker.map`; may also be an async iterable.
        batch_size, ordered, progress, window, return_exceptions, keep, reuse: See `stoker.map`.

    Raises:
        SessionError: No site is loaded.
        ConfigError: An option or its value is not allowed.
    """
    awaited = None
    if isinstance(items, AsyncIterable):
        try:
            items = awaited = _AsyncItemReader(items, asyncio.get_running_loop())
        except RuntimeError:
            raise ConfigError(
                "stoker.amap: asynchronous items need a running event loop; call stoker.amap in a coroutine"
            ) from None
    results = map(
        function, items, batch_size=batch_size, ordered=ordered, progress=progress, window=window,
        return_exceptions=return_exceptions, keep=keep, reuse=reuse,
    )  # fmt: skip
    return AsyncResults(results, interrupt=awaited.close if awaited is not None else lambda: None)


class AsyncResults(AsyncIterator[Any]):
    """The results of a map, for `async for`. `interrupt` cancels the wait for the next item of an async input."""

    def __init__(self, results: ResultStream, *, interrupt: Callable[[], None]) -> None:
        self._results = results
        self._interrupt = interrupt
        self._requests: queue.SimpleQueue[Future[Any] | None] = queue.SimpleQueue()
        self._is_closed = False
        weakref.finalize(self, self._requests.put, None)
        threading.Thread(
            target=_serve_requests, args=(results, self._requests), name="stoker-amap", daemon=True
        ).start()

    @property
    def taken(self) -> int:
        """Number of received results."""
        return self._results.taken

    @property
    def items(self) -> int:
        """Number of items in the received results."""
        return self._results.items

    def __aiter__(self) -> AsyncResults:
        return self

    async def __anext__(self) -> Any:
        if self._is_closed:
            raise StopAsyncIteration
        request: Future[Any] = Future()
        self._requests.put(request)
        try:
            value = await asyncio.wrap_future(request)
        except asyncio.CancelledError:
            self.close()
            raise
        if value is _END:
            self._is_closed = True
            raise StopAsyncIteration
        return value

    def close(self) -> None:
        """Cancel the remaining calls and drop their results."""
        if not self._is_closed:
            self._is_closed = True
            self._results.stop()
            self._interrupt()
            self._requests.put(None)

    async def aclose(self) -> None:
        """As `close`, for `contextlib.aclosing`."""
        self.close()

    async def __aenter__(self) -> AsyncResults:
        return self

    async def __aexit__(self, *_raised: object) -> None:
        self.close()

    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not getattr(self, "_is_closed", True) and not _ending():
            self.close()

    def __repr__(self) -> str:
        return f"<async {repr(self._results)[1:]}"


def _serve_requests(results: ResultStream, requests: queue.SimpleQueue[Future[Any] | None]) -> None:
    while (wanted := requests.get()) is not None:
        error, value = None, _END
        try:
            value = next(results, _END)
        except BaseException as raised:  # Ctrl-C never reaches this thread, so the waiting task receives every error
            error = raised
        end_future(wanted, value, error=error)  # a cancelled future ignores the result
        del wanted, error, value
    results.close()


class _AsyncItemReader(Iterator[Any]):
    def __init__(self, items: AsyncIterable[Any], loop: asyncio.AbstractEventLoop) -> None:
        self._items = aiter(items)
        self._loop = loop
        self._awaited: Future[Any] | None = None
        self._is_closed = False

    def __next__(self) -> Any:
        async def next_item() -> Any:
            try:
                return await anext(self._items)
            except StopAsyncIteration:  # a future cannot raise StopAsyncIteration, so return a marker
                return _END

        self._awaited = asyncio.run_coroutine_threadsafe(next_item(), self._loop)
        if self._is_closed:
            self._awaited.cancel()
        value = self._awaited.result()
        if value is _END:
            raise StopIteration
        return value

    def close(self) -> None:
        self._is_closed = True
        if self._awaited is not None:
            self._awaited.cancel()
