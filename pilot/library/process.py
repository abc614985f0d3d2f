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
from stoker.contexts.folders import ProgramFolder, current_umask, is_visible_here
from stoker.contexts.recipe import Recipe
from stoker.pilot.core import infrastructure
from stoker.pilot.library.call_records import open_log_stream
from stoker.protocol.calls import CallOptions, LeftoverFiles

# ---- scratch folders

_UNCHANGED_MTIME_NS = 1_000_000_000
_MAX_TEMPORARY_PATH_BYTES = 60  # bytes; socket paths have at most 107, and `multiprocessing` adds 31 characters


class ScratchGuard:
    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._folder_identity = _file_identity(folder)
        with suppress(OSError):  # keep the folder open, so that no new folder gets its inode number
            os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    @property
    def is_gone(self) -> bool:
        """True if the folder was removed, even if a new folder has its name."""
        return self._folder_identity is None or _file_identity(self._folder) != self._folder_identity


def _file_identity(place: str | int) -> tuple[int, int] | None:
    try:
        facts = os.stat(place)
    except OSError:
        return None
    return facts.st_dev, facts.st_ino


class ClearableFolder:
    """A folder that `clear` empties, except for entries of the last `keep_present_entries`. Raises OSError."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._kept_names: frozenset[str] = frozenset()
        os.makedirs(path, mode=0o700, exist_ok=True)
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.clear()

    def has_changed(self) -> bool:
        try:
            facts = os.fstat(self._descriptor)
        except OSError:  # a call has closed the descriptor
            return True
        return facts.st_mtime_ns != self._changed_ns or facts[1:4] != self._folder_identity

    @property
    def short_path(self) -> str:
        """A path of the folder that is short enough for Unix sockets."""
        return (
            self.path
            if len(os.fsencode(self.path)) <= _MAX_TEMPORARY_PATH_BYTES
            else f"/proc/{os.getpid()}/fd/{self._descriptor}"
        )

    def names_to_clear(self) -> list[str]:
        """Return the names of the entries that `clear` removes."""
        try:
            return sorted(set(os.listdir(self.path)) - self._kept_names)
        except OSError:
            return []

    def keep_present_entries(self) -> None:
        self._kept_names = frozenset(os.listdir(self.path))
        self._remember_state()

    def clear(self) -> None:
        """Empty the folder, or create it again if a call removed it."""
        was = os.fstat(self._descriptor)
        if not os.path.exists(self.path):
            os.mkdir(self.path, mode=0o700)
            number = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            os.dup2(number, self._descriptor, inheritable=False)  # keep the number, because `short_path` contains it
            os.close(number)
        elif not os.path.samestat(was, os.stat(self.path)):
            raise FileExistsError(errno.EEXIST, "another folder has its name", self.path)
        with os.scandir(self.path) as listing:
            for entry in listing:
                if entry.name in self._kept_names:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path, ignore_errors=True)
                else:
                    os.unlink(entry.path)
        self._remember_state()

    def _remember_state(self) -> None:
        os.utime(self.path, ns=(_UNCHANGED_MTIME_NS, _UNCHANGED_MTIME_NS))
        facts = os.fstat(self._descriptor)
        self._folder_identity = facts[1:4]  # inode, device, link count: a slice is faster than three attributes
        self._changed_ns = facts.st_mtime_ns


def clear_temporary_folder(folder: ClearableFolder) -> None:
    """Empty a temporary folder, and reset the temporary folder of `multiprocessing`."""
    folder.clear()
    made = getattr(process.current_process(), "_config", {}).get("tempdir")
    if made is not None and not os.path.isdir(made):
        process.current_process()._config.pop("tempdir", None)  # type: ignore[attr-defined]


# ---- a slot's folders

_CLONE_FS = 0x200
_MOST_LISTED_FILES = 5
_MAX_NAME_LENGTH = 80
_MOST_CAUSES = 20


def unshare_working_folder() -> bool:
    """Give this thread a separate working folder and umask. Return False if the kernel refuses."""
    code: int = ctypes.CDLL(None, use_errno=True).unshare(_CLONE_FS)
    return code == 0


def context_file_paths(recipe: Recipe, objects: Mapping[str, str]) -> dict[str, str]:
    """Return the local paths of a context's files, by relative path."""
    return {path: objects[name] for path, name in recipe.named if name in objects}


class SlotFolders:
    """The folders of one slot. `temporary` is cleared after each call."""

    def __init__(self, own: str, *, temporary: ClearableFolder, links: Mapping[str, str]) -> None:
        self.temporary = temporary
        self._own_path = own
        self._own: ClearableFolder | None = None
        self._links = links
        self._umask = current_umask()
        self._visible_folders: dict[ProgramFolder, bool] = {}
        self._home: ProgramFolder | None = None
        self._is_in_slot_folder = False

    def enter_call_folder(self, options: CallOptions) -> None:
        if not options.folder:
            self.enter_working_folder(options.home)
            return
        os.umask(self._umask if options.home is None else options.home.umask)
        self._home, self._is_in_slot_folder = None, False
        os.makedirs(options.folder, exist_ok=True)
        os.chdir(options.folder)

    def enter_working_folder(self, home: ProgramFolder | None) -> None:
        """Enter the program's folder if this process can access it, else the slot's folder. Raises OSError."""
        os.umask(self._umask if home is None else home.umask)
        is_known = home is self._home and not self._is_in_slot_folder  # calls that arrive together share the object
        self._home, self._is_in_slot_folder = home, False
        if home is not None and not is_known and home not in self._visible_folders:
            self._visible_folders[home] = is_visible_here(home)
        if home is not None and (is_known or self._visible_folders[home]):
            try:
                os.chdir(home.path)
                return
            except OSError:  # the folder was removed, or access is denied
                self._visible_folders[home] = False
        self._is_in_slot_folder = True
        if self._own is None:
            self._own = ClearableFolder(self._own_path)
            self._link_context_files(self._own)
        os.chdir(self._own_path)

    def _link_context_files(self, folder: ClearableFolder) -> None:
        for name, target in self._links.items():
            place = os.path.join(folder.path, name)
            with suppress(OSError):
                os.makedirs(os.path.dirname(place), exist_ok=True)
                os.symlink(target, place)
        folder.keep_present_entries()

    @property
    def _changed_slot_folder(self) -> ClearableFolder | None:
        own = self._own if self._is_in_slot_folder else None
        return own if own is not None and own.has_changed() else None

    def describe_left_files(self, function: str) -> LeftoverFiles | None:
        touched = self._changed_slot_folder
        names = touched.names_to_clear() if touched is not None else []
        if not names:
            return None
        shown = tuple(
            name.encode("utf-8", "replace").decode()[:_MAX_NAME_LENGTH] for name in names[:_MOST_LISTED_FILES]
        )
        return LeftoverFiles(function, shown, len(names), self._home.path if self._home is not None else "")

    def explain_missing_file(self, error: BaseException) -> str:
        """Return advice if a file is missing because this pilot cannot access the program's folder; else empty."""
        if not self._is_in_slot_folder or self._home is None:
            return ""
        link: BaseException | None = error
        for _ in range(_MOST_CAUSES):
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
        return not self.temporary.has_changed() and self._changed_slot_folder is None

    def remove_left_files(self) -> None:
        if (own := self._changed_slot_folder) is not None:
            own.clear()
            if not os.listdir(own.path):  # `clear` created the folder again
                self._link_context_files(own)
        if self.temporary.has_changed():
            clear_temporary_folder(self.temporary)


def set_temporary_folder(folder: str) -> None:
    os.environ["TMPDIR"] = tempfile.tempdir = folder


# ---- damage

DAMAGE_CHECK_S = 0.02  # seconds between two checks for damage during short calls
_MIN_FREE_DESCRIPTORS = 64  # number of free file descriptors that a healthy process must have
_WATCHED_LIMITS = {
    f"RLIMIT_{name}": getattr(resource, f"RLIMIT_{name}")
    for name in ("AS", "CPU", "DATA", "FSIZE", "NOFILE", "NPROC", "STACK")
}
_WATCHED_BUILTINS = ("__import__", "__build_class__", "open", "print", "len", "isinstance", "getattr")
_WATCHED_MODULES = ("sys", "builtins", "os", "pickle", "stoker.contexts.ambient")


class LibraryFault(NamedTuple):
    code: int
    text: str


class ProcessGuard:
    """Detects changes to this process since the guard's creation. `temporary`: folder that several slots share."""

    def __init__(self, *, temporary: ClearableFolder | None = None) -> None:
        self._temporary = temporary
        self._environ = os.environ
        self._variables: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]  # since Python 3.0
        """The dictionary inside `os.environ`. Comparing it is ten times faster than comparing `os.environ`."""
        self._initial_variables = dict(self._variables)
        self._streams = {"stdout": sys.stdout, "stderr": sys.stderr}
        self._modules = {name: sys.modules.get(name) for name in _WATCHED_MODULES}
        self._limits = {which: resource.getrlimit(which) for which in _WATCHED_LIMITS.values()}
        self._recursion = sys.getrecursionlimit()
        self._blocked_signals = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self._signals = _read_signal_settings()
        lowest = _lowest_free_descriptor()
        free = connections.descriptor_limit() - lowest if lowest is not None else 0
        self._margin = min(_MIN_FREE_DESCRIPTORS, free // 4)
        self._has_spare_descriptors = free > 8
        """False if the loader used up the file descriptors. A new library would have the same problem, so this library
        does not exit.
        """
        self._outputs = {
            number: (fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 3), _file_identity(number))
            for number in (0, 1, 2)
            if self._has_spare_descriptors and _file_identity(number)
        }
        poll = select.poll()
        for number in self._outputs:
            poll.register(number, 0)
        self._poll_closed_outputs = poll.poll  # finds closed standard descriptors with one system call
        self.unchecked_calls = 0  # number of calls since the last check
        self.checked_at = 0.0  # time of the last check, on `time.perf_counter`

    def restore_environment(self) -> None:
        if self._variables != self._initial_variables or os.environ is not self._environ:
            self._restore_variables()
        if self._poll_closed_outputs(0):
            self._restore_outputs()

    def restore_and_check(self, now: float) -> LibraryFault | None:
        self.restore_environment()
        self._restore_outputs()
        self._restore_streams()
        self.unchecked_calls, self.checked_at = 0, now
        return self.find_damage() or self._clear_shared_folder()

    def find_damage(self) -> LibraryFault | None:
        what = self._describe_damage()
        if what:
            return LibraryFault(infrastructure.INTERPRETER_DAMAGED, f"a call in it {what}")
        if self._has_spare_descriptors and not self._has_free_descriptors():
            gc.collect()  # reference cycles may keep files open
            if not self._has_free_descriptors():
                limit = connections.descriptor_limit()
                text = f"its calls left files open; the limit is {limit:,} files: close them (`with`)"
                return LibraryFault(infrastructure.NO_DESCRIPTORS, text)
        return None

    def _describe_damage(self) -> str:
        for name, module in self._modules.items():
            if sys.modules.get(name) is not module:
                return f"removed or replaced sys.modules[{name!r}]"
        for name, which in _WATCHED_LIMITS.items():
            for now, was in zip(resource.getrlimit(which), self._limits[which], strict=True):
                if now != was and now != resource.RLIM_INFINITY and (was == resource.RLIM_INFINITY or now < was):
                    return f"lowered {name}"
        for name in _WATCHED_BUILTINS:
            if not callable(getattr(builtins, name, None)):
                return f"removed {name} from builtins"
        if sys.getrecursionlimit() < self._recursion:
            return "lowered the recursion limit"
        if signal.pthread_sigmask(signal.SIG_BLOCK, ()) != self._blocked_signals:
            return "blocked signals"
        if _read_signal_settings() != self._signals:
            return "left a timer, or changed how SIGTERM or SIGCHLD is handled"
        return ""

    def _restore_variables(self) -> None:
        here = os.environ = self._environ
        for name in [name for name in here if os.fsencode(name) not in self._initial_variables]:
            del here[name]
        for key, value in self._initial_variables.items():
            if self._variables.get(key) != value:
                here[os.fsdecode(key)] = os.fsdecode(value)

    def _restore_outputs(self) -> None:
        for number, (kept, was) in self._outputs.items():
            if _file_identity(number) != was and _file_identity(kept) == was:
                os.dup2(kept, number)

    def _restore_streams(self) -> None:
        for name, stream in tuple(self._streams.items()):
            if getattr(stream, "closed", False):
                stream = self._streams[name] = open_log_stream(1 if name == "stdout" else 2)
            if getattr(sys, name, None) is not stream:
                setattr(sys, name, stream)

    def _has_free_descriptors(self) -> bool:
        lowest = _lowest_free_descriptor()
        return lowest is not None and lowest < connections.descriptor_limit() - self._margin

    def _clear_shared_folder(self) -> LibraryFault | None:
        if self._temporary is not None and self._temporary.has_changed():
            try:
                clear_temporary_folder(self._temporary)
            except Exception as error:
                return LibraryFault(
                    infrastructure.CLEANUP_FAILED, f"{self._temporary.path} could not be cleared: {error}"
                )
        return None


def _read_signal_settings() -> tuple[bool, bool, bool]:
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
        if rtype == "shared_memory":  # the segment may be unknown to the tracker; registering it twice is harmless
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


def ignore_sigterm_except_in_children() -> None:
    """Ignore SIGTERM, because a batch system sends it to each process of a job, but the agent decides when calls stop.

    Child processes keep the default action. During a fork, SIGTERM is blocked: else a child would ignore a signal that
    arrives before it has reset the action, and `multiprocessing.Pool.terminate` would wait for this child forever.
    """
    masks = threading.local()

    def block() -> None:
        masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.before)

    def reset_and_unblock() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        unblock()

    signal.signal(signal.SIGTERM, lambda _number, _frame: None)
    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=reset_and_unblock)


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
