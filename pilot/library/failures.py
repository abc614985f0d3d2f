"""Decides whether a call's exception is the fault of the user or of the infrastructure (`pilot.core.infrastructure`).

*Origin.* The traceback of an exception from the kernel or a compiled library does not end in a `raise` statement.
Therefore `raise OSError(EIO)` counts as the user's fault.

*Chains.* An explicit cause (`raise ... from error`) is checked too, the implicit context is not. An exception group
counts as an infrastructure failure if every member does.

*Full disks.* A full disk counts as an infrastructure failure if other processes have filled it. The disk is that of the
exception's file, or of the files that the innermost function has open. If no file is known, any full disk of the node
is enough.
"""

from __future__ import annotations

import errno
import fcntl
import io
import opcode
import os
import re
import signal
import stat
import subprocess
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import PosixPath, PurePosixPath
from types import FrameType, TracebackType
from typing import Any, NamedTuple

from stoker.pilot.core.events import ProbeVerdict
from stoker.pilot.core.infrastructure import Proof, Sign, matching

# ---- full disks

_FULL_DISK_BYTES = 64 << 10
_FULL_DISK_FRACTION = 0.01  # a disk also counts as full if at most this fraction of it is free
_OTHERS_FRACTION = 0.8  # other processes count as the cause if they use at least this fraction of the disk
_INSTALLED_FOLDERS = tuple({sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "purelib", "platlib")})
_FILE_TYPES = (io.FileIO, io.BufferedWriter, io.BufferedRandom, io.TextIOWrapper)
_PATHS = (str, PosixPath, PurePosixPath)
_SERVER_ERRNOS = frozenset(
    {errno.EIO, errno.ESTALE, errno.EREMOTEIO, errno.ESHUTDOWN, errno.ENOTCONN, errno.EUCLEAN, errno.ETIMEDOUT}
)


def is_full_disk_caused_by_others(error: BaseException, folder: str) -> bool:
    """Return True if other processes filled the disk that refused a call's write and the disk is local to this node."""
    local = {}
    for place in (folder, *_temporary(), "/dev/shm"):
        with suppress(OSError):
            local[os.stat(place).st_dev] = place
    named = [getattr(error, name, None) for name in ("filename2", "filename")]
    files = [os.fsdecode(each) for each in named if isinstance(each, str | bytes)][:1]  # prefer the written file
    files = files or _file_paths_in_traceback(error.__traceback__)
    if not files:
        return any(map(_is_full, local.values()))
    return any(_is_filled_by_others(file, local) for file in files)


def is_there(path: str) -> bool:
    """Return True if a file can be opened, or if opening the file fails with an error of the file server."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as error:
        return error.errno in _SERVER_ERRNOS
    except ValueError:
        return False
    return True


def _temporary() -> list[str]:
    """Return folders for temporary files. `tempfile.gettempdir` is unusable, because it skips full disks."""
    named = (tempfile.tempdir, *(os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP")))
    return [*(place for place in named if isinstance(place, str) and place), "/tmp", "/var/tmp"]


def _is_filled_by_others(file: str, devices: Collection[int]) -> bool:
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
    return facts.f_bavail * facts.f_frsize + own_bytes <= (1 - _OTHERS_FRACTION) * facts.f_blocks * facts.f_frsize


def _own_bytes(file: str, device: int) -> int:
    """Return the bytes used by `file` and by other files on the same disk that this process has open for writing."""
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


def _file_paths_in_traceback(trace: TracebackType | None) -> list[str]:
    frames = []
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    for frame in reversed(frames):
        values = list(frame.f_locals.values())  # another thread may change the locals of a module
        opened = [value for value in values if type(value) in _FILE_TYPES]
        found = [path for value in opened or values if (path := _file_path_of_value(value))]
        if found or not frame.f_code.co_filename.startswith(_INSTALLED_FOLDERS):
            return found
    return []


def _file_path_of_value(value: object) -> str:
    try:
        is_file = type(value) in _FILE_TYPES
        name = value.name if is_file else value  # type: ignore[attr-defined]
        if type(name) not in _PATHS:
            return ""
        path = str(name)
        if "\0" in path or "\n" in path or not (is_file or os.sep in path) or os.path.isdir(path):
            return ""
        return path if os.path.isdir(os.path.dirname(os.path.abspath(path))) else ""
    except Exception:  # a detached buffer, a user's file class, or a removed working folder
        return ""


def _is_full(folder: str) -> bool:
    try:
        facts = os.statvfs(folder)
    except OSError:
        return False
    few_bytes = max(_FULL_DISK_BYTES, _FULL_DISK_FRACTION * facts.f_blocks * facts.f_frsize)
    return (facts.f_files > 0 and facts.f_favail == 0) or facts.f_bavail * facts.f_frsize <= few_bytes


# ---- exceptions of the infrastructure

_NOT_COMPILED = frozenset(
    opcode.opmap[op] for op in ("RAISE_VARARGS", "RETURN_GENERATOR", "YIELD_VALUE", "SEND") if op in opcode.opmap
)
"""Bytecode instructions at which a traceback ends if Python code raised the exception or passed it on."""
_MOST_LINKS = 20
_PROBE_LIMIT_S = 60.0
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_REQUEST_PATTERN = re.compile(r"Tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB|TiB)")
_DEVICE_PATTERN = re.compile(r"GPU (\d+) has a total capacity")
_TEXT_MOST = 2000


class Place(NamedTuple):
    """Facts about a library that help to decide whether user code or the infrastructure caused an exception."""

    folder: str
    devices: tuple[str, ...] = ()
    budget_bytes: int = 0
    probe: tuple[str, ...] = ()


class InfrastructureCause(NamedTuple):
    """The row of the table of infrastructure errors that an exception matches, and a message."""

    row: Sign
    text: str


def find_infrastructure_cause(error: BaseException, place: Place) -> InfrastructureCause | None:
    seen = 0
    while seen < _MOST_LINKS:
        if isinstance(error, BaseExceptionGroup):
            found = [find_infrastructure_cause(each, place) for each in error.exceptions]
            return found[0] if all(found) else None
        row = _row(error, place)
        if row is not None:
            return InfrastructureCause(row, f"{row.means}: {type(error).__name__}: {_text(error)}")
        if error.__cause__ is None:
            return None
        error, seen = error.__cause__, seen + 1
    return None


def _row(error: BaseException, place: Place) -> Sign | None:
    types = [f"{each.__module__}.{each.__qualname__}" for each in type(error).__mro__]
    number, name = getattr(error, "errno", None), getattr(error, "filename", None)
    rows = matching(
        types, number=number if type(number) is int else 0, text=_text(error), names_file=isinstance(name, str | bytes)
    )
    for row in rows:
        if _is_raised_by_compiled_code(error) and _PROOFS[row.proof](error, place):
            return row
    return None


def _text(error: BaseException) -> str:
    try:
        return str(error)[:_TEXT_MOST]
    except Exception:  # a user's `__str__` failed
        return ""


def _is_raised_by_compiled_code(error: BaseException) -> bool:
    """Return True if the exception comes from compiled code, or from Python code in the package of its type."""
    trace = error.__traceback__
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    code, at = trace.tb_frame.f_code.co_code, trace.tb_lasti
    if not 0 <= at < len(code) or code[at] not in _NOT_COMPILED:
        return True
    package = type(error).__module__.partition(".")[0]
    where = str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
    if isinstance(error, OSError) and where in _FORWARDING_MODULES:
        return True
    return package == where != "__main__" and package in _PACKAGES


_PACKAGES = frozenset({"torch", "pynvml"})
"""Packages whose Python code raises exceptions that count as infrastructure failures."""
_FORWARDING_MODULES = frozenset({"shutil"})
"""Modules that catch OSError, add file names, and raise OSError again."""


# ---- proofs


def _is_within_budget(error: BaseException, place: Place) -> bool:
    """Return True if a device lacks memory for an allocation that would fit into the library's memory budget."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not place.budget_bytes:
        return False
    asked = _REQUEST_PATTERN.search(_text(error))
    size = float(asked[1]) * _UNITS[asked[2]] if asked is not None else 0.0
    try:
        if not torch.cuda.is_initialized():  # no memory was left for CUDA's context
            return True
        named = _DEVICE_PATTERN.search(_text(error))
        for index in (int(named[1]),) if named is not None else range(torch.cuda.device_count()):
            held = torch.cuda.memory_reserved(index)
            lacks_room = torch.cuda.mem_get_info(index)[0] < size
            if size and lacks_room and held + size <= place.budget_bytes:
                return True
            if not size and not held:
                return True
    except Exception:  # the device fails every operation
        return False
    return False


def _has_failed_probe(device: str, command: tuple[str, ...]) -> bool:
    try:
        done = subprocess.run(
            [*command, device],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env={**os.environ, "STOKER_DEVICE": device},
            timeout=_PROBE_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return True
    except OSError:
        return False
    lacks_memory = b"out of memory" in done.stdout.lower()  # this library may use the memory: no fault of the device
    return not lacks_memory and done.returncode not in _NO_FAULT


_NO_FAULT = (ProbeVerdict.SOUND.value, ProbeVerdict.UNKNOWN.value, -signal.SIGKILL, -signal.SIGTERM)
"""Exit codes and signals of a probe that do not indicate a fault. All others mean that the device is faulty."""


_PROOFS: dict[Proof, Callable[[BaseException, Place], bool]] = {
    Proof.NONE: lambda _error, _place: True,
    Proof.DISK_IS_FULL: lambda error, place: is_full_disk_caused_by_others(error, place.folder),
    Proof.FILE_IS_THERE: lambda error, _place: is_there(_text(error).partition(": ")[2]),
    Proof.WITHIN_BUDGET: _is_within_budget,
    Proof.DEVICE_FAILS: lambda _error, place: (
        bool(place.probe) and any(_has_failed_probe(device, place.probe) for device in place.devices)
    ),
}


# ---- failures of bash apps

BASH_FAILURE = "BashExitFailure"  # Parsl's exception for a nonzero exit status
_LINES = 10
_MOST_BYTES = 16_384
_COMMAND_MOST = 1_000
_BASH_EXECUTOR = "remote_side_bash_executor"
_HEAD_ENDS = "--> end executable <--"  # in the file for standard error, Parsl writes the command before this line


def explain_bash_failure(error: BaseException, *, log: str, log_from: int) -> str:
    """Set `command` and `last_lines` of Parsl's exception for a failed command, and return both as a short text.

    Return an empty text for other exceptions. The output of the call begins at byte `log_from` of the library's log.
    """
    trace = error.__traceback__ if type(error).__name__ == BASH_FAILURE else None
    while trace is not None and trace.tb_frame.f_code.co_name != _BASH_EXECUTOR:
        trace = trace.tb_next
    if trace is None:
        return ""
    found = trace.tb_frame.f_locals
    stderr = found.get("std_err")
    lines = _tail(str(stderr.name)) if stderr is not None else _tail(log, start=log_from)
    command, last_lines = str(found.get("executable", "")).strip(), "\n".join(lines[-_LINES:])
    error.command, error.last_lines = command, last_lines  # type: ignore[attr-defined]
    return f"{BASH_FAILURE}: {in_words(str(error), command=command, last_lines=last_lines)}"


def in_words(first: str, *, command: str, last_lines: str) -> str:
    if command:
        first += f": {command if len(command) <= _COMMAND_MOST else command[:_COMMAND_MOST] + ' …'}"
    if not last_lines:
        return f"{first}\nit printed nothing"
    return "\n".join([first, "its last lines:", *(f"  {line}" for line in last_lines.splitlines())])


def _tail(path: str, *, start: int = 0) -> list[str]:
    try:
        with open(path, "rb") as file:
            file.seek(max(start, os.fstat(file.fileno()).st_size - _MOST_BYTES))
            lines = file.read(_MOST_BYTES).decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    if _HEAD_ENDS in lines:
        lines = lines[lines.index(_HEAD_ENDS) + 1 :]
    return [line for line in lines if line.strip()]


# ---- short texts of exceptions

_SHORT_MOST = 400
_FRAMES = 4
_INSTALLED_REAL_FOLDERS = tuple(
    {os.path.realpath(sysconfig.get_path(scheme)) + os.sep for scheme in ("purelib", "platlib", "stdlib")}
)
_OURS = ("stoker.pilot.", "stoker.contexts.")


def in_short(error: BaseException) -> str:
    """Return the exception in one line, followed by one line for each of the last stack frames in user code."""

    def is_own(frame: FrameType) -> bool:
        file, module = frame.f_code.co_filename, str(frame.f_globals.get("__name__", ""))
        installed = os.path.realpath(file).startswith(_INSTALLED_REAL_FOLDERS) or file.startswith("<frozen")
        return not installed and not module.startswith(_OURS)

    try:
        said = [part.strip() for part in traceback.format_exception_only(error) if part.strip()]
        frames = list(traceback.walk_tb(error.__traceback__))
        own = [(frame, line) for frame, line in frames if is_own(frame)][-_FRAMES:] or frames[-1:]
        places = [f"at {frame.f_code.co_filename}:{line} in {frame.f_code.co_name}" for frame, line in own]
        return "\n".join([" ".join(said)[:_SHORT_MOST], *places])
    except Exception:  # a user's exception class may raise in `__str__`
        return type(error).__name__
