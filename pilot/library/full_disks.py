"""Tells whether other processes filled the disk that a call could not write to.

The disk is that of the file which the exception names. Many packages name no file: then the innermost function of the
traceback that holds an open file, or the path of one, tells it. If no file is found, one of the node's disks must be
full. A call that fills a disk alone would do so on every node, so its exception is the user's.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import stat
import sysconfig
import tempfile
from collections.abc import Collection
from contextlib import suppress
from pathlib import PosixPath, PurePosixPath
from types import TracebackType

_FEW_BYTES = 64 << 10
_FEW_PART = 0.01
"""A disk with less than these bytes, or less than this part of it, free is full."""
_OTHERS_PART = 0.8
"""Others filled a disk if they hold at least this part of it."""
_INSTALLED = tuple({sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "purelib", "platlib")})
_OPENED = (io.FileIO, io.BufferedWriter, io.BufferedRandom, io.TextIOWrapper)
_PATHS = (str, PosixPath, PurePosixPath)
_SERVER_FAILS = frozenset(
    {errno.EIO, errno.ESTALE, errno.EREMOTEIO, errno.ESHUTDOWN, errno.ENOTCONN, errno.EUCLEAN, errno.ETIMEDOUT}
)


def others_filled_it(error: BaseException, folder: str) -> bool:
    """True if the disk that a call could not write to is one of this node's, and others filled it. `folder` lies on
    the node's scratch disk."""
    local = {}
    for place in (folder, *_temporary(), "/dev/shm"):
        with suppress(OSError):
            local[os.stat(place).st_dev] = place
    named = [getattr(error, name, None) for name in ("filename2", "filename")]
    files = [os.fsdecode(each) for each in named if isinstance(each, str | bytes)][:1]  # of two, the second is written
    files = files or _files_of(error.__traceback__)
    if not files:
        return any(map(_is_full, local.values()))
    return any(_others_fill(file, local) for file in files)


def is_there(path: str) -> bool:
    """True if a file is there: it can be opened, or its server fails again."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as error:
        return error.errno in _SERVER_FAILS
    except ValueError:
        return False
    return True


def _temporary() -> list[str]:
    """Where temporary files go. `tempfile.gettempdir` tries to write there, and goes elsewhere if the disk is full."""
    named = (tempfile.tempdir, *(os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP")))
    return [*(place for place in named if isinstance(place, str) and place), "/tmp", "/var/tmp"]


def _others_fill(file: str, devices: Collection[int]) -> bool:
    """True if others hold most of a file's disk, which is one of these devices."""
    try:
        place = os.path.abspath(file)
        while not os.path.exists(place) and place != os.path.dirname(place):
            place = os.path.dirname(place)
        facts, device = os.statvfs(place), os.stat(place).st_dev
        if device not in devices:
            return False
        own_bytes = _own_bytes(file, device)
    except (OSError, ValueError):
        return False
    if facts.f_files > 0 and facts.f_favail == 0:
        return True
    return facts.f_bavail * facts.f_frsize + own_bytes <= (1 - _OTHERS_PART) * facts.f_blocks * facts.f_frsize


def _own_bytes(file: str, device: int) -> int:
    """The size on disk of the file and of what this process has open there for writing: a file that was removed
    occupies its room until it is closed."""
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


def _files_of(trace: TracebackType | None) -> list[str]:
    """The files that the innermost function holds which holds any. The search ends at the user's innermost function."""
    frames = []
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    for frame in reversed(frames):
        values = list(frame.f_locals.values())  # of a module, another thread may change them
        opened = [value for value in values if type(value) in _OPENED]
        found = [path for value in opened or values if (path := _path_of(value))]
        if found or not frame.f_code.co_filename.startswith(_INSTALLED):
            return found
    return []


def _path_of(value: object) -> str:
    """The path that a variable holds, or the path of the open file in it; empty for anything else."""
    try:
        is_file = type(value) in _OPENED
        name = value.name if is_file else value  # type: ignore[attr-defined]
        if type(name) not in _PATHS:
            return ""
        path = str(name)
        if "\0" in path or "\n" in path or not (is_file or os.sep in path) or os.path.isdir(path):
            return ""
        return path if os.path.isdir(os.path.dirname(os.path.abspath(path))) else ""
    except Exception:  # a detached buffer, a file of the user's class, a working folder that is gone
        return ""


def _is_full(folder: str) -> bool:
    try:
        facts = os.statvfs(folder)
    except OSError:
        return False
    lacks_files = facts.f_files > 0 and facts.f_favail == 0
    return lacks_files or facts.f_bavail * facts.f_frsize <= max(
        _FEW_BYTES, _FEW_PART * facts.f_blocks * facts.f_frsize
    )
