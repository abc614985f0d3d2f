"""From how a call ended to what its future holds: a value, the user's own exception, or one of Stoker's errors."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from typing import Any

from parsl.app import errors

from stoker.contexts import payloads
from stoker.contexts.payload_layout import Buffer
from stoker.contexts.recipe import ObjectRef
from stoker.errors import (
    CallCancelledError,
    CallDroppedError,
    CallError,
    CallTimeoutError,
    ContextError,
    GangBroken,
    InfrastructureError,
    NoDeviceError,
    PoisonCallError,
    RemoteCallError,
    SerializationError,
    StokerError,
)
from stoker.manager.executor.large_payloads import read_result
from stoker.manager.executor.pieces import unpickling_advice
from stoker.pilot.library.failures import in_words
from stoker.protocol.calls import CallEnd, Failure, FailureKind, Payload, Printed
from stoker.protocol.ids import show_call, show_library
from stoker.units import show_bytes

_KINDS: dict[FailureKind, Callable[..., StokerError]] = {
    FailureKind.CONTEXT: ContextError,
    FailureKind.PILOT: ContextError,
    FailureKind.NO_DEVICE: NoDeviceError,
    FailureKind.POISON: PoisonCallError,
    FailureKind.TIMEOUT: CallTimeoutError,
    FailureKind.MEMORY: CallError,
    FailureKind.SERIALIZATION: SerializationError,
    FailureKind.DROPPED: CallDroppedError,
    FailureKind.CANCELLED: CallCancelledError,
    FailureKind.DIED: CallError,
    FailureKind.GANG: GangBroken,
    FailureKind.INFRASTRUCTURE: InfrastructureError,
}


_NAMES_SOMETHING = b"\x93"
"""The opcode STACK_GLOBAL: without this byte a pickle of protocol 4 or later holds builtin types alone."""


def opens_at_once(end: CallEnd) -> bool:
    """True if to open this end runs no code but Stoker's, and reads no file."""
    payload = end.payload
    if end.failure is not None:
        return not payload
    return end.ok and type(payload) is bytes and payload[:2] == b"\x80\x05" and _NAMES_SOMETHING not in payload


def outcome(end: CallEnd, *, session: str = "") -> Any:
    """The call's result. Raises what it raised, or the StokerError that says why there is none. `session` is its id."""
    if end.ok:
        return _open(end.payload, end)
    if end.failure is not None:
        cause = payloads.load_exception(_bytes(end.payload, end)) if end.payload else None
        raise failure_error(end.failure, call=end.call, session=session, printed=end.printed) from cause
    error = with_its_command(payloads.load_exception(_bytes(end.payload, end)))
    if isinstance(error, Exception):
        error.add_note(_where(end, session))
        if advice := _about_names(error):
            error.add_note(advice)
        if isinstance(error, StopIteration | StopAsyncIteration):
            text = f"call {show_call(end.call)} raised {error!r}, which would end the loop that takes its result"
            raise RuntimeError(text) from error  # as Python does for generators
        raise error
    kind = type(error).__name__  # SystemExit and the like would end this program instead of telling it something
    text = str(error.__cause__)
    raise RemoteCallError(
        f"call {show_call(end.call)} raised {error!r}, which would have ended its process; return instead, or raise "
        "an Exception",
        call=show_call(end.call),
        kind=kind,
        traceback=text,
    ) from error.__cause__


_NO_NAME = re.compile(
    r"Can't pickle .*?(?:attribute lookup (\S+) on|the same object as (\S+)|local object '?([^\s']+))"
    r"|Can't get (?:local )?(?:attribute|object) '?([^\s']+)"
)
"""Messages of pickle about functions and classes that it does not find by their names."""


def _about_names(error: Exception) -> str:
    """Return what to do if processes that a call started could not find a function by its name; else empty."""
    found = _NO_NAME.search(str(error)) if isinstance(error, pickle.PicklingError | AttributeError) else None
    if found is None:
        return ""
    name = next(filter(None, found.groups())).rpartition(".")[2]
    return (
        f"pickle, which multiprocessing uses, finds {name} by its module and name only, and in a library the program's"
        f" own functions have no module. Import it inside the call from a file next to the program (from helpers import"
        f" {name}), use threads, or let each item be a call of its own: stoker.map"
    )


def _where(end: CallEnd, session: str) -> str:
    call = show_call(end.call)
    return f"call {call} (what it printed: {_command('logs', call, session)})" if end.printed else f"call {call}"


def _command(name: str, call: str, session: str) -> str:
    """What to type. Other sessions have calls of the same name, so it says whose."""
    return f"stoker {name} {call}{f' --session {session}' if session else ''}"


def failure_error(failure: Failure, *, call: int, session: str = "", printed: Printed | None = None) -> StokerError:
    """The error of a failure, with its evidence as facts. `printed`: the output of the call, where it lived on."""
    facts: dict[str, Any] = {"call": show_call(call)}
    for name in ("pilot", "device", "signal", "exit_code", "tail", "log"):
        if getattr(failure, name):
            facts[name] = getattr(failure, name)
    if failure.library:
        facts["library"] = show_library(failure.library)
    if failure.kind is FailureKind.DROPPED:
        facts["reason"] = failure.message
    where = f" on {failure.pilot}" if failure.pilot and failure.pilot not in failure.message else ""
    lines = [f"call {facts['call']}{where}: {failure.message}"]
    if failure.tail and failure.tail not in failure.message:
        lines += ["its last lines:", *("  " + line for line in failure.tail.rstrip().splitlines()[-20:])]
    lines.append(f"  why: {_command('explain', facts['call'], session)}")
    if failure.kind is FailureKind.CONTEXT and failure.log:
        lines.append(f"  what its loader printed: {_command('logs', facts['call'], session)}")
    elif _has_output(printed or failure.printed):
        lines.append(f"  what it printed: {_command('logs', facts['call'], session)}")
    elif failure.log and failure.library:
        log = _command("logs", facts["library"], session)
        lines.append(f"  nothing that it printed is kept; its library's log, also of other calls: {log}")
    return _KINDS[failure.kind]("\n".join(lines), **facts)


def _has_output(printed: Printed | None) -> bool:
    return printed is not None and printed.end != printed.start


def _open(payload: Payload, end: CallEnd) -> Any:
    data = _bytes(payload, end)
    try:
        return payloads.loads(data, keep_classes=True)
    except BaseException as error:  # what the result's classes do may raise SystemExit, which would end our thread
        if payloads.is_interrupt(error):
            raise
        raise SerializationError(
            f"call {show_call(end.call)}: its result cannot be unpickled here: {error!r}{unpickling_advice(error)}",
            what="result",
            call=show_call(end.call),
        ) from error


def _bytes(payload: Payload, end: CallEnd) -> Buffer:
    if not isinstance(payload, ObjectRef):
        return payload
    try:
        return memoryview(read_result(payload))
    except OSError as error:
        raise SerializationError(
            f"call {show_call(end.call)}: its result of {show_bytes(payload.size_bytes)} cannot be read: {error}; "
            "the session folder must be seen by pilots and by this program alike (stoker.load(run_dir=...))",
            what="result",
            call=show_call(end.call),
        ) from error


# ---- commands of a `bash_app` that failed


class BashExitFailure(errors.BashExitFailure):  # type: ignore[misc]  # parsl is untyped
    """A command of a `bash_app` ended with another exit code than 0.

    `app_name` and `exitcode` are those of Parsl's exception; `command` is what ran, `last_lines` what it printed last.
    """

    def __init__(self, app_name: str, exitcode: int, command: str = "", last_lines: str = "") -> None:
        super().__init__(app_name, exitcode)
        self.args = (app_name, exitcode)
        self.command = command
        self.last_lines = last_lines

    def __str__(self) -> str:
        return in_words(super().__str__(), command=self.command, last_lines=self.last_lines)


def with_its_command(error: BaseException) -> BaseException:
    """Parsl's exception for a command as one that says what a library has found out; any other one as it is."""
    facts = vars(error)
    if type(error) is not errors.BashExitFailure or "command" not in facts:
        return error
    app_name, exitcode = facts.get("app_name", ""), facts.get("exitcode", 0)
    more = BashExitFailure(app_name, exitcode, str(facts["command"]), str(facts.get("last_lines", "")))
    more.__cause__ = error.__cause__
    return more
