"""Errors of calls as OpenAI words them, with the status that tells clients whether to try again."""

from __future__ import annotations

import errno

import msgspec

from stoker.apps.common.openai.request import ApiError, RequestRefused
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

_BUSY_S = 5.0


class Refusal(msgspec.Struct, frozen=True):
    """An error, and when to try again (0: nothing is said of that)."""

    error: ApiError
    retry_after_s: float = 0.0


class TryLater(RequestRefused):
    """A request is refused for now. `retry_after_s`: when it may come again."""

    def __init__(self, message: str, *, type: str, code: str, status: int, retry_after_s: float) -> None:
        super().__init__(message, type=type, code=code, status=status)
        self.retry_after_s = retry_after_s


def refusal_of(error: BaseException) -> Refusal:
    """What a client hears of an error."""
    match error:
        case TryLater():
            return Refusal(error.error, error.retry_after_s)
        case RequestRefused():
            return Refusal(error.error)
        case NoDeviceError():
            return Refusal(_error(error, "model_fits_nowhere", 503))
        case ContextError():
            return Refusal(_error(error, "model_unavailable", 503), _BUSY_S)
        case CallTimeoutError():
            return Refusal(_error(error, "timeout", 504))
        case CallDroppedError():
            return Refusal(_error(error, "overloaded", 503), _BUSY_S)
        case CallCancelledError():
            return Refusal(_error(error, "cancelled", 503), _BUSY_S)
        case StreamDiffersError():
            return Refusal(_error(error, "stream_differs", 500))
        case SerializationError():
            return Refusal(_error(error, "result_unreadable", 500))
        case SessionError():
            return Refusal(_error(error, "session_unavailable", 503), _BUSY_S)
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            return Refusal(_error(error, "disk_full", 507), _BUSY_S)
        case _:
            return Refusal(_error(error, "call_failed", 500))


def _error(error: BaseException, code: str, status: int) -> ApiError:
    said = (str(error) or type(error).__name__).partition("\n")[0]
    text = said if isinstance(error, StokerError) else f"{type(error).__name__}: {said}"
    return ApiError(text, type="server_error", code=code, status=status)
