"""`stoker.map` and `stoker.amap`: many calls of one function, streamed.

- What does the function get? With `batch_size=None` each item as it is; with `batch_size=n` (any n, 1 too) a list of up
  to n items. The default is that of `@stoker.app(batch_size=...)`. One result comes back for each call. A table or a
  data file is a sequence of rows, each a dict by column name.
- When is an error raised? Where its result would have come: in order with `ordered`, else when it arrives. The calls
  that are left are cancelled then, as they are when the loop ends early or Ctrl-C stops it. With `return_exceptions`
  the exception stands in the place of the result, and the loop goes on.

Progress is counted in the user's items, whatever the size of a batch.

`amap` takes the results of a map on a thread, which the event loop asks for one result after the other.
"""

from __future__ import annotations

import asyncio
import functools
import os
import queue
import sys
import threading
import weakref
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Sized
from concurrent.futures import Future, InvalidStateError
from types import TracebackType
from typing import Any

from parsl.dataflow.dflow import DataFlowKernel

from stoker.errors import ConfigError
from stoker.manager.executor.apps import labels_of
from stoker.manager.executor.executor import StokerExecutor, check_labels, stoker_executors
from stoker.manager.executor.keeping import Keeping, path_of
from stoker.manager.executor.kernel import loaded_kernel
from stoker.manager.executor.map_calls import MapCalls, app_in
from stoker.manager.executor.map_inputs import batches, rows_of, settled
from stoker.manager.executor.map_results import ResultStream
from stoker.manager.executor.options import check_count, check_truth, refuse
from stoker.manager.executor.packing import name_of
from stoker.manager.executor.progress import Follow, MapProgress
from stoker.units import MOST_NUMBER

WINDOW = 2_000


def map(
    function: Callable[..., Any],
    items: Iterable[Any],
    *,
    batch_size: int | None = None,
    ordered: bool = True,
    progress: bool | Follow = False,
    window: int | None = None,
    return_exceptions: bool = False,
    keep: str | os.PathLike[str] | None = None,
    reuse: bool = False,
) -> ResultStream:
    """Call `function` on every item; iterate over the results as they come.

    `function` is an app or a plain function. With `batch_size=n` it gets lists of up to n items, and there is one
    result a list. Results come in the order of the items; `ordered=False`: each as soon as it is there. `items` may be
    endless: they are taken ahead, at most `window` calls (default 2,000) are in flight, and fewer while large results
    (256 MB) wait for the loop; futures among them are waited for. An input that takes long for an item is read on a
    thread of its own, and one that waits for results of this very map needs `window=1`. The items of a data frame
    (pandas, polars), an Arrow table or a data file (a Path: CSV, JSONL, Parquet, Arrow, a saved data set) are its
    rows, each a dict by column name; a file is read as calls are sent. `progress=True` shows a bar; a callable gets
    `(done, total)` in items, total None if `items` has no length. To leave the loop cancels what is left.

    `keep="run.jsonl"` keeps each result in this file as it comes. The same program run again continues: items whose
    results are in the file do not run again, whatever ended the program (docs/long-runs.md); `stoker.kept` reads the
    file. If the function or its context has changed since, the map is refused, unless you write `reuse=True`. Raises
    SessionError before a site is loaded, ConfigError for an option that cannot be meant, and what a call raised in
    place of its result; with `return_exceptions=True` that exception is the result instead. Calls are not tried again
    (`load(retries=...)` is for calls of apps), and an app with `cache=True` or Parsl's `walltime` is refused.
    """
    size = batch_size if batch_size is not None else getattr(app_in(function), "batch_size", None)
    for name, number in (("batch_size", size), ("window", window)):
        if number is not None:
            check_count(f"stoker.map: {name}", number, least=1)
    check_truth("stoker.map: ordered", ordered)
    check_truth("stoker.map: return_exceptions", return_exceptions)
    check_truth("stoker.map: reuse", reuse)
    if reuse and keep is None:
        raise ConfigError("stoker.map: reuse=True has no effect without keep=; name the file, or leave it out")
    path = None if keep is None else path_of(keep)
    if not isinstance(progress, bool) and not callable(progress):
        raise refuse("stoker.map: progress", progress, "True, False or a function of (done, total)")
    size = min(size, MOST_NUMBER) if size is not None else None
    if not callable(function):
        raise ConfigError(f"stoker.map: {function!r} is not a function; write stoker.map(function, items)")
    rows = rows_of(items)
    items = items if rows is None else rows
    total = len(items) if isinstance(items, Sized) else None
    try:
        items = items if isinstance(items, Iterable) else iter(items)  # by __getitem__ alone, as torch's data sets
    except TypeError:
        what = f"stoker.map: {items!r:.80} cannot be iterated over; write stoker.map(function, items)"
        raise ConfigError(what) from None
    name = name_of(function)
    refuse_unheeded(function, "stoker.map")
    kernel = loaded_kernel(f"stoker.map({name}, ...)", inside="use Python's own map")
    executor = executor_of(kernel, function, name)
    inputs = settled(items) if size is None else batches(settled(items), size)
    calls = MapCalls(executor, function, batch_size=size)
    keeping = None if path is None else Keeping(path, calls, batch_size=size, reuse=reuse)
    follow: Follow | None = progress if callable(progress) else None
    if progress is True:
        kept = 0 if keeping is None else len(keeping.file) * (size or 1)
        follow = MapProgress(name, total, executor.ask_status, kept=kept)
    return ResultStream(
        executor,
        calls,
        inputs,
        ordered=ordered,
        window=window or WINDOW,
        total=total,
        follow=follow,
        batch_size=size,
        return_exceptions=return_exceptions,
        retries=kernel.config.retries,
        keeping=keeping,
    )


def refuse_unheeded(function: Callable[..., Any], asked: str) -> None:
    """Raise ConfigError for what an app says to Parsl's kernel, around which a map or a stream goes."""
    app, name = app_in(function), name_of(function)
    if app is None:
        return
    if app.cache:
        raise ConfigError(
            f"{asked}: {name} has cache=True, and it remembers no results (it goes around Parsl's kernel): call the app"
            " for each item, or give an app without it",
            key="cache",
        )
    given = function.keywords if isinstance(function, functools.partial) else {}
    if given.get("walltime", app.kwargs.get("walltime")) is not None:
        raise ConfigError(
            f"{asked}: {name} has Parsl's walltime, which it does not heed: write @stoker.app(timeout=...)",
            key="walltime",
        )


def executor_of(
    kernel: DataFlowKernel, function: Callable[..., Any], name: str, *, asked: str = "stoker.map"
) -> StokerExecutor:
    """The executor that an app names first, or the first that is loaded. Raises ConfigError, SessionError."""
    ours = {executor.label: executor for executor in stoker_executors(kernel, asked)}
    labels = labels_of(app_in(function))
    if labels is None:
        return next(iter(ours.values()))
    here = [label for label in labels if label in ours]
    if not here:
        check_labels(kernel, labels, name=f"{asked}: {name}")
    return ours[here[0]]


# ---- in an event loop


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
    results = map(
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
