"""The folders and the umask of the calls of one slot.

A call runs in the folder of its program where this process sees it (`contexts.program_folder`), with the program's
umask. Elsewhere it runs in a folder of the slot's own, which is empty when it begins: files that it leaves there are
named in its end before they are removed. `TMPDIR` is a folder of the library's own in both cases.

The working folder and the umask belong to the thread where the system allows it (`stand_apart`), else to the process.
They are set when a call begins: one system call each, which undoes the changes of the call before.
"""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress

from stoker.contexts.folders import ProgramFolder, is_seen_here, umask_now
from stoker.contexts.recipe import Recipe
from stoker.pilot.library.os_changes import CHANGES
from stoker.pilot.library.sandbox import ClearedFolder, clear_temporary
from stoker.protocol.calls import CallOptions, LeftFiles

_CLONE_FS = 0x200
_MOST_NAMES = 5
_LONGEST_NAME = 80
_MOST_LINKS = 20


def stand_apart() -> bool:
    """Give this thread a working folder and a umask of its own. False where the system does not allow it."""
    code: int = ctypes.CDLL(None, use_errno=True).unshare(_CLONE_FS)
    return code == 0


def links_of(recipe: Recipe, objects: Mapping[str, str]) -> dict[str, str]:
    """The local paths of files that travelled with a context, by the relative paths that its program listed in
    `files`."""
    return {path: objects[name] for path, name in recipe.named if name in objects}


class Workplace:
    """The folders of one slot. `own` is the path of its own folder, `temporary` the folder that is cleared after each
    call. `links`: files that travelled with the context, by the relative names that they have in its own folder."""

    def __init__(self, own: str, *, temporary: ClearedFolder, links: Mapping[str, str] | None = None) -> None:
        self.temporary = temporary
        self._own_path = own
        self._own: ClearedFolder | None = None
        self._links = dict(links or {})
        self._umask = umask_now()
        self._seen: dict[ProgramFolder, bool] = {}
        self._home: ProgramFolder | None = None
        self._is_in_own = False
        self._entered_at = CHANGES.count

    def enter(self, options: CallOptions) -> None:
        """Enter the folder of a call with these options, and set its umask. Raises OSError."""
        home = options.home
        if (
            home is not None
            and home is self._home  # the calls of a frame share their options
            and CHANGES.count == self._entered_at
            and not (self._is_in_own or options.folder)
        ):
            return
        if options.folder:
            os.umask(self._umask if home is None else home.umask)
            self._home, self._is_in_own = None, False
            os.makedirs(options.folder, exist_ok=True)
            os.chdir(options.folder)
        else:
            self.enter_home(home)
        self._entered_at = CHANGES.count

    def enter_home(self, home: ProgramFolder | None) -> None:
        """Enter the program's folder if it is seen here, else the slot's own. Raises OSError."""
        self._home, self._is_in_own = home, False
        os.umask(self._umask if home is None else home.umask)
        if home is not None and self._sees(home):
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
        """The files that the call of this function has left in the slot's own folder; None if there are none."""
        if not self._is_in_own or self._own is None or not self._own.is_touched():
            return None
        names = self._own.names()
        if not names:
            return None
        shown = tuple(name.encode("utf-8", "replace").decode()[:_LONGEST_NAME] for name in names[:_MOST_NAMES])
        return LeftFiles(function, shown, len(names), self._home.path if self._home is not None else "")

    def advice(self, error: BaseException) -> str:
        """Advice for an exception about a file that is missing because the program's folder is not seen here; empty
        for any other exception."""
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
