"""The process state that calls may change: folders, umask, environment, file descriptors.

A call runs in the folder of its program with the program's umask, if this process sees the folder. Otherwise the call
runs in an empty folder of its slot; files left there are reported and removed. `TMPDIR` is always private.

After each call, the library restores the environment variables and the descriptors 0 to 2. After other damage, the
library exits and its unstarted calls run elsewhere. The library checks for damage before a call that may take long,
after a failed call, and every 20 ms between short calls. Threads, children, `sys.path` and random states may change.
"""

from __future__ import annotations

import builtins
import ctypes
import errno
import fcntl
import functools
import gc
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import process, resource_tracker, shared_memory
from typing import Any, NamedTuple, NoReturn

from stoker import connections
from stoker.contexts.folders import ProgramFolder, is_visible_here, umask_now
from stoker.contexts.recipe import Recipe
from stoker.pilot.core import infrastructure
from stoker.pilot.library.call_records import open_log_stream
from stoker.protocol.calls import CallOptions, LeftFiles

# ---- scratch folders

_LONG_AGO_NS = 1_000_000_000
_LONGEST = 60  # maximum path length: `multiprocessing` adds 31 characters, and a socket path has at most 107


class ScratchGuard:
    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._folder_identity = _identity(folder)
        with suppress(OSError):  # keep the folder open, so that no new folder gets its inode number
            os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    @property
    def is_gone(self) -> bool:
        """True if the folder was removed, even if a new folder has its name."""
        return self._folder_identity is None or _identity(self._folder) != self._folder_identity


def _identity(place: str | int) -> tuple[int, int] | None:
    try:
        facts = os.stat(place)
    except OSError:
        return None
    return facts.st_dev, facts.st_ino


class ClearedFolder:
    """A folder that `clear` empties, except for entries that existed at the last `keep`. Raises OSError."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._kept: frozenset[str] = frozenset()
        os.makedirs(path, mode=0o700, exist_ok=True)
        self._open = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.clear()

    def is_touched(self) -> bool:
        try:
            facts = os.fstat(self._open)
        except OSError:  # a call has closed the descriptor
            return True
        return facts.st_mtime_ns != self._changed_ns or facts[1:4] != self._folder_identity

    @property
    def short_path(self) -> str:
        """A path of the folder that is short enough for Unix sockets."""
        return self.path if len(os.fsencode(self.path)) <= _LONGEST else f"/proc/{os.getpid()}/fd/{self._open}"

    def names(self) -> list[str]:
        """Return the names of the entries that `clear` removes."""
        try:
            return sorted(set(os.listdir(self.path)) - self._kept)
        except OSError:
            return []

    def keep(self) -> None:
        self._kept = frozenset(os.listdir(self.path))
        self._remember_state()

    def clear(self) -> None:
        """Empty the folder, or create it again if a call removed it."""
        was = os.fstat(self._open)
        if not os.path.exists(self.path):
            os.mkdir(self.path, mode=0o700)
            number = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            os.dup2(number, self._open, inheritable=False)  # keep the number, because `short_path` contains it
            os.close(number)
        elif not os.path.samestat(was, os.stat(self.path)):
            raise FileExistsError(errno.EEXIST, "another folder has its name", self.path)
        with os.scandir(self.path) as listing:
            for entry in listing:
                if entry.name in self._kept:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path, ignore_errors=True)
                else:
                    os.unlink(entry.path)
        self._remember_state()

    def _remember_state(self) -> None:
        os.utime(self.path, ns=(_LONG_AGO_NS, _LONG_AGO_NS))
        facts = os.fstat(self._open)
        self._folder_identity = facts[1:4]  # inode, device, links: a slice is faster than three attributes
        self._changed_ns = facts.st_mtime_ns


def clear_temporary_folder(folder: ClearedFolder) -> None:
    """Empty a temporary folder, and reset the temporary folder of `multiprocessing`."""
    folder.clear()
    made = getattr(process.current_process(), "_config", {}).get("tempdir")
    if made is not None and not os.path.isdir(made):
        process.current_process()._config.pop("tempdir", None)  # type: ignore[attr-defined]


# ---- a slot's folders

_CLONE_FS = 0x200
_MOST_NAMES = 5
_LONGEST_NAME = 80
_MOST_LINKS = 20


def unshare_working_folder() -> bool:
    """Give this thread a separate working folder and umask. Return False if the kernel refuses."""
    code: int = ctypes.CDLL(None, use_errno=True).unshare(_CLONE_FS)
    return code == 0


def context_file_paths(recipe: Recipe, objects: Mapping[str, str]) -> dict[str, str]:
    """Return the local paths of a context's files, by relative path."""
    return {path: objects[name] for path, name in recipe.named if name in objects}


class SlotFolders:
    """The folders of one slot. `temporary` is cleared after each call."""

    def __init__(self, own: str, *, temporary: ClearedFolder, links: Mapping[str, str]) -> None:
        self.temporary = temporary
        self._own_path = own
        self._own: ClearedFolder | None = None
        self._links = links
        self._umask = umask_now()
        self._seen: dict[ProgramFolder, bool] = {}
        self._home: ProgramFolder | None = None
        self._is_in_slot_folder = False

    def enter(self, options: CallOptions) -> None:
        if not options.folder:
            self.enter_working_folder(options.home)
            return
        os.umask(self._umask if options.home is None else options.home.umask)
        self._home, self._is_in_slot_folder = None, False
        os.makedirs(options.folder, exist_ok=True)
        os.chdir(options.folder)

    def enter_working_folder(self, home: ProgramFolder | None) -> None:
        """Enter the program's folder if this process sees it, else the slot's folder. Raises OSError."""
        os.umask(self._umask if home is None else home.umask)
        is_known = home is self._home and not self._is_in_slot_folder  # calls of one frame share an options object
        self._home, self._is_in_slot_folder = home, False
        if home is not None and not is_known and home not in self._seen:
            self._seen[home] = is_visible_here(home)
        if home is not None and (is_known or self._seen[home]):
            try:
                os.chdir(home.path)
                return
            except OSError:  # the folder was removed, or access is denied
                self._seen[home] = False
        self._is_in_slot_folder = True
        if self._own is None:
            self._own = ClearedFolder(self._own_path)
            self._link(self._own)
        os.chdir(self._own_path)

    def _link(self, folder: ClearedFolder) -> None:
        for name, target in self._links.items():
            place = os.path.join(folder.path, name)
            with suppress(OSError):
                os.makedirs(os.path.dirname(place), exist_ok=True)
                os.symlink(target, place)
        folder.keep()

    @property
    def _touched(self) -> ClearedFolder | None:
        own = self._own if self._is_in_slot_folder else None
        return own if own is not None and own.is_touched() else None

    def left(self, function: str) -> LeftFiles | None:
        touched = self._touched
        names = touched.names() if touched is not None else []
        if not names:
            return None
        shown = tuple(name.encode("utf-8", "replace").decode()[:_LONGEST_NAME] for name in names[:_MOST_NAMES])
        return LeftFiles(function, shown, len(names), self._home.path if self._home is not None else "")

    def advice(self, error: BaseException) -> str:
        """Return advice if a file is missing because this pilot does not see the program's folder."""
        if not self._is_in_slot_folder or self._home is None:
            return ""
        link: BaseException | None = error
        for _ in range(_MOST_LINKS):
            if isinstance(link, OSError) and link.errno == errno.ENOENT and isinstance(link.filename, str | bytes):
                path = os.fsdecode(link.filename)
                if path and not os.path.isabs(path):
                    return (
                        f"this pilot does not see the program's folder {self._home.path}, which should contain"
                        f' {path!r}; send it with the context: @context(files=("{path}",)), or give a path that pilots'
                        " can access"
                    )
            link = link and (link.__cause__ or link.__context__)
        return ""

    def is_clean(self) -> bool:
        return not self.temporary.is_touched() and self._touched is None

    def clean(self) -> None:
        if (own := self._touched) is not None:
            own.clear()
            if not os.listdir(own.path):  # `clear` created the folder again
                self._link(own)
        if self.temporary.is_touched():
            clear_temporary_folder(self.temporary)


def set_temporary_folder(folder: str) -> None:
    os.environ["TMPDIR"] = tempfile.tempdir = folder


# ---- damage

EVERY_S = 0.02  # seconds between two checks for damage during short calls
_MARGIN = 64  # number of free file descriptors that a healthy process must have
_LIMITS = {
    f"RLIMIT_{name}": getattr(resource, f"RLIMIT_{name}")
    for name in ("AS", "CPU", "DATA", "FSIZE", "NOFILE", "NPROC", "STACK")
}
_BUILTINS = ("__import__", "__build_class__", "open", "print", "len", "isinstance", "getattr")
_MODULES = ("sys", "builtins", "os", "pickle", "stoker.contexts.ambient")


class LibraryFault(NamedTuple):
    code: int
    text: str


class ProcessGuard:
    """Detects changes to this process since the guard's creation. `temporary`: folder that several slots share."""

    def __init__(self, *, temporary: ClearedFolder | None = None) -> None:
        self._temporary = temporary
        self._environ = os.environ
        self._variables: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]  # since Python 3.0
        """The dictionary inside `os.environ`. A comparison with this dictionary is ten times faster."""
        self._initial_variables = dict(self._variables)
        self._streams = {"stdout": sys.stdout, "stderr": sys.stderr}
        self._modules = {name: sys.modules.get(name) for name in _MODULES}
        self._limits = {which: resource.getrlimit(which) for which in _LIMITS.values()}
        self._recursion = sys.getrecursionlimit()
        self._blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self._signals = _signals()
        lowest = _lowest_free_descriptor()
        free = connections.descriptor_limit() - lowest if lowest is not None else 0
        self._margin = min(_MARGIN, free // 4)
        self._has_spare_descriptors = free > 8
        """False if the loader used up the file descriptors. A new library would have the same problem, so this library
        does not exit.
        """
        self._outputs = {
            number: (fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 3), _identity(number))
            for number in (0, 1, 2)
            if self._has_spare_descriptors and _identity(number)
        }
        poll = select.poll()
        for number in self._outputs:
            poll.register(number, 0)
        self._closed = poll.poll  # returns closed standard descriptors with one system call
        self.unchecked = 0  # number of calls since the last check
        self.checked_at = 0.0  # time of the last check, on `time.perf_counter`

    def restore(self) -> None:
        if self._variables != self._initial_variables or os.environ is not self._environ:
            self._restore_environment()
        if self._closed(0):
            self._restore_outputs()

    def check(self, now: float) -> LibraryFault | None:
        self.restore()
        self._restore_outputs()
        self._restore_streams()
        self.unchecked, self.checked_at = 0, now
        return self.damage() or self._clear()

    def damage(self) -> LibraryFault | None:
        what = self._damage_by_call()
        if what:
            return LibraryFault(infrastructure.RUINED, f"a call in it {what}")
        if self._has_spare_descriptors and not self._has_room():
            gc.collect()  # reference cycles may keep files open
            if not self._has_room():
                limit = connections.descriptor_limit()
                text = f"its calls left files open; the limit is {limit:,} files: close them (`with`)"
                return LibraryFault(infrastructure.NO_DESCRIPTORS, text)
        return None

    def _damage_by_call(self) -> str:
        for name, module in self._modules.items():
            if sys.modules.get(name) is not module:
                return f"removed or replaced sys.modules[{name!r}]"
        for name, which in _LIMITS.items():
            for now, was in zip(resource.getrlimit(which), self._limits[which], strict=True):
                if now != was and now != resource.RLIM_INFINITY and (was == resource.RLIM_INFINITY or now < was):
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
        for name in [name for name in here if os.fsencode(name) not in self._initial_variables]:
            del here[name]
        for key, value in self._initial_variables.items():
            if self._variables.get(key) != value:
                here[os.fsdecode(key)] = os.fsdecode(value)

    def _restore_outputs(self) -> None:
        for number, (kept, was) in self._outputs.items():
            if _identity(number) != was and _identity(kept) == was:
                os.dup2(kept, number)

    def _restore_streams(self) -> None:
        for name, stream in tuple(self._streams.items()):
            if getattr(stream, "closed", False):
                stream = self._streams[name] = open_log_stream(1 if name == "stdout" else 2)
            if getattr(sys, name, None) is not stream:
                setattr(sys, name, stream)

    def _has_room(self) -> bool:
        lowest = _lowest_free_descriptor()
        return lowest is not None and lowest < connections.descriptor_limit() - self._margin

    def _clear(self) -> LibraryFault | None:
        if self._temporary is not None and self._temporary.is_touched():
            try:
                clear_temporary_folder(self._temporary)
            except Exception as error:
                return LibraryFault(infrastructure.NOT_CLEARED, f"{self._temporary.path} could not be cleared: {error}")
        return None


def _signals() -> tuple[bool, bool, bool]:
    return (
        signal.getitimer(signal.ITIMER_REAL)[0] > 0,
        signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
        signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN,
    )


def _lowest_free_descriptor() -> int | None:
    try:
        number = os.dup(2)
    except OSError as error:
        return None if error.errno == errno.EMFILE else 0
    os.close(number)
    return number


# ---- shared memory segments


def register_created_segments_only() -> None:
    """Make `shared_memory` register only segments that this process creates. The resource tracker removes registered
    segments when it ends.
    """
    within = threading.local()
    register, unregister = resource_tracker.register, resource_tracker.unregister
    make = shared_memory.SharedMemory.__init__

    def register_own(name: Any, rtype: str) -> None:
        if not getattr(within, "attaches", False):
            register(name, rtype)

    def unregister_any(name: Any, rtype: str) -> None:
        if rtype == "shared_memory":  # a child may have registered the segment; a second registration is harmless
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


def drop_resource_tracker() -> None:
    """Stop using the parent's resource tracker, which ends with the parent."""
    tracker: Any = resource_tracker._resource_tracker
    if tracker._fd is not None:
        os.close(tracker._fd)
    tracker._fd = tracker._pid = None


# ---- forked children


def exit_user_forked_child(error: BaseException | None) -> NoReturn:
    """Exit a child process that user code forked. Only the library itself may report the end of a call."""
    code = error.code if isinstance(error, SystemExit) else error
    try:
        if error is not None and not isinstance(error, SystemExit):
            traceback.print_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)
