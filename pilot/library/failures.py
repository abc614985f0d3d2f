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

from stoker.log_files import read_last_lines
from stoker.pilot.core.events import ProbeVerdict
from stoker.pilot.core.infrastructure import Proof, Symptom, matching_symptoms
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
    except (OSError, TypeError, ValueError):  # the file was removed, or user code set an invalid file name
        return False
    for device, disk in disks.items():
        freed = sum(facts.st_blocks * 512 for facts in own if facts.st_dev == device)
        few = _FULL_FRACTION * disk.f_blocks * disk.f_frsize
        if disk.f_files > 0 == disk.f_favail or disk.f_bavail * disk.f_frsize + freed <= few:
            return True
    return False


def is_file_on_server(path: str) -> bool:
    """Return True if a file can be opened, or if opening the file fails with an error of the file server."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as error:
        return error.errno in _SERVER_ERRNOS
    except ValueError:
        return False
    return True


# ---- exceptions of the infrastructure

_PYTHON_CODE_OPCODES = frozenset(
    opcode.opmap[op] for op in ("RAISE_VARARGS", "RETURN_GENERATOR", "YIELD_VALUE", "SEND") if op in opcode.opmap
)
"""Opcodes at which a traceback ends if Python code raised the exception or a generator passed the exception on."""
_MOST_CAUSES = 20
_UNIT_BYTES = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_REQUEST_PATTERN = re.compile(r"Tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB|TiB)")
_DEVICE_PATTERN = re.compile(r"GPU (\d+) has a total capacity")
_MOST_TEXT_CHARACTERS = 2000


class LibraryResources(NamedTuple):
    folder: str
    devices: tuple[str, ...] = ()
    budget_bytes: int = 0
    probe: tuple[str, ...] = ()


class InfrastructureCause(NamedTuple):
    symptom: Symptom
    text: str


def find_infrastructure_cause(error: BaseException, resources: LibraryResources) -> InfrastructureCause | None:
    for _ in range(_MOST_CAUSES):
        if isinstance(error, BaseExceptionGroup):
            found = [find_infrastructure_cause(each, resources) for each in error.exceptions]
            return found[0] if all(found) else None
        row = _find_proven_symptom(error, resources)
        if row is not None:
            return InfrastructureCause(row, f"{row.means}: {type(error).__name__}: {_error_text(error)}")
        if error.__cause__ is None:
            return None
        error = error.__cause__
    return None


def _find_proven_symptom(error: BaseException, resources: LibraryResources) -> Symptom | None:
    types = [f"{each.__module__}.{each.__qualname__}" for each in type(error).__mro__]
    number, name = getattr(error, "errno", None), getattr(error, "filename", None)
    rows = matching_symptoms(
        types,
        number=number if type(number) is int else 0,
        text=_error_text(error),
        names_file=isinstance(name, str | bytes),
    )
    for row in rows:
        if _is_raised_by_compiled_code(error) and _PROOF_CHECKS[row.proof](error, resources):
            return row
    return None


def _error_text(error: BaseException) -> str:
    try:
        return str(error)[:_MOST_TEXT_CHARACTERS]
    except Exception:  # a user's `__str__` failed
        return ""


def _is_raised_by_compiled_code(error: BaseException) -> bool:
    """True if the exception was raised by compiled code, or by Python code of the package that defines its type."""
    trace = error.__traceback__
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    code, at = trace.tb_frame.f_code.co_code, trace.tb_lasti
    if not 0 <= at < len(code) or code[at] not in _PYTHON_CODE_OPCODES:
        return True
    package = type(error).__module__.partition(".")[0]
    where = str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
    if isinstance(error, OSError) and where in _FORWARDING_MODULES:
        return True
    return package == where != "__main__" and package in _PACKAGES


_PACKAGES = frozenset({"torch", "pynvml"})  # packages whose Python code raises infrastructure failures
_FORWARDING_MODULES = frozenset({"shutil"})  # modules that catch an OSError and raise it again with file names


# ---- proofs


def _is_within_budget(error: BaseException, resources: LibraryResources) -> bool:
    """True if a device lacks memory for an allocation within the library's memory budget."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not resources.budget_bytes:
        return False
    asked = _REQUEST_PATTERN.search(_error_text(error))
    size = float(asked[1]) * _UNIT_BYTES[asked[2]] if asked is not None else 0.0
    try:
        if not torch.cuda.is_initialized():  # no memory was left for CUDA's context
            return True
        named = _DEVICE_PATTERN.search(_error_text(error))
        for index in (int(named[1]),) if named is not None else range(torch.cuda.device_count()):
            held = torch.cuda.memory_reserved(index)
            lacks_room = torch.cuda.mem_get_info(index)[0] < size
            if size and lacks_room and held + size <= resources.budget_bytes:
                return True
            if not size and not held:
                return True
    except Exception:  # the device fails every operation
        return False
    return False


def _has_failed_probe(resources: LibraryResources) -> bool:
    found = [run_probe(resources.probe, device) for device in resources.devices if resources.probe]
    # A probe that runs out of memory does not prove a device fault: this library may hold the memory.
    failed = (ProbeVerdict.FAILED, ProbeVerdict.WRONG)
    return any(verdict in failed and "out of memory" not in said.lower() for verdict, said in found)


_PROOF_CHECKS: dict[Proof, Callable[[BaseException, LibraryResources], bool]] = {
    Proof.NONE: lambda _error, _place: True,
    Proof.DISK_IS_FULL: lambda error, place: is_full_disk_caused_by_others(error, place.folder),
    Proof.FILE_IS_THERE: lambda error, _place: is_file_on_server(_error_text(error).partition(": ")[2]),
    Proof.WITHIN_BUDGET: _is_within_budget,
    Proof.DEVICE_FAILS: lambda _error, place: _has_failed_probe(place),
}


# ---- failures of bash apps

BASH_FAILURE = "BashExitFailure"  # Parsl's exception for a nonzero exit status
_MOST_LINES = 10
_MOST_BYTES = 16_384
_MAX_COMMAND_LENGTH = 1_000
_BASH_EXECUTOR = "remote_side_bash_executor"
_COMMAND_END_LINE = "--> end executable <--"  # Parsl writes the command and this line before the output


def explain_bash_failure(error: BaseException, *, log: str, log_offset: int) -> str:
    """Set `command` and `last_lines` of Parsl's exception for a failed command, and return both as a short text."""
    trace = error.__traceback__ if type(error).__name__ == BASH_FAILURE else None
    while trace is not None and trace.tb_frame.f_code.co_name != _BASH_EXECUTOR:
        trace = trace.tb_next
    if trace is None:
        return ""
    found = trace.tb_frame.f_locals
    path, start = (str(found["std_err"].name), 0) if found.get("std_err") is not None else (log, log_offset)
    lines = read_last_lines(path, start=start, lines=_MOST_BYTES, most_bytes=_MOST_BYTES).splitlines()
    if _COMMAND_END_LINE in lines:
        lines = lines[lines.index(_COMMAND_END_LINE) + 1 :]
    lines = [line for line in lines if line.strip()]
    command, last_lines = str(found.get("executable", "")).strip(), "\n".join(lines[-_MOST_LINES:])
    error.command, error.last_lines = command, last_lines  # type: ignore[attr-defined]
    return f"{BASH_FAILURE}: {format_bash_failure(str(error), command=command, last_lines=last_lines)}"


def format_bash_failure(summary: str, *, command: str, last_lines: str) -> str:
    if command:
        summary += f": {command if len(command) <= _MAX_COMMAND_LENGTH else command[:_MAX_COMMAND_LENGTH] + ' …'}"
    if not last_lines:
        return f"{summary}\nit printed nothing"
    return "\n".join([summary, "its last lines:", *(f"  {line}" for line in last_lines.splitlines())])


# ---- short texts of exceptions

_MOST_SUMMARY_CHARACTERS = 400
_MOST_FRAMES = 4
_INSTALLED_FOLDERS = tuple(
    os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("purelib", "platlib", "stdlib")
)
_STOKER_MODULES = ("stoker.pilot.", "stoker.contexts.")


def summarize_exception(error: BaseException) -> str:
    """Return the exception in one line, and a line for each of the last stack frames in user code."""

    def is_own(frame: FrameType) -> bool:
        file, module = frame.f_code.co_filename, str(frame.f_globals.get("__name__", ""))
        installed = os.path.realpath(file).startswith(_INSTALLED_FOLDERS) or file.startswith("<frozen")
        return not installed and not module.startswith(_STOKER_MODULES)

    try:
        said = [part.strip() for part in traceback.format_exception_only(error) if part.strip()]
        frames = list(traceback.walk_tb(error.__traceback__))
        own = [(frame, line) for frame, line in frames if is_own(frame)][-_MOST_FRAMES:] or frames[-1:]
        places = [f"at {frame.f_code.co_filename}:{line} in {frame.f_code.co_name}" for frame, line in own]
        return "\n".join([" ".join(said)[:_MOST_SUMMARY_CHARACTERS], *places])
    except Exception:  # a user's exception class may raise in `__str__`
        return type(error).__name__
