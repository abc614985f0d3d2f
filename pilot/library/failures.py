"""Decides whether a call's exception is the fault of the user or of the infrastructure (`pilot.core.infrastructure`).

The traceback of an exception from the kernel or a compiled library does not end in a `raise` statement. Therefore
`raise OSError(EIO)` counts as the user's fault. An explicit cause (`raise ... from error`) is checked too; an implicit
context is not. An exception group counts as an infrastructure failure if every member does.
"""

from __future__ import annotations

import errno
import opcode
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

from stoker.log_files import tail
from stoker.pilot.core.events import ProbeVerdict
from stoker.pilot.core.infrastructure import Proof, Symptom, matching
from stoker.pilot.devices.probe import run_probe

# ---- full disks

_FULL_FRACTION = 0.1  # a disk is full if at most this fraction is free
_SERVER_ERRNOS = frozenset(
    {errno.EIO, errno.ESTALE, errno.EREMOTEIO, errno.ESHUTDOWN, errno.ENOTCONN, errno.EUCLEAN, errno.ETIMEDOUT}
)


def is_full_disk_caused_by_others(error: BaseException, folder: str) -> bool:
    """Return True if a disk of this node is full, even without the files of this library in `folder`.

    Most packages do not name the file that they could not write. If the error names a file, only the disk of this file
    counts.
    """
    disks = {}
    for place in (folder, os.environ.get("TMPDIR", folder), "/tmp", "/var/tmp", "/dev/shm"):
        try:
            disks[os.stat(place).st_dev] = os.statvfs(place)
        except OSError:
            continue
    try:
        if named := getattr(error, "filename2", None) or getattr(error, "filename", None):
            place = os.path.abspath(os.fsdecode(named))
            while not os.path.exists(place):
                place = os.path.dirname(place)
            device = os.stat(place).st_dev
            disks = {device: disks[device]} if device in disks else {}
        own = [os.lstat(os.path.join(where, name)) for where, _, names in os.walk(folder) for name in names]
    except (OSError, TypeError, ValueError):  # the file was removed, or user code set an odd name
        return False
    for device, disk in disks.items():
        freed = sum(facts.st_blocks * 512 for facts in own if facts.st_dev == device)
        few = _FULL_FRACTION * disk.f_blocks * disk.f_frsize
        if disk.f_files > 0 == disk.f_favail or disk.f_bavail * disk.f_frsize + freed <= few:
            return True
    return False


def is_there(path: str) -> bool:
    """Return True if a file can be opened, or if opening the file fails with an error of the file server."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as error:
        return error.errno in _SERVER_ERRNOS
    except ValueError:
        return False
    return True


# ---- exceptions of the infrastructure

_NOT_COMPILED = frozenset(
    opcode.opmap[op] for op in ("RAISE_VARARGS", "RETURN_GENERATOR", "YIELD_VALUE", "SEND") if op in opcode.opmap
)
"""Opcodes at the end of a traceback if Python code raised the exception or a generator passed the exception on."""
_MOST_LINKS = 20
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_REQUEST_PATTERN = re.compile(r"Tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB|TiB)")
_DEVICE_PATTERN = re.compile(r"GPU (\d+) has a total capacity")
_TEXT_MOST = 2000


class Place(NamedTuple):
    folder: str
    devices: tuple[str, ...] = ()
    budget_bytes: int = 0
    probe: tuple[str, ...] = ()


class InfrastructureCause(NamedTuple):
    row: Symptom
    text: str


def find_infrastructure_cause(error: BaseException, place: Place) -> InfrastructureCause | None:
    for _ in range(_MOST_LINKS):
        if isinstance(error, BaseExceptionGroup):
            found = [find_infrastructure_cause(each, place) for each in error.exceptions]
            return found[0] if all(found) else None
        row = _row(error, place)
        if row is not None:
            return InfrastructureCause(row, f"{row.means}: {type(error).__name__}: {_text(error)}")
        if error.__cause__ is None:
            return None
        error = error.__cause__
    return None


def _row(error: BaseException, place: Place) -> Symptom | None:
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
    """True if compiled code raised the exception, or Python code of the package that defines the exception's type."""
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


_PACKAGES = frozenset({"torch", "pynvml"})  # packages whose Python code raises infrastructure failures
_FORWARDING_MODULES = frozenset({"shutil"})  # modules that raise a caught OSError again with file names


# ---- proofs


def _is_within_budget(error: BaseException, place: Place) -> bool:
    """True if a device lacks memory for an allocation within the library's memory budget."""
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


def _has_failed_probe(place: Place) -> bool:
    found = [run_probe(place.probe, device) for device in place.devices if place.probe]
    # A probe that runs out of memory proves no fault of the device: this library may use the memory.
    failed = (ProbeVerdict.FAILED, ProbeVerdict.WRONG)
    return any(verdict in failed and "out of memory" not in said.lower() for verdict, said in found)


_PROOFS: dict[Proof, Callable[[BaseException, Place], bool]] = {
    Proof.NONE: lambda _error, _place: True,
    Proof.DISK_IS_FULL: lambda error, place: is_full_disk_caused_by_others(error, place.folder),
    Proof.FILE_IS_THERE: lambda error, _place: is_there(_text(error).partition(": ")[2]),
    Proof.WITHIN_BUDGET: _is_within_budget,
    Proof.DEVICE_FAILS: lambda _error, place: _has_failed_probe(place),
}


# ---- failures of bash apps

BASH_FAILURE = "BashExitFailure"  # Parsl's exception for a nonzero exit status
_LINES = 10
_MOST_BYTES = 16_384
_COMMAND_MOST = 1_000
_BASH_EXECUTOR = "remote_side_bash_executor"
_HEAD_ENDS = "--> end executable <--"  # in the file for standard error, Parsl writes the command before this line


def explain_bash_failure(error: BaseException, *, log: str, log_from: int) -> str:
    """Set `command` and `last_lines` of Parsl's exception for a failed command, and return both as a short text."""
    trace = error.__traceback__ if type(error).__name__ == BASH_FAILURE else None
    while trace is not None and trace.tb_frame.f_code.co_name != _BASH_EXECUTOR:
        trace = trace.tb_next
    if trace is None:
        return ""
    found = trace.tb_frame.f_locals
    path, start = (str(found["std_err"].name), 0) if found.get("std_err") is not None else (log, log_from)
    lines = tail(path, start=start, lines=_MOST_BYTES, most_bytes=_MOST_BYTES).splitlines()
    if _HEAD_ENDS in lines:
        lines = lines[lines.index(_HEAD_ENDS) + 1 :]
    lines = [line for line in lines if line.strip()]
    command, last_lines = str(found.get("executable", "")).strip(), "\n".join(lines[-_LINES:])
    error.command, error.last_lines = command, last_lines  # type: ignore[attr-defined]
    return f"{BASH_FAILURE}: {in_words(str(error), command=command, last_lines=last_lines)}"


def in_words(first: str, *, command: str, last_lines: str) -> str:
    if command:
        first += f": {command if len(command) <= _COMMAND_MOST else command[:_COMMAND_MOST] + ' …'}"
    if not last_lines:
        return f"{first}\nit printed nothing"
    return "\n".join([first, "its last lines:", *(f"  {line}" for line in last_lines.splitlines())])


# ---- short texts of exceptions

_SHORT_MOST = 400
_FRAMES = 4
_INSTALLED = tuple(os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("purelib", "platlib", "stdlib"))
_OURS = ("stoker.pilot.", "stoker.contexts.")


def in_short(error: BaseException) -> str:
    """Return the exception in one line, and a line for each of the last stack frames in user code."""

    def is_own(frame: FrameType) -> bool:
        file, module = frame.f_code.co_filename, str(frame.f_globals.get("__name__", ""))
        installed = os.path.realpath(file).startswith(_INSTALLED) or file.startswith("<frozen")
        return not installed and not module.startswith(_OURS)

    try:
        said = [part.strip() for part in traceback.format_exception_only(error) if part.strip()]
        frames = list(traceback.walk_tb(error.__traceback__))
        own = [(frame, line) for frame, line in frames if is_own(frame)][-_FRAMES:] or frames[-1:]
        places = [f"at {frame.f_code.co_filename}:{line} in {frame.f_code.co_name}" for frame, line in own]
        return "\n".join([" ".join(said)[:_SHORT_MOST], *places])
    except Exception:  # a user's exception class may raise in `__str__`
        return type(error).__name__
