"""Whether a disk of this node is full through no fault of the call that could not write to it.

The disk is that of the file which the exception names. Many libraries name none: then the traceback is looked through
from its inner end, up to the user's innermost function, for a file object, or the path of one, in the variables of a
function. What is found in a package's function is the file that it was asked to write. In the user's it may be another
one, so there the disk must be nearly full too; where nothing is found, one of the node's disks must be full. So must
it where the exception has no errno: a quota or a limit of file sizes ends a write alike.

A call that fills a disk by its own file alone would do so on every node, and fails as the user's. What counts is that
others hold most of the disk: also after a library has removed what it could not finish.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import re
import stat
import sysconfig
import tempfile
from collections.abc import Collection
from contextlib import suppress
from pathlib import PosixPath, PurePosixPath
from types import TracebackType

_FEW_BYTES = 64 << 10
_FEW_PART = 0.01
"""A disk with less of it free than this is full."""
_OTHERS_PART = 0.5
"""Others fill a disk on which they hold as much as this."""
_NEARLY_PART = 0.1
"""A disk with less of it free than this is nearly full."""
_INSTALLED = tuple({sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "purelib", "platlib")})
_OPENED = (io.FileIO, io.BufferedWriter, io.BufferedRandom, io.TextIOWrapper)
_PATHS = (PosixPath, PurePosixPath)
_FULL = re.compile(r"os error 28\b|errno = 28\b|No space left")
_SERVER_FAILS = frozenset(
    {errno.EIO, errno.ESTALE, errno.EREMOTEIO, errno.ESHUTDOWN, errno.ENOTCONN, errno.EUCLEAN, errno.ETIMEDOUT}
)


def others_filled_it(error: BaseException, folder: str) -> bool:
    """True if the disk that a call could not write to is one of this node's, and others have filled it. `folder`: on
    the node's scratch disk."""
    local = {}
    for place in (folder, *_temporary(), "/dev/shm"):
        with suppress(OSError):
            local[os.stat(place).st_dev] = place
    named = [getattr(error, name, None) for name in ("filename2", "filename")]
    files = [os.fsdecode(each) for each in named if isinstance(each, str | bytes)][:1]  # of two, the second is written
    whole_part = 1.0 if _is_told_full(error) else _NEARLY_PART
    if files:
        return _others_fill(files[0], local, room_part=whole_part)
    files, is_exact = _files_of(error.__traceback__)
    if not files:
        return any(_is_full(place) for place in local.values())
    return any(_others_fill(file, local, room_part=whole_part if is_exact else _NEARLY_PART) for file in files)


def _is_told_full(error: BaseException) -> bool:
    """True if the exception says itself that the disk is full."""
    return getattr(error, "errno", None) == errno.ENOSPC or _FULL.search(str(error)) is not None


def _temporary() -> list[str]:
    """Where temporary files go. `tempfile.gettempdir` tries to write there, and goes elsewhere if the disk is full."""
    named = (tempfile.tempdir, *(os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP")))
    return [*(place for place in named if isinstance(place, str) and place), "/tmp", "/var/tmp"]


def is_there(path: str) -> bool:
    """True if a file is there: it can be opened, or its server fails again."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as error:
        return error.errno in _SERVER_FAILS
    except ValueError:
        return False
    return True


def _others_fill(file: str, devices: Collection[int], *, room_part: float) -> bool:
    """True if others hold most of a file's disk, one of these devices, and no larger part of it than this is free."""
    try:
        where = _existing(file)
        facts = os.statvfs(where)
        if os.stat(where).st_dev not in devices:
            return False
        own_bytes = _own_bytes(file, os.stat(where).st_dev)
    except (OSError, ValueError):
        return False
    if facts.f_files > 0 and facts.f_favail == 0:
        return True
    free, size = facts.f_bavail * facts.f_frsize, facts.f_blocks * facts.f_frsize
    return free + own_bytes <= (1 - _OTHERS_PART) * size and free <= max(_FEW_BYTES, room_part * size)


def _own_bytes(file: str, device: int) -> int:
    """What the file takes of its disk, and what this process has open there for writing: a file that was removed
    meanwhile takes its room until it is closed."""
    sizes: dict[int, int] = {}
    places: list[str | int] = [file, *map(int, os.listdir("/proc/self/fd"))]
    for each in places:
        try:
            facts = os.stat(each)
            writes = isinstance(each, str) or fcntl.fcntl(each, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
        except OSError:
            continue
        if writes and stat.S_ISREG(facts.st_mode) and facts.st_dev == device:
            sizes[facts.st_ino] = facts.st_blocks * 512
    return sum(sizes.values())


def _files_of(trace: TracebackType | None) -> tuple[list[str], bool]:
    """The files that the innermost function which has any was given, and whether it is a package's."""
    frames = []
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    for frame in reversed(frames):
        is_package = frame.f_code.co_filename.startswith(_INSTALLED)
        values = list(frame.f_locals.values())  # of a module, another thread may change them
        opened = [value for value in values if type(value) in _OPENED]
        found = [path for value in opened or values if (path := _path_of(value))]
        if found or not is_package:
            return found, is_package
    return [], False


def _path_of(value: object) -> str:
    """The path of a file that a variable holds, or of the open file which it is; empty: neither."""
    is_file = type(value) in _OPENED
    try:
        name = _name_of(value) if is_file else value
    except ValueError:  # its buffer was detached
        return ""
    path = str(name) if type(name) in _PATHS else name  # the types themselves: other code of the user's is not run
    if type(path) is not str or "\0" in path or "\n" in path or not (is_file or os.sep in path):
        return ""
    try:
        return path if os.path.isdir(os.path.dirname(os.path.abspath(path))) and not os.path.isdir(path) else ""
    except OSError:  # the working folder is gone
        return ""


def _name_of(file: object) -> object:
    """The name that an open file was opened by; None where what it wraps is of the user's own."""
    if type(file) is io.TextIOWrapper:
        file = file.buffer
    if type(file) in (io.BufferedWriter, io.BufferedRandom):
        file = file.raw  # type: ignore[attr-defined]  # both have it
    return file.name if type(file) is io.FileIO else None


def _existing(path: str) -> str:
    path = os.path.abspath(path)
    while not os.path.exists(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    return path


def _is_full(folder: str) -> bool:
    try:
        facts = os.statvfs(folder)
    except OSError:
        return False
    lacks_files = facts.f_files > 0 and facts.f_favail == 0
    return lacks_files or facts.f_bavail * facts.f_frsize <= max(
        _FEW_BYTES, _FEW_PART * facts.f_blocks * facts.f_frsize
    )
