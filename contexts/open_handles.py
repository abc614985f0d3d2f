"""Objects that cannot leave their process: open files, and temporary files and folders.

A copy of an open file in another process writes elsewhere, or nowhere. A copy of a temporary file removes the program's
own file when it is freed. So `ByValuePickler` refuses both by name. Streams of this process (`sys.stdout`) travel by
name: a function that prints to them prints in its library.
"""

from __future__ import annotations

import _io
import io
import logging
import mmap
import pickle
import sys
import tarfile
import tempfile
import zipfile
from typing import Any

_FILES = (
    io.FileIO, io.BufferedReader, io.BufferedWriter, io.BufferedRandom, io.BufferedRWPair, io.TextIOWrapper, mmap.mmap,
)  # fmt: skip
_TEMPORARY = (
    tempfile._TemporaryFileWrapper,
    tempfile._TemporaryFileCloser,  # type: ignore[attr-defined]  # what removes the file of the one above
    tempfile.SpooledTemporaryFile,
    tempfile.TemporaryDirectory,
)
_ARCHIVES = (zipfile.ZipFile, tarfile.TarFile)
SUSPECTS: tuple[type, ...] = (
    _io._IOBase,  # the class beneath all files, which is asked faster than the abstract `io.IOBase`
    mmap.mmap,
    tempfile._TemporaryFileWrapper,
    tempfile._TemporaryFileCloser,  # type: ignore[attr-defined]
    tempfile.TemporaryDirectory,
    *_ARCHIVES,
)
"""Classes of all that may be a handle."""
_STREAMS = ("stdin", "stdout", "stderr", "__stdin__", "__stdout__", "__stderr__")


logger = logging.getLogger("stoker.captured")
_told: set[str] = set()


class OpenHandle(pickle.PicklingError):
    """Raised for a handle that would be pickled. `what` names it, `advice` says how to do without."""

    def __init__(self, what: str, advice: str) -> None:
        super().__init__(f"{what}; {advice}")
        self.what = what
        self.advice = advice


def is_handle(value: Any) -> bool:
    """True for an open file or archive, or a temporary file or folder. False for a stream of this process, a file in
    memory, and classes of packages: these define themselves how their files are pickled."""
    if not isinstance(value, SUSPECTS) or any(value is getattr(sys, name, None) for name in _STREAMS):
        return False
    if isinstance(value, (*_FILES, *_TEMPORARY, *_ARCHIVES)):
        return True
    in_memory = isinstance(value, io.BytesIO | io.StringIO)
    return not in_memory and type(value).__module__.partition(".")[0] in sys.stdlib_module_names


def reduce_handle(value: Any) -> Any:
    """The reduction of one of SUSPECTS: a stream of this process goes by name. NotImplemented if it is no handle.
    Raises OpenHandle."""
    for name in _STREAMS:
        if value is getattr(sys, name, None):
            return getattr, (sys, name)
    if is_handle(value):
        raise handle_error(value)
    return NotImplemented


def handle_error(value: Any) -> OpenHandle:
    """The error that names a handle."""
    if isinstance(value, tempfile.TemporaryDirectory):
        what, advice = "a temporary folder", "pass its path (.name)"
    elif isinstance(value, _ARCHIVES):
        what, advice = "an open archive", "pass its path, and open it in the function"
    elif isinstance(value, mmap.mmap):
        what, advice = "a mapped file", "pass its path, and map it in the function"
    elif isinstance(value, _TEMPORARY):
        what, advice = "a temporary file", "pass its path (.name), and open it in the function"
    elif isinstance(_facts(value)["name"], int):
        what, advice = "an open file", "open the file in the function"
    else:
        what, advice = "an open file", "pass its path, and open it in the function"
    return OpenHandle(what + _shown(value), advice)


def tell_of_finalizer(kind: type) -> None:
    """Warn once of a class of the user's own whose objects are pickled and have a `__del__`: it may remove files."""
    name = kind.__qualname__
    if name not in _told:
        _told.add(name)
        logger.warning(
            "%s has a __del__, which runs in the library too, when the copy there goes: it must not remove files that"
            " the program still wants; pass the path instead (said once)",
            name,
        )


def _shown(value: Any) -> str:
    """Return the name and mode of a handle, as far as it has them."""
    facts = _facts(value)
    name, mode = facts["name"], facts["mode"]
    if name is None and isinstance(value, zipfile.ZipFile):
        name = value.filename
    elif name is None:  # bz2 and lzma keep the file beneath
        name = _facts(getattr(value, "_fp", None))["name"]
    named = f" {name!r:.200}" if isinstance(name, str | bytes) and name else ""
    return named + (f" (mode {mode!r:.20})" if isinstance(mode, str) else "")


def _facts(value: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("name", "mode"):
        try:
            found[name] = getattr(value, name, None)
        except Exception:  # of a detached or closed file, or of a property of the user's
            found[name] = None
    return found
