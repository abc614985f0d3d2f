"""Whether a disk of this node is full through no fault of the call that could not write to it.

The disk is that of the file which the exception names. Many libraries name none: then the traceback is looked through
from its inner end for a file object, or the path of one, in the variables of a function. Where none is found, one of
the node's disks must be full at this moment.

A call that fills a disk by its own file alone would do so on every node, and fails as the user's. What counts is that
others hold most of the disk: also after a library has removed what it could not finish.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import PurePath
from types import TracebackType
from typing import Any

_FEW_BYTES = 64 << 10
_FEW_PART = 0.01
"""A disk with less of it free than this is full."""
_OTHERS_PART = 0.5
"""Others fill a disk on which they hold as much as this."""
_OPENED = (io.FileIO, io.BufferedWriter, io.BufferedRandom, io.TextIOWrapper)
_SERVER_FAILS = frozenset(
    {errno.EIO, errno.ESTALE, errno.EREMOTEIO, errno.ESHUTDOWN, errno.ENOTCONN, errno.EUCLEAN, errno.ETIMEDOUT}
)


def others_filled_it(error: BaseException, folder: str) -> bool:
    """True if the disk that a call could not write to is one of this node's, and others have filled it. `folder`: on
    the node's scratch disk."""
    local = set()
    for place in (folder, tempfile.gettempdir(), "/dev/shm"):
        try:
            local.add((os.stat(place).st_dev, place))
        except OSError:
            continue
    files = _files_of(error)
    if not files:
        return any(_is_full(place) for _, place in local)
    devices = {device for device, _ in local}
    return any(_others_fill(file, devices) for file in files)


def is_there(path: str) -> bool:
    """True if a file is there: it can be opened, or its server fails again."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as error:
        return error.errno in _SERVER_FAILS
    except ValueError:
        return False
    return True


def _others_fill(file: str, devices: set[int]) -> bool:
    try:
        where = _existing(file)
        facts = os.statvfs(where)
        if os.stat(where).st_dev not in devices:
            return False
        own_bytes = _own_bytes(file, os.stat(where).st_dev)
    except OSError:
        return False
    if facts.f_files > 0 and facts.f_favail == 0:
        return True
    return facts.f_bavail * facts.f_frsize + own_bytes <= (1 - _OTHERS_PART) * facts.f_blocks * facts.f_frsize


def _own_bytes(file: str, device: int) -> int:
    """What the file takes of its disk, and what this process has open there for writing: a file that was removed
    meanwhile takes its room until it is closed."""
    sizes = {}
    for each in (file, *map(int, os.listdir("/proc/self/fd"))):
        try:
            facts = os.stat(each)
            writes = each == file or fcntl.fcntl(each, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
        except OSError:
            continue
        if writes and stat.S_ISREG(facts.st_mode) and facts.st_dev == device:
            sizes[facts.st_ino] = facts.st_blocks * 512
    return sum(sizes.values())


def _files_of(error: BaseException) -> list[str]:
    """The files that an exception names, or that the innermost function of its traceback which has any was given."""
    named = [getattr(error, name, None) for name in ("filename2", "filename")]
    files = [os.fsdecode(each) for each in named if isinstance(each, str | bytes)]
    if files:
        return files[:1]  # of two, the second one is written
    frames = list(_frames(error.__traceback__))
    for local in reversed(frames):
        opened = [value for value in local.values() if type(value) in _OPENED]
        found = [path for value in opened or local.values() if (path := _path_of(value))]
        if found:
            return found
    return []


def _frames(trace: TracebackType | None) -> Iterator[dict[str, Any]]:
    while trace is not None:
        yield trace.tb_frame.f_locals
        trace = trace.tb_next


def _path_of(value: object) -> str:
    """The path of a file that a variable holds, or of the open file which it is; empty: neither."""
    is_file = type(value) in _OPENED
    name: object = getattr(value, "name", None) if is_file else value
    path = str(name) if isinstance(name, PurePath) else name
    if type(path) is not str or "\0" in path or "\n" in path or not (is_file or os.sep in path):
        return ""
    return path if os.path.isdir(os.path.dirname(os.path.abspath(path))) and not os.path.isdir(path) else ""


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
