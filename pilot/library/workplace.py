"""The folders and the umask of the calls of one slot.

A call runs in the folder of its program where this process sees it, with the program's umask. Elsewhere it runs in an
empty folder of the slot, and files that it leaves there are reported before they are removed. `TMPDIR` is private in
both cases. A `ClearedFolder` has a change time far in the past, so one `fstat` tells whether it was touched.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import process

from stoker.contexts.folders import ProgramFolder, is_seen_here, umask_now
from stoker.contexts.recipe import Recipe
from stoker.protocol.calls import CallOptions, LeftFiles

# ---- scratch folders

_LONG_AGO_NS = 1_000_000_000
_LONGEST = 60  # `multiprocessing` adds 31 characters, and a socket path has at most 107


class ScratchGuard:
    """The scratch folder of the pilot, which a batch system may clear under a living one."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._is = _identity(folder)
        with suppress(OSError):  # while it is open, its inode's number is not given to a folder made in its place
            os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    @property
    def is_gone(self) -> bool:
        """True if it was removed, also before this was made; made again by another hand it is another."""
        return self._is is None or _identity(self._folder) != self._is


def _identity(folder: str) -> tuple[int, int] | None:
    try:
        facts = os.stat(folder)
    except OSError:
        return None
    return facts.st_dev, facts.st_ino


class ClearedFolder:
    """A folder that `clear` empties, except for its content when `keep` was called. Raises OSError."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._kept: frozenset[str] = frozenset()
        os.makedirs(path, mode=0o700, exist_ok=True)
        self._open = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.clear()

    def is_touched(self) -> bool:
        """True if an entry of the folder was made or removed since it was cleared, or the folder itself."""
        try:
            facts = os.fstat(self._open)
        except OSError:  # a call has closed it
            return True
        return facts.st_mtime_ns != self._changed_ns or facts[1:4] != self._is

    @property
    def short_path(self) -> str:
        """A path of the folder for Unix sockets, whose paths have 107 characters at most."""
        if len(os.fsencode(self.path)) <= _LONGEST:
            return self.path
        return f"/proc/{os.getpid()}/fd/{self._open}"

    def names(self) -> list[str]:
        """The names of what `clear` removes; none if the folder cannot be read."""
        try:
            return sorted(set(os.listdir(self.path)) - self._kept)
        except OSError:
            return []

    def keep(self) -> None:
        """Keep all that is in the folder now."""
        self._kept = frozenset(os.listdir(self.path))
        self._remember_state()

    def clear(self) -> None:
        """Empty the folder; make it again if a call has removed it."""
        was = os.fstat(self._open)
        if not os.path.exists(self.path):
            os.mkdir(self.path, mode=0o700)
            number = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            os.dup2(number, self._open, inheritable=False)  # `short_path` has this number
            os.close(number)
        elif not os.path.samestat(was, os.stat(self.path)):
            raise FileExistsError(errno.EEXIST, "another one was made in its place", self.path)
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
        self._is = facts[1:4]  # inode, device, links: a slice costs less than three attributes
        self._changed_ns = facts.st_mtime_ns


def clear_temporary(folder: ClearedFolder) -> None:
    """Empty a folder of temporary files, and have `multiprocessing` make its own folder there again. Raises OSError."""
    folder.clear()
    made = getattr(process.current_process(), "_config", {}).get("tempdir")
    if made is not None and not os.path.isdir(made):
        process.current_process()._config.pop("tempdir", None)  # type: ignore[attr-defined]


# ---- a slot's folders

_CLONE_FS = 0x200
_MOST_NAMES = 5
_LONGEST_NAME = 80
_MOST_LINKS = 20


def stand_apart() -> bool:
    """Give this thread a separate working folder and umask. False if the system does not allow it."""
    code: int = ctypes.CDLL(None, use_errno=True).unshare(_CLONE_FS)
    return code == 0


def links_of(recipe: Recipe, objects: Mapping[str, str]) -> dict[str, str]:
    """Local paths of files that travelled with a context, by the relative paths in `files`."""
    return {path: objects[name] for path, name in recipe.named if name in objects}


class Workplace:
    """The folders of one slot. `own` is the path of its own folder; `temporary` is cleared after each call."""

    def __init__(self, own: str, *, temporary: ClearedFolder, links: Mapping[str, str] | None = None) -> None:
        self.temporary = temporary
        self._own_path = own
        self._own: ClearedFolder | None = None
        self._links = dict(links or {})
        self._umask = umask_now()
        self._seen: dict[ProgramFolder, bool] = {}
        self._home: ProgramFolder | None = None
        self._is_in_own = False

    def enter(self, options: CallOptions) -> None:
        """Enter the folder of a call with these options, and set its umask. Raises OSError."""
        home = options.home
        if not options.folder:
            self.enter_home(home)
            return
        os.umask(self._umask if home is None else home.umask)
        self._home, self._is_in_own = None, False
        os.makedirs(options.folder, exist_ok=True)
        os.chdir(options.folder)

    def enter_home(self, home: ProgramFolder | None) -> None:
        """Enter the program's folder if it is seen here, else the slot's own. Raises OSError."""
        os.umask(self._umask if home is None else home.umask)
        is_known = home is self._home and not self._is_in_own  # the calls of a frame share their options
        self._home, self._is_in_own = home, False
        if home is not None and (is_known or self._sees(home)):
            try:
                os.chdir(home.path)
                return
            except OSError:  # it was removed, or closed to this user
                self._seen[home] = False
        self._is_in_own = True
        if self._own is None:
            self._own = ClearedFolder(self._own_path)
            self._link(self._own)
        os.chdir(self._own_path)

    def _sees(self, home: ProgramFolder) -> bool:
        seen = self._seen.get(home)
        if seen is None:
            seen = self._seen[home] = is_seen_here(home)
        return seen

    def _link(self, folder: ClearedFolder) -> None:
        for name, target in self._links.items():
            place = os.path.join(folder.path, name)
            with suppress(OSError):
                os.makedirs(os.path.dirname(place), exist_ok=True)
                os.symlink(target, place)
        folder.keep()

    def left(self, function: str) -> LeftFiles | None:
        """Return the files that the call of this function has left in the slot's own folder; None without files."""
        if not self._is_in_own or self._own is None or not self._own.is_touched():
            return None
        names = self._own.names()
        if not names:
            return None
        shown = tuple(name.encode("utf-8", "replace").decode()[:_LONGEST_NAME] for name in names[:_MOST_NAMES])
        return LeftFiles(function, shown, len(names), self._home.path if self._home is not None else "")

    def advice(self, error: BaseException) -> str:
        """Advice about a file that is missing because the program's folder is not seen here; else empty."""
        if not self._is_in_own or self._home is None:
            return ""
        link: BaseException | None = error
        for _ in range(_MOST_LINKS):
            if link is None:
                break
            if isinstance(link, OSError) and link.errno == errno.ENOENT and isinstance(link.filename, str | bytes):
                path = os.fsdecode(link.filename)
                if path and not os.path.isabs(path):
                    return (
                        f"this pilot does not see the program's folder {self._home.path}, where {path!r} is looked for;"
                        f' have it travel with the context: @context(files=("{path}",)), or name a path that pilots see'
                    )
            link = link.__cause__ or link.__context__
        return ""

    def is_clean(self) -> bool:
        """True if the call left no files behind in the folders that are cleared."""
        if self.temporary.is_touched():
            return False
        return not self._is_in_own or self._own is None or not self._own.is_touched()

    def clean(self) -> None:
        """Remove the files that the call left. Raises OSError."""
        if self._is_in_own and self._own is not None and self._own.is_touched():
            self._own.clear()
            if not os.listdir(self._own.path):  # it was made anew
                self._link(self._own)
        if self.temporary.is_touched():
            clear_temporary(self.temporary)


def use_temporary(folder: str) -> None:
    """Have temporary files of this process and its children made in `folder`."""
    os.environ["TMPDIR"] = tempfile.tempdir = folder
