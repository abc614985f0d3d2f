"""Whether an exception that a call raised is the infrastructure's: what the table (`core.infrastructure`) asks for is
looked up here, in the process in which it happened.

*Who raised it.* What the kernel or a compiled library raises has no `raise` statement at the end of its traceback; what
the user's code raises has one. So `raise OSError(EIO)` and `raise RuntimeError("NCCL error")` are the user's own. An
exception of a package's own type may also be raised by that package's Python code.

*Chains.* An exception that the user re-raises is still the one that it was. One that names it as its cause
(`raise ... from error`) counts as it does: the user says that this is why. One that merely came up while another was
handled (`__context__`) does not: the user's code had dealt with that one. A group counts if each of its members does.

PyTorch is looked at only if it has been imported here. A probe of the device is a process of its own.
"""

from __future__ import annotations

import opcode
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from stoker.pilot.core.events import ProbeVerdict
from stoker.pilot.core.infrastructure import Proof, Sign, matching
from stoker.pilot.library import full_disks

_NOT_COMPILED = frozenset(
    opcode.opmap[name] for name in ("RAISE_VARARGS", "RETURN_GENERATOR", "YIELD_VALUE", "SEND") if name in opcode.opmap
)
"""Where these stand at the end of a traceback, Python code raised the exception, or passed one on."""
_MOST_LINKS = 20
_PROBE_LIMIT_S = 60.0
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_ASKED_FOR = re.compile(r"Tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB|TiB)")
_ON_DEVICE = re.compile(r"GPU (\d+) has a total capacity")
_TEXT_MOST = 2000


class Place(NamedTuple):
    """What a library is told of itself, as far as it matters here.

    `folder` is on the node's scratch disk, `budget_bytes` what its recipe declares of each device (0: nothing), `probe`
    the command that probes a device (empty: none is probed).
    """

    folder: str
    devices: tuple[str, ...] = ()
    budget_bytes: int = 0
    probe: tuple[str, ...] = ()


class InfrastructureCause(NamedTuple):
    """That an exception is the infrastructure's: the table's row, and in words what happened."""

    row: Sign
    text: str


def find(error: BaseException, place: Place) -> InfrastructureCause | None:
    """Why an exception is the infrastructure's; None if it is the user's own."""
    seen = 0
    while seen < _MOST_LINKS:
        if isinstance(error, BaseExceptionGroup):
            found = [find(each, place) for each in error.exceptions]
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
        types,
        number=number if type(number) is int else 0,
        text=_text(error),
        names_file=isinstance(name, str | bytes),
    )
    for row in rows:
        if _is_compiled(error) and _PROOFS[row.proof](error, place):
            return row
    return None


def _text(error: BaseException) -> str:
    try:
        return str(error)[:_TEXT_MOST]
    except Exception:  # a __str__ of the user's
        return ""


def _is_compiled(error: BaseException) -> bool:
    """True if no `raise` of Python code made this exception, or only one in the package of its type."""
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
    if isinstance(error, OSError) and where in _PASS_ON:
        return True
    return package == where != "__main__" and package in _PACKAGES


_PACKAGES = frozenset({"torch", "pynvml"})
"""Packages whose Python code raises errors of its own types that the table lists."""
_PASS_ON = frozenset({"shutil"})
"""Modules that catch what the kernel raises, write the names of their files into it, and raise it again."""


# ---- proofs


def _is_within_budget(error: BaseException, place: Place) -> bool:
    """Whether a device has no room for what this library asked for, although that was promised to it."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not place.budget_bytes:
        return False
    asked = _ASKED_FOR.search(_text(error))
    size = float(asked[1]) * _UNITS[asked[2]] if asked is not None else 0.0
    try:
        if not torch.cuda.is_initialized():  # it had no room for its context
            return True
        named = _ON_DEVICE.search(_text(error))
        for index in (int(named[1]),) if named is not None else range(torch.cuda.device_count()):
            held = torch.cuda.memory_reserved(index)
            lacks_room = torch.cuda.mem_get_info(index)[0] < size
            if size and lacks_room and held + size <= place.budget_bytes:
                return True
            if not size and not held:
                return True
    except Exception:  # a device in which nothing works any more
        return False
    return False


def _device_fails(error: BaseException, place: Place) -> bool:  # noqa: ARG001
    """Whether a probe of a device of this library fails."""
    return bool(place.probe) and any(_fails(device, place.probe) for device in place.devices)


def _fails(device: str, command: tuple[str, ...]) -> bool:
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
    lacks_memory = b"out of memory" in done.stdout.lower()  # this library may have taken it
    return not lacks_memory and done.returncode not in _NO_FAULT


_NO_FAULT = (ProbeVerdict.SOUND.value, ProbeVerdict.UNKNOWN.value, -signal.SIGKILL, -signal.SIGTERM)
"""Other exit codes of a probe, and other signals that ended it, say that the device fails."""


_PROOFS: dict[Proof, Callable[[BaseException, Place], bool]] = {
    Proof.NONE: lambda _error, _place: True,
    Proof.DISK_IS_FULL: lambda error, place: full_disks.others_filled_it(error, place.folder),
    Proof.FILE_IS_THERE: lambda error, _place: full_disks.is_there(_text(error).partition(": ")[2]),
    Proof.WITHIN_BUDGET: _is_within_budget,
    Proof.DEVICE_FAILS: _device_fails,
}
