"""Make the calls of a run, stop a run on signals, and show the progress of a call."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, TypeVar

import msgspec

import stoker
from stoker.apps.common.command_line import format_count
from stoker.console import Screen
from stoker.contexts import Recipe
from stoker.sessions import AppCallFuture, CallProgress, Session, StokerApp, facts_of, sent_call

INTERRUPTED = 130
"""Exit code after Ctrl-C."""
_PATIENCE_S = 5.0
_FIRST_PILOT_S = 3.0
_MOST_WAITING = 1000
"""Maximum number of results that `run_calls` buffers for its caller while several jobs run."""
T = TypeVar("T")
R = TypeVar("R")
Job = tuple[StokerApp, Iterable[Any]]
"""A decorated function (app), and an iterable with the argument of each call."""


class StoppedBySignal(BaseException):
    """Raised on Ctrl-C, SIGTERM and SIGHUP. A KeyboardInterrupt would make `stoker.map` print advice."""


@contextlib.contextmanager
def raise_on_signals() -> Iterator[None]:
    """Raise StoppedBySignal in the block at the first SIGINT, SIGTERM or SIGHUP. Under `nohup`, SIGHUP stays ignored.

    Further signals are ignored for five seconds. After that, a signal kills the process. Outside the main thread, this
    does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    stopped_at: list[float] = []

    def raise_or_exit(number: int, frame: FrameType | None) -> None:
        del frame
        if not stopped_at:
            stopped_at.append(time.monotonic())
            raise StoppedBySignal
        if time.monotonic() - stopped_at[0] > _PATIENCE_S:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    numbers = [signal.SIGINT, signal.SIGTERM]
    numbers += [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else []
    before = {number: signal.signal(number, raise_or_exit) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class FailedCall(msgspec.Struct, frozen=True):
    """A failed call. `job`: index of the job; `item`: index of the call's argument (-1: unknown)."""

    job: int
    item: int
    error: Exception


def run_calls(jobs: Sequence[Job], *, keep_errors: bool = False, window: int | None = None) -> Iterator[Any]:
    """Yield results as they arrive. A failed call raises its error or, with `keep_errors`, yields a FailedCall."""
    if len(jobs) == 1:
        yield from _stream_job_results(0, *jobs[0], keep_errors=keep_errors, window=window)
        return
    # A thread per job collects results, so a job that waits for its context to load does not delay other jobs. The size
    # of the queue is limited: the threads wait until the caller takes earlier results.
    come: queue.Queue[tuple[str, Any]] = queue.Queue(maxsize=max(_MOST_WAITING, len(jobs)))
    is_over = threading.Event()

    def put_unless_over(kind: str, value: Any) -> None:
        if not is_over.is_set():
            come.put((kind, value))

    def collect_job_results(job: int, app: StokerApp, items: Iterable[Any]) -> None:
        try:
            for result in _stream_job_results(job, app, items, keep_errors=keep_errors, window=window):
                put_unless_over("result", result)
            put_unless_over("end", None)
        except BaseException as error:
            put_unless_over("error", error)

    for number, job in enumerate(jobs):
        threading.Thread(
            target=collect_job_results, args=(number, *job), daemon=True, name=f"stoker-sweep-{number}"
        ).start()
    left = len(jobs)
    try:
        while left:
            kind, value = come.get()
            if kind == "error":
                raise value
            if kind == "end":
                left -= 1
            else:
                yield value
    finally:
        is_over.set()
        with contextlib.suppress(queue.Empty):  # make room in the queue, so that no thread waits forever
            while True:
                come.get_nowait()


def split_into_batches(items: Iterable[T], size: int) -> Iterator[tuple[T, ...]]:
    left = iter(items)
    while batch := tuple(itertools.islice(left, size)):
        yield batch


def _stream_job_results(
    job: int, app: StokerApp, items: Iterable[Any], *, keep_errors: bool, window: int | None
) -> Iterator[Any]:
    stream = stoker.map(app, items, ordered=False, return_exceptions=keep_errors, window=window)
    for result in stream:
        failed = keep_errors and isinstance(result, Exception)
        yield FailedCall(job, stream.failed_item, result) if failed else result


def format_session_line(session: Session) -> str:
    """Return a line that names the session and its devices. Waits up to 3 s for the first pilot."""
    until = time.monotonic() + _FIRST_PILOT_S
    while not (pilots := session.status().pilots) and time.monotonic() < until:
        time.sleep(0.05)
    kinds = [device.kind for pilot in pilots for device in pilot.devices]
    devices = ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))
    here = f"{format_count(len(pilots), 'pilot')}, {devices}" if pilots else "no pilot yet: stoker status says why"
    return f"stoker {stoker.__version__} · site {session.executor.site.name} · {here} · session {session.id}"


_PARTS = 100
_LOOK_S = 0.5


def measure_on_device(
    app: StokerApp, recipe: Recipe, request: Any, *, site: str, session: str = "", json: bool,
    show: Callable[[Any], tuple[dict[str, Any], Iterable[str]]],
) -> int:  # fmt: skip
    """Call the app on a recipe's context, show the progress, and print the result. Return the exit status.

    `show`: returns the JSON form and the lines of a result.
    """
    screen = Screen(json_only=json)
    with raise_on_signals():
        try:
            with stoker.load(site or None, session=session or None, progress=False) as loaded:
                screen.line(format_session_line(loaded))
                ask = facts_of(loaded, {recipe.key})
                with screen.progress(total=_PARTS, done=0, noun="profile", facts=ask) as progress:
                    future = app.with_options(context=recipe)(request)
                    for said in poll_call_progress(future):
                        progress.advance(int(_PARTS * said.done / said.total) - progress.done)
                found = future.result()
        except StoppedBySignal:
            screen.line("stopped: no measurement is complete, and nothing is kept")
            return INTERRUPTED
    summary, lines = show(found)
    if json:
        screen.json(summary)
    for line in () if json else lines:
        screen.line(line)
    return 0


def poll_call_progress(future: AppCallFuture) -> Iterator[CallProgress]:
    while True:
        try:
            future.exception(timeout=_LOOK_S)
            return
        except concurrent.futures.TimeoutError:
            call = sent_call(future)
            if call is not None and call.progress is not None and call.progress.total:
                yield call.progress


def run_collecting_errors(
    work: Callable[[Sequence[T]], Sequence[R]], inputs: Sequence[T]
) -> tuple[list[R | None], list[str]]:
    """Return a result or an error text for each input. If the model refuses the inputs together (ValueError), run each
    input alone.
    """
    try:
        return list(work(inputs)), [""] * len(inputs)
    except ValueError:
        results: list[R | None] = []
        errors: list[str] = []
        for each in inputs:
            try:
                results += work([each])
                errors.append("")
            except ValueError as error:
                results.append(None)
                errors.append(str(error) or type(error).__name__)
        return results, errors
