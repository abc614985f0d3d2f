"""Convert errors of calls to OpenAI errors for the client, and write the causes to the log."""

from __future__ import annotations

import errno
import logging
from typing import TYPE_CHECKING

from stoker.apps.common.openai_requests import ApiError, RequestRefused
from stoker.errors import (
    CallCancelledError,
    CallDroppedError,
    CallTimeoutError,
    ContextError,
    NoDeviceError,
    SerializationError,
    SessionError,
    StokerError,
    StreamDiffersError,
)
from stoker.units import show_seconds

if TYPE_CHECKING:
    from starlette.requests import Request

log = logging.getLogger("stoker.gateway")
OBJECTIVE_UNREACHABLE = "objective_unreachable"
_BUSY_S = 5.0
_REFUSALS: dict[type[StokerError], tuple[str, str, int, float]] = {
    NoDeviceError: ("no device of this site can ever hold the model", "model_fits_nowhere", 503, 0.0),
    # No retry time: several devices have already failed to load the model.
    ContextError: ("the model could not be loaded", "model_unavailable", 503, 0.0),
    CallTimeoutError: ("the request ran longer than its limit", "timeout", 504, 0.0),
    CallDroppedError: ("the session has more requests than it can answer", "overloaded", 503, _BUSY_S),
    CallCancelledError: ("the request was cancelled before it was answered", "cancelled", 503, _BUSY_S),
    StreamDiffersError: (
        "the request had to run again, and its new text differs from the text already sent", "stream_differs", 500, 0.0
    ),
    SerializationError: ("the answer could not be read", "result_unreadable", 500, 0.0),
    SessionError: ("the session does not answer now", "session_unavailable", 503, _BUSY_S),
}  # fmt: skip
"""Message, code, HTTP status and seconds before a retry for each type of error. The first matching type applies."""


def error_for_client(error: BaseException) -> ApiError:
    """Return the error for the client, without names of calls, hosts or folders."""
    match error:
        case RequestRefused():
            return error.error
        case CallDroppedError() if retry_after_s := error.facts.get("retry_after_s"):
            said = f"the model cannot answer in time: {error.facts['reason']}. Ask again in"
            return ApiError(
                f"{said} {show_seconds(retry_after_s)}", type="overloaded", code=OBJECTIVE_UNREACHABLE, status=503,
                retry_after_s=retry_after_s,
            )  # fmt: skip
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            return _make_server_error(
                f"the gateway could not store the data: {error.strerror}", "disk_full", 507, _BUSY_S
            )
    for kind, (message, code, status, retry_after_s) in _REFUSALS.items():
        if isinstance(error, kind):
            return _make_server_error(message, code, status, retry_after_s)
    return _make_server_error("the request failed", "call_failed", 500)


def _make_server_error(message: str, code: str, status: int, retry_after_s: float = 0.0) -> ApiError:
    text = f"{message}; the gateway's log says why: search for the request id of this answer"
    return ApiError(text, type="server_error", code=code, status=status, retry_after_s=retry_after_s)


def log_failure(error: BaseException, request: Request) -> None:
    """Log why a request failed, unless the answer states the whole cause."""
    if isinstance(error, RequestRefused) and not error.why:
        return
    why = error.why if isinstance(error, RequestRefused) else str(error) or type(error).__name__
    foreseen = isinstance(error, StokerError | OSError | RequestRefused)
    id = request.scope.get("state", {}).get("request_id", "")
    status = error_for_client(error).status
    log.warning("%s %s: %d: %s", id, request.url.path, status, why, exc_info=None if foreseen else error)
