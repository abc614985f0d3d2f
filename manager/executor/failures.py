"""Convert the end of a call to a value, the user's exception, or a Stoker error."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from typing import Any

from parsl.app import errors

from stoker import errors as stoker_errors
from stoker.contexts import payloads
from stoker.contexts.payload_layout import Buffer
from stoker.contexts.recipe import ObjectRef
from stoker.errors import RemoteCallError, SerializationError, StokerError
from stoker.manager.executor.pieces import unpickle_result_or_piece
from stoker.manager.executor.session_files import read_result
from stoker.pilot.library.failures import format_bash_failure
from stoker.protocol.calls import CallEnd, Failure, FailureKind, OutputRange
from stoker.protocol.ids import format_call_id, format_library_id
from stoker.units import show_bytes

_ERROR_TYPES: dict[FailureKind, Callable[..., StokerError]] = {
    FailureKind.CONTEXT: stoker_errors.ContextError,
    FailureKind.PILOT: stoker_errors.ContextError,
    FailureKind.NO_DEVICE: stoker_errors.NoDeviceError,
    FailureKind.POISON: stoker_errors.PoisonCallError,
    FailureKind.TIMEOUT: stoker_errors.CallTimeoutError,
    FailureKind.MEMORY: stoker_errors.CallError,
    FailureKind.SERIALIZATION: SerializationError,
    FailureKind.DROPPED: stoker_errors.CallDroppedError,
    FailureKind.CANCELLED: stoker_errors.CallCancelledError,
    FailureKind.DIED: stoker_errors.CallError,
    FailureKind.GANG: stoker_errors.GangBroken,
    FailureKind.INFRASTRUCTURE: stoker_errors.InfrastructureError,
}


_IMPORT_OPCODE = b"\x93"
"""The opcode STACK_GLOBAL, which imports names. A pickle without this opcode contains only builtin types."""


def can_unpickle_without_user_code(end: CallEnd) -> bool:
    """Return True if unpickling this result runs no user code and reads no file."""
    payload = end.payload
    if end.failure is not None:
        return not payload
    return end.ok and type(payload) is bytes and payload[:2] == b"\x80\x05" and _IMPORT_OPCODE not in payload


def result_or_raise(end: CallEnd, *, session: str = "") -> Any:
    """Return the call's result, or raise the call's exception or a StokerError."""
    if end.ok:
        return unpickle_result_or_piece(_read_payload(end), call=end.call)
    if end.failure is not None:
        cause = payloads.load_exception(_read_payload(end)) if end.payload else None
        raise create_error(end.failure, call=end.call, session=session, printed=end.printed) from cause
    error = _add_command_to_bash_error(payloads.load_exception(_read_payload(end)))
    if isinstance(error, Exception):
        call = format_call_id(end.call)
        printed = f" (its output: {_stoker_command('logs', call, session)})" if end.printed else ""
        error.add_note(f"call {call}{printed}")
        if advice := _explain_pickling_error(error):
            error.add_note(advice)
        if isinstance(error, StopIteration | StopAsyncIteration):
            text = f"call {call} raised {error!r}, which would end the loop that receives the call's result"
            raise RuntimeError(text) from error  # as Python does for a StopIteration raised in a generator
        raise error
    # Exceptions that do not inherit from Exception, for example SystemExit, would end this program.
    call, kind = format_call_id(end.call), type(error).__name__
    text = f"call {call} raised {error!r}, which would have ended the library's process; return instead, or raise an"
    raise RemoteCallError(
        f"{text} Exception", call=call, kind=kind, traceback=str(error.__cause__)
    ) from error.__cause__


_UNPICKLABLE_NAME = re.compile(
    r"Can't pickle .*?(?:attribute lookup (\S+) on|the same object as (\S+)|local object '?([^\s']+))"
    r"|Can't get (?:local )?(?:attribute|object) '?([^\s']+)"
)


def _explain_pickling_error(error: Exception) -> str:
    found = _UNPICKLABLE_NAME.search(str(error)) if isinstance(error, pickle.PicklingError | AttributeError) else None
    if found is None:
        return ""
    name = next(filter(None, found.groups())).rpartition(".")[2]
    return (
        f"pickle, which multiprocessing uses, finds {name} by its module and name only, and in a library the program's"
        f" own functions have no module. Import {name} inside the call from a file next to the program (from helpers"
        f" import {name}), use threads, or make each item its own call: stoker.map"
    )


def _stoker_command(name: str, call: str, session: str) -> str:
    return f"stoker {name} {call}{f' --session {session}' if session else ''}"


def create_error(failure: Failure, *, call: int, session: str, printed: OutputRange | None) -> StokerError:
    names = ("pilot", "device", "signal", "exit_code", "tail", "log")
    facts: dict[str, Any] = {"call": format_call_id(call)}
    facts |= {name: value for name in names if (value := getattr(failure, name))}
    if failure.library:
        facts["library"] = format_library_id(failure.library)
    if failure.kind is FailureKind.DROPPED:
        facts |= {"reason": failure.message, "retry_after_s": failure.retry_after_s}
    where = f" on {failure.pilot}" if failure.pilot and failure.pilot not in failure.message else ""
    lines = [f"call {facts['call']}{where}: {failure.message}"]
    if failure.tail and failure.tail not in failure.message:
        lines += ["its last lines:", *("  " + line for line in failure.tail.rstrip().splitlines()[-20:])]
    lines.append(f"  why: {_stoker_command('explain', facts['call'], session)}")
    if failure.kind is FailureKind.CONTEXT and failure.log:
        lines.append(f"  output of the loader: {_stoker_command('logs', facts['call'], session)}")
    elif (output := printed or failure.printed) is not None and output.end != output.start:
        lines.append(f"  its output: {_stoker_command('logs', facts['call'], session)}")
    elif failure.log and failure.library:
        log = _stoker_command("logs", facts["library"], session)
        lines.append(f"  its output was not kept; its library's log, which other calls share: {log}")
    return _ERROR_TYPES[failure.kind]("\n".join(lines), **facts)


def _read_payload(end: CallEnd) -> Buffer:
    payload = end.payload
    if not isinstance(payload, ObjectRef):
        return payload
    try:
        return memoryview(read_result(payload))
    except OSError as error:
        call, size = format_call_id(end.call), show_bytes(payload.size_bytes)
        raise SerializationError(
            f"call {call}: its result of {size} cannot be read: {error}; both the pilots and this program must see the"
            " session folder (stoker.load(run_dir=...))",
            what="result",
            call=call,
        ) from error


class BashExitFailure(errors.BashExitFailure):  # type: ignore[misc]  # parsl is untyped
    """A failed command of a `bash_app`. `last_lines`: the end of the command's output."""

    def __init__(self, app_name: str, exitcode: int, command: str = "", last_lines: str = "") -> None:
        super().__init__(app_name, exitcode)
        self.args = (app_name, exitcode)
        self.command = command
        self.last_lines = last_lines

    def __str__(self) -> str:
        return format_bash_failure(super().__str__(), command=self.command, last_lines=self.last_lines)


def _add_command_to_bash_error(error: BaseException) -> BaseException:
    facts = vars(error)
    if type(error) is not errors.BashExitFailure or "command" not in facts:
        return error
    app_name, exitcode = facts.get("app_name", ""), facts.get("exitcode", 0)
    more = BashExitFailure(app_name, exitcode, str(facts["command"]), str(facts.get("last_lines", "")))
    more.__cause__ = error.__cause__
    return more
