"""Run the calls of a run, hand each result on as it arrives, and say how to continue a run."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import shlex
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

import stoker
from stoker.console import Screen

if TYPE_CHECKING:
    from stoker.sessions import Session, StokerApp
import concurrent.futures

from stoker.contexts import Recipe
from stoker.sessions import AppCallFuture, Session, StokerApp, facts_of, sent_call

# ---- hints


def command(app: str, arguments: str, *, through_make: bool = False) -> str:
    """The command line that runs `app` with these arguments. Only the app that `make run` runs can go through it."""
    if through_make and "MAKELEVEL" in os.environ:
        escaped = arguments.replace("$", "$$").replace('"', '\\"')
        return f'make run ARGS="{escaped}"'
    return f"stoker run {app} {arguments}"


def say_kept(
    screen: Screen, *, folder: Path, kept: int, total: int, app: str, through_make: bool = False, failed: bool = False
) -> None:
    """After a run that was stopped or failed: what is kept, and how to go on."""
    again = command(app, f"--resume {shlex.quote(str(folder))}", through_make=through_make)
    screen.line()
    if not kept:
        screen.line("stopped before the first result; the same command starts again")
        return
    screen.line(f"{'failed' if failed else 'stopped'}: {kept} of {total} results are kept in {folder}")
    screen.line(f"  {'when the cause is mended' if failed else 'go on'}:  {again}")


def columns(lines: Sequence[tuple[str, str]]) -> list[str]:
    """The `next:` block: commands on the left, what each does on the right."""
    wide = max((len(line) for line, _ in lines), default=0)
    return [
        f"  {'next: ' if number == 0 else '      '}{line:{wide}}   {why}" for number, (line, why) in enumerate(lines)
    ]


def count(number: int, noun: str) -> str:
    """`1 call`, `2 calls`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def show_minutes(seconds: float) -> str:
    """A wait that is only guessed: `a minute`, `7 min`, `3 h`."""
    if seconds < 55:
        return "a minute"
    return f"{max(1, round(seconds / 60))} min" if seconds < 5400 else f"{round(seconds / 3600)} h"


# ---- calls


_PATIENCE_S = 5.0
_FIRST_PILOT_S = 3.0
_MOST_WAITING = 1000
"""Results of several jobs that wait for the caller, at most."""
T = TypeVar("T")


class Stopped(BaseException):
    """Somebody wants the run to stop: Ctrl-C, the SIGTERM that `scancel` and `timeout` send, or a closed terminal.

    Not a KeyboardInterrupt, on which `stoker.map` says how to go on in a program; a run says how to go on with a run.
    """


@contextlib.contextmanager
def stop_on_signals() -> Iterator[None]:
    """Inside the block the first SIGINT, SIGTERM or SIGHUP raises Stopped. Later ones are ignored while everything
    ends, for five seconds; then they kill. Under `nohup` SIGHUP stays ignored.
    """
    stopped_at: list[float] = []

    def stop(number: int, frame: FrameType | None) -> None:
        del frame
        if not stopped_at:
            stopped_at.append(time.monotonic())
            raise Stopped
        if time.monotonic() - stopped_at[0] > _PATIENCE_S:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    before: dict[signal.Signals, Any] = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue
            before[number] = signal.signal(number, stop)
    except ValueError:  # not the main thread: whoever called us has its own way to stop
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class FailedCall(msgspec.Struct, frozen=True):
    """A call that ended with an error: the place of its job among the jobs, and of its item among the job's items (-1:
    not known)."""

    job: int
    item: int
    error: Exception


def run_calls(
    jobs: Sequence[tuple[StokerApp, Iterable[Any]]], *, keep_errors: bool = False, window: int | None = None
) -> Iterator[Any]:
    """The results of every job's calls, as they come. A job is an app and what each of its calls is given.

    The jobs run side by side, each through `stoker.map`, which has at most `window` calls in flight. Raises what a call
    raised; with `keep_errors` a FailedCall stands in the place of its result.
    """
    if len(jobs) == 1:
        yield from _results(0, *jobs[0], keep_errors=keep_errors, window=window)
        return
    # Each job is pulled by a thread of its own, so that one whose context still loads holds no other up. The threads
    # wait when the caller takes results more slowly than they come.
    come: queue.Queue[tuple[str, Any]] = queue.Queue(maxsize=max(_MOST_WAITING, len(jobs)))
    is_over = threading.Event()

    def tell(kind: str, value: Any) -> None:
        if not is_over.is_set():
            come.put((kind, value))

    def pull(job: int, app: StokerApp, items: Iterable[Any]) -> None:
        try:
            for result in _results(job, app, items, keep_errors=keep_errors, window=window):
                tell("result", result)
            tell("end", None)
        except BaseException as error:
            tell("error", error)

    for number, job in enumerate(jobs):
        threading.Thread(target=pull, args=(number, *job), daemon=True, name=f"stoker-sweep-{number}").start()
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
        _drain(come)  # a thread that waits for room goes on, until the session ends its calls


def in_batches(items: Iterable[T], size: int) -> Iterator[tuple[T, ...]]:
    """The items, `size` at a time."""
    left = iter(items)
    while batch := tuple(itertools.islice(left, size)):
        yield batch


def _drain(waiting: queue.Queue[Any]) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            waiting.get_nowait()


def _results(job: int, app: StokerApp, items: Iterable[Any], *, keep_errors: bool, window: int | None) -> Iterator[Any]:
    stream = stoker.map(app, items, ordered=False, return_exceptions=keep_errors, window=window)
    for result in stream:
        failed = keep_errors and isinstance(result, Exception)
        yield FailedCall(job, stream.failed_item, result) if failed else result


def session_line(session: Session) -> str:
    """`stoker 0.1.0 · site local · 1 pilot, 2 x cpu · session k3v9`. Waits a moment for the first pilot."""
    until = time.monotonic() + _FIRST_PILOT_S
    while not (pilots := session.status().pilots) and time.monotonic() < until:
        time.sleep(0.05)
    kinds = [device.kind for pilot in pilots for device in pilot.devices]
    devices = ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))
    here = f"{count(len(pilots), 'pilot')}, {devices}" if pilots else "no pilot yet: stoker status says why"
    return f"stoker {stoker.__version__} · site {session.executor.site.name} · {here} · session {session.id}"


# ---- measuring


_PARTS = 100
_LOOK_S = 0.5


def measure(session: Session, app: StokerApp, recipe: Recipe, request: Any, *, screen: Screen) -> Any:
    """What the app gives for a request, on the context of a recipe. Shows how far it is, as it says itself; raises what
    it raises."""
    ask = facts_of(session, {recipe.key})
    with screen.progress(total=_PARTS, done=0, noun="profile", facts=ask) as progress:
        future = app.with_options(context=recipe)(request)
        for done in _parts_done(future):
            progress.advance(done - progress.done)
    return future.result()


def _parts_done(future: AppCallFuture) -> Iterator[int]:
    """How many hundredths the call has done, until it ends."""
    while True:
        try:
            future.exception(timeout=_LOOK_S)
            return
        except concurrent.futures.TimeoutError:
            call = sent_call(future)
            said = call.progress if call is not None else None
            if said is not None and said.total:
                yield int(_PARTS * said.done / said.total)
