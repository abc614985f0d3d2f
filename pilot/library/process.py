"""The state of a library's process that later calls share: what is restored after a call, and what ends the library.

After each call the environment variables and descriptors 0 to 2 are restored. Other damage ends the library, and calls
that it has not begun run elsewhere. The library looks for damage before a call that may take long, after a failed call,
and every 20 ms between short calls. Threads, children, `sys.path` and random states are no damage.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import functools
import gc
import os
import resource
import select
import signal
import sys
import threading
import traceback
from multiprocessing import resource_tracker, shared_memory
from typing import Any, NamedTuple, NoReturn

from stoker import connections
from stoker.pilot.core import infrastructure
from stoker.pilot.library.call_records import stream_to
from stoker.pilot.library.workplace import ClearedFolder, clear_temporary

# ---- damage

EVERY_S = 0.02  # seconds between two looks for damage while calls are short
_MARGIN = 64  # a process with fewer free descriptors is damaged: the next call may need some
_LIMITS = {
    f"RLIMIT_{name}": getattr(resource, f"RLIMIT_{name}")
    for name in ("AS", "CPU", "DATA", "FSIZE", "NOFILE", "NPROC", "STACK")
}
_BUILTINS = ("__import__", "__build_class__", "open", "print", "len", "isinstance", "getattr")
_MODULES = ("sys", "builtins", "os", "pickle", "stoker.contexts.ambient")


class LibraryFault(NamedTuple):
    """Why a library can run no more calls, and the exit code that says so."""

    code: int
    text: str


class ProcessGuard:
    """The process as it was when its context had been loaded. `temporary`: the shared folder of several slots."""

    def __init__(self, *, temporary: ClearedFolder | None = None) -> None:
        self._temporary = temporary
        self._environ = os.environ
        self._variables: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]  # since Python 3.0
        """The environment as Python keeps it: comparing it costs a tenth of comparing `os.environ`."""
        self._had = dict(self._variables)
        self._streams = {"stdout": sys.stdout, "stderr": sys.stderr}
        self._modules = {name: sys.modules.get(name) for name in _MODULES}
        self._limits = {which: resource.getrlimit(which) for which in _LIMITS.values()}
        self._recursion = sys.getrecursionlimit()
        self._blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self._signals = _signals()
        lowest = _lowest_free()
        free = connections.descriptor_limit() - lowest if lowest is not None else 0
        self._margin = min(_MARGIN, free // 4)
        self._had_descriptors = free > 8
        """False if the loader has used them up: another library of this context could do no better."""
        self._outputs: dict[int, tuple[int, tuple[int, int] | None]] = {}
        if self._had_descriptors:
            self._outputs = {number: (_kept(number), _identity(number)) for number in (0, 1, 2) if _identity(number)}
        poll = select.poll()
        for number in self._outputs:
            poll.register(number, 0)
        self._closed = poll.poll  # returns the standard descriptors that are closed, in one system call
        self.unchecked = 0  # number of calls that began since the last look
        self.checked_at = 0.0  # the time of the last look, on `time.perf_counter`

    def restore(self) -> None:
        """Restore environment variables, and standard descriptors that are closed."""
        if self._variables != self._had or os.environ is not self._environ:
            self._restore_environment()
        if self._closed(0):
            self._restore_outputs()

    def check(self, now: float) -> LibraryFault | None:
        """Restore, and return what damage there is."""
        self.restore()
        self._restore_outputs()
        self._restore_streams()
        self.unchecked, self.checked_at = 0, now
        return self.damage() or self._clear()

    def damage(self) -> LibraryFault | None:
        """Return the damage that ends this library; None for a sound process."""
        what = self._ruined()
        if what:
            return LibraryFault(infrastructure.RUINED, f"a call in it {what}")
        if self._had_descriptors and not self._has_room():
            gc.collect()  # files may be open in cycles of references
            if not self._has_room():
                text = (
                    f"calls in it left files open; it may have {connections.descriptor_limit():,}: close them (`with`)"
                )
                return LibraryFault(infrastructure.NO_DESCRIPTORS, text)
        return None

    def _ruined(self) -> str:
        for name, module in self._modules.items():
            if sys.modules.get(name) is not module:
                return f"removed or replaced sys.modules[{name!r}]"
        for name, which in _LIMITS.items():
            if any(map(_is_lower, resource.getrlimit(which), self._limits[which])):
                return f"lowered {name}"
        for name in _BUILTINS:
            if not callable(getattr(builtins, name, None)):
                return f"removed {name} from builtins"
        if sys.getrecursionlimit() < self._recursion:
            return "lowered the recursion limit"
        if signal.pthread_sigmask(signal.SIG_BLOCK, ()) != self._blocked:
            return "blocked signals"
        if _signals() != self._signals:
            return "left a timer, or changed how SIGTERM or SIGCHLD is handled"
        return ""

    def _restore_environment(self) -> None:
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

    def _restore_streams(self) -> None:
        for name, stream in tuple(self._streams.items()):
            if getattr(stream, "closed", False):
                stream = self._streams[name] = stream_to(1 if name == "stdout" else 2)
            if getattr(sys, name, None) is not stream:
                setattr(sys, name, stream)

    def _has_room(self) -> bool:
        lowest = _lowest_free()
        return lowest is not None and lowest < connections.descriptor_limit() - self._margin

    def _clear(self) -> LibraryFault | None:
        if self._temporary is not None and self._temporary.is_touched():
            try:
                clear_temporary(self._temporary)
            except Exception as error:
                text = f"{self._temporary.path} could not be cleared: {error}"
                return LibraryFault(infrastructure.NOT_CLEARED, text)
        return None


def _signals() -> tuple[bool, bool, bool]:
    return (
        signal.getitimer(signal.ITIMER_REAL)[0] > 0,
        signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
        signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN,
    )


def _kept(number: int) -> int:
    """A copy of a descriptor that is no standard descriptor itself, where one of these is closed."""
    return fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 3)


def _lowest_free() -> int | None:
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


# ---- shared memory segments


def register_created_segments_only() -> None:
    """From now on this process and its forks leave segments that they attach to alone."""
    within = threading.local()
    register, unregister = resource_tracker.register, resource_tracker.unregister
    make = shared_memory.SharedMemory.__init__

    def register_own(name: Any, rtype: str) -> None:
        if not getattr(within, "attaches", False):
            register(name, rtype)

    def unregister_any(name: Any, rtype: str) -> None:
        if rtype == "shared_memory":  # a child may have registered it, so this process cannot know whether it is
            register(name, rtype)
        unregister(name, rtype)

    @functools.wraps(make)
    def init(self: Any, name: str | None = None, create: bool = False, *args: Any, **options: Any) -> None:
        within.attaches = not create
        try:
            make(self, name, create, *args, **options)
        finally:
            within.attaches = False

    resource_tracker.register = register_own
    resource_tracker.unregister = unregister_any
    shared_memory.SharedMemory.__init__ = init  # type: ignore[method-assign]


def forget_tracker() -> None:
    """In a fork: forget the parent's resource tracker, which ends with the parent."""
    tracker: Any = resource_tracker._resource_tracker
    if tracker._fd is not None:
        os.close(tracker._fd)
    tracker._fd = tracker._pid = None


# ---- forked children


def leave_fork() -> None:
    """End a forked child that has returned from the user's function, without the parent's exit handlers."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue
    os._exit(0)


def leave_child(error: BaseException | None) -> NoReturn:
    """End a child that user code forked and did not end: only the library itself reports a call's end."""
    code = error.code if isinstance(error, SystemExit) else error
    try:
        if error is not None and not isinstance(error, SystemExit):
            traceback.print_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)
