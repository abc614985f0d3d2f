"""`stoker.map`: many calls of one function, streamed.

Two questions that the name does not answer:

- What does the function get? With `batch_size=None` each item as it is; with `batch_size=n` (any n, 1 too) a list of up
  to n items, so that what it gets does not depend on the number. The default is what `@stoker.app(batch_size=...)`
  says. One result comes back for each call: for each item, or for each batch. A table or a data file is a sequence of
  rows, each a dict by column name (`rows`).
- When is an error raised? Where its result would have come: in order with `ordered`, else when it arrives. The calls
  that are left are cancelled then, as they are when the loop ends early or Ctrl-C stops it. With `return_exceptions`
  the exception stands in the place of the result, and the loop goes on.

Progress is counted in the user's items, whatever the size of a batch.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Sized
from typing import Any

from parsl.dataflow.dflow import DataFlowKernel

from stoker.errors import ConfigError
from stoker.manager.executor.apps import labels_of
from stoker.manager.executor.executor import StokerExecutor
from stoker.manager.executor.keeping import Keeping, path_of
from stoker.manager.executor.kernels import check_labels, loaded_kernel, stoker_executors
from stoker.manager.executor.map_calls import MapCalls, app_in
from stoker.manager.executor.map_inputs import batches, settled
from stoker.manager.executor.options import check_count, check_truth, refuse
from stoker.manager.executor.packing import name_of
from stoker.manager.executor.progress import Follow, MapProgress
from stoker.manager.executor.rows import rows_of
from stoker.manager.executor.stream import ResultStream
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
