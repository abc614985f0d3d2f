"""What a call has changed in its process, which the calls after it share.

User code can change what belongs to the whole process and forget to change it back: it leaves files open, lowers a
limit, closes standard output, clears `sys.modules`. The next call would fail of that, or go wrong without a word,
although it has done nothing. So the library compares its process with what it was when its context had been loaded:
before a call that is not known to be short, after a failed call, and otherwise every 5 ms, also when it has nothing to
run.

Environment variables and standard descriptors that are closed are put back after every call in a library with one slot.

What can be put back is put back. What cannot makes the library unfit: it ends itself with an exit code of its own, and
the calls that it has not begun run elsewhere. What the loader itself has left is the library's normal state.

Context variables are a call's own (`runner`), working folder and umask are set for each call (`workplace`). Not looked
at: `sys.path`, settings and random states of other modules, replaced functions. They may be meant to stay.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import gc
import operator
import os
import resource
import select
import signal
import sys
import threading
from contextlib import suppress
from typing import NamedTuple

from stoker import connections
from stoker.pilot.core import infrastructure
from stoker.pilot.library.os_changes import CHANGES, watch
from stoker.pilot.library.printing import stream_to
from stoker.pilot.library.sandbox import ClearedFolder, clear_temporary

EVERY_S = 0.005
"""How long short calls may follow each other without a look."""
_MARGIN = 64
"""A process with fewer free descriptors has run out of them: the next call may need some."""
_LEFT_OPEN = 16
"""Calls that have left more files open may be why a later call finds too few descriptors."""
_LIMITS = {
    f"RLIMIT_{name}": getattr(resource, f"RLIMIT_{name}")
    for name in ("AS", "CPU", "DATA", "FSIZE", "NOFILE", "NPROC", "STACK")
}
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGPIPE, signal.SIGALRM, signal.SIGHUP)
_MODULES = ("sys", "builtins", "os", "pickle", "stoker.contexts.ambient")


class LibraryFault(NamedTuple):
    """Why a library can run no more calls, and the exit code that says so."""

    code: int
    text: str


class Soundness:
    """The process as it was when its context had been loaded. `temporary`: the folder of temporary files that the slots
    of this library share, if it has several."""

    def __init__(self, *, temporary: ClearedFolder | None = None) -> None:
        watch()
        self._temporary = temporary
        self._environ = os.environ
        self._variables: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]  # since Python 3.0
        """The environment as Python keeps it: to compare it costs a tenth of a comparison of `os.environ`."""
        self._had = dict(self._variables)
        self._compared_at = CHANGES.count
        callables = {name: here for name, here in vars(builtins).items() if callable(here)}
        self._names, self._callables = tuple(callables), tuple(callables.values())
        self._modules = {name: sys.modules.get(name) for name in _MODULES}
        self._limits = {which: resource.getrlimit(which) for which in _LIMITS.values()}
        self._handlers = {which: signal.getsignal(which) for which in _SIGNALS}
        self._streams = {"stdout": sys.stdout, "stderr": sys.stderr}
        self._recursion = sys.getrecursionlimit()
        self._umask = os.umask(0o077)
        os.umask(self._umask)
        self._blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self._has_timer = signal.getitimer(signal.ITIMER_REAL)[0] > 0
        self._outputs: dict[int, tuple[int, tuple[int, int] | None]] = {}
        lowest = _lowest_free()
        self._lowest_at_load = self._lowest = self._lowest_seen = lowest or 0
        free = connections.descriptor_limit() - lowest if lowest is not None else 0
        self._margin = min(_MARGIN, free // 4)
        self._had_descriptors = free > 8
        """False if the loader has used them up: another library of this context could do no better."""
        if self._had_descriptors:
            self._outputs = {number: (_kept(number), _identity(number)) for number in (0, 1, 2) if _identity(number)}
        poll = select.poll()
        for number in self._outputs:
            poll.register(number, 0)
        self._closed = poll.poll
        """Answers which standard descriptors are closed: one system call for all of them."""
        self.unchecked = 0
        """Calls that have begun since the process was last found sound."""
        self.checked_at = 0.0
        """When that was, on `time.perf_counter`."""

    def restore_common(self) -> None:
        """Put back what calls change most often: environment variables, and standard descriptors that are closed."""
        if CHANGES.count != self._compared_at or os.environ is not self._environ:
            self._restore_environment()
        if self._closed(0):
            self._restore_outputs()

    def _restore_environment(self) -> None:
        if self._variables != self._had or os.environ is not self._environ:
            self._put_back_variables()
        self._compared_at = CHANGES.count

    def _put_back_variables(self) -> None:
        here = os.environ = self._environ
        for name in [name for name in here if os.fsencode(name) not in self._had]:
            del here[name]
        for key, value in self._had.items():
            if self._variables.get(key) != value:
                here[os.fsdecode(key)] = os.fsdecode(value)

    def _restore_outputs(self) -> None:
        for number, (kept, was) in self._outputs.items():
            if _identity(number) != was and _identity(kept) == was:
                os.dup2(kept, number)

    def restore(self, now: float) -> LibraryFault | None:
        """Put back what calls changed; returns what cannot be put back. Only while no call runs."""
        self._put_back()
        fault = self.fault() or self._clear()
        if fault is None:
            if self._lowest_seen > self._lowest + _LEFT_OPEN:
                gc.collect()  # exceptions and closures that refer to each other keep files open
                self._has_room()
            self.unchecked, self.checked_at = 0, now
            self._lowest = self._lowest_seen
        return fault

    def fault(self) -> LibraryFault | None:
        """What cannot be put back; None if the process is sound."""
        modules = sys.modules
        for name, module in self._modules.items():
            if modules.get(name) is not module:
                return LibraryFault(infrastructure.RUINED, f"a call in it removed or replaced sys.modules[{name!r}]")
        for name, which in _LIMITS.items():
            soft, _ = self._limits[which]
            if _is_lower(resource.getrlimit(which)[0], soft) and not _may_raise(which, soft):
                return LibraryFault(infrastructure.RUINED, f"a call in it lowered {name} for good")
        return self._lack_of_descriptors()

    def why_no_descriptors(self) -> LibraryFault | None:
        """Why a call lacked descriptors, if earlier calls in this process may have taken them; None if it did."""
        if self._lowest - self._lowest_at_load > _LEFT_OPEN:  # as of the last look: before this call
            return self._no_descriptors()
        return self._lack_of_descriptors() if self.unchecked > 1 else None

    def _lack_of_descriptors(self) -> LibraryFault | None:
        if not self._had_descriptors or self._has_room():
            return None
        gc.collect()
        if self._has_room():
            return None
        return self._no_descriptors()

    def _no_descriptors(self) -> LibraryFault:
        most = connections.descriptor_limit()
        return LibraryFault(
            infrastructure.NO_DESCRIPTORS, f"calls in it left files open; it may have {most:,}: close them (`with`)"
        )

    def _has_room(self) -> bool:
        lowest = _lowest_free()
        self._lowest_seen = lowest or 0
        return lowest is not None and lowest < connections.descriptor_limit() - self._margin

    def _clear(self) -> LibraryFault | None:
        if self._temporary is not None and self._temporary.is_touched():
            try:
                clear_temporary(self._temporary)
            except Exception as error:
                return LibraryFault(infrastructure.NOT_CLEARED, f"{self._temporary.path} could not be cleared: {error}")
        return None

    def _put_back(self) -> None:
        os.umask(self._umask)
        if not self._has_timer:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for which, (soft, hard) in self._limits.items():
            if _is_lower(resource.getrlimit(which)[0], soft):
                _raise_limit(which, soft, hard)
        here = vars(builtins)
        if not all(map(operator.is_, map(here.get, self._names), self._callables)):
            here.update(
                (name, was)
                for name, was in zip(self._names, self._callables, strict=True)
                if not callable(here.get(name))
            )
        self._restore_outputs()
        self._restore_environment()
        for name, stream in tuple(self._streams.items()):
            if getattr(stream, "closed", False):
                stream = self._streams[name] = stream_to(1 if name == "stdout" else 2)
            if getattr(sys, name, None) is not stream:
                setattr(sys, name, stream)
        if sys.getrecursionlimit() < self._recursion:
            sys.setrecursionlimit(self._recursion)
        if signal.pthread_sigmask(signal.SIG_BLOCK, ()) != self._blocked:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._blocked)
        if threading.current_thread() is threading.main_thread():
            for sign, handler in self._handlers.items():
                now = signal.getsignal(sign)
                ours = sign == signal.SIGTERM or now in (signal.SIG_DFL, signal.SIG_IGN)
                if ours and handler is not None and now is not handler and now != handler:
                    signal.signal(sign, handler)


def _kept(number: int) -> int:
    """A copy of a descriptor that is no standard descriptor itself, where one of these is closed."""
    return fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 3)


def out_of_descriptors(error: BaseException | None) -> bool:
    """True if an exception, or one that led to it, is the refusal to open one file more."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, OSError) and error.errno == errno.EMFILE:
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _lowest_free() -> int | None:
    """The lowest number that no file of this process has; None if there is none."""
    try:
        number = os.dup(2)
    except OSError as error:
        return None if error.errno == errno.EMFILE else 0
    os.close(number)
    return number


def _identity(number: int) -> tuple[int, int] | None:
    try:
        facts = os.fstat(number)
    except OSError:
        return None
    return facts.st_dev, facts.st_ino


def _is_lower(now: int, was: int) -> bool:
    return now != was and now != resource.RLIM_INFINITY and (was == resource.RLIM_INFINITY or now < was)


def _may_raise(which: int, soft: int) -> bool:
    """True if the hard limit still allows this soft limit."""
    return not _is_lower(resource.getrlimit(which)[1], soft)


def _raise_limit(which: int, soft: int, hard: int) -> None:
    for most in (hard, resource.getrlimit(which)[1]):  # the hard limit can be raised by root alone
        with suppress(OSError, ValueError):
            resource.setrlimit(which, (soft, most))
            return
