"""Log lines for failed requests: the full cause with the request's id. Clients get a short message."""

from __future__ import annotations

import logging

from starlette.requests import Request

from stoker.apps.common.openai.request import RequestRefused
from stoker.apps.gateway.failures import TryLater, refusal_of
from stoker.errors import StokerError

log = logging.getLogger("stoker.gateway")
_OWN_FAULT = 500


def log_failure(error: BaseException, request: Request) -> None:
    """Log why a request failed, unless the answer has the whole cause. Unexpected errors are logged with a
    traceback."""
    if isinstance(error, RequestRefused) and not (isinstance(error, TryLater) and error.why):
        return
    why = error.why if isinstance(error, TryLater) else str(error) or type(error).__name__
    foreseen = isinstance(error, StokerError | OSError | TryLater)
    id = request.scope.get("state", {}).get("request_id", "")
    status = refusal_of(error).error.status
    log.warning("%s %s: %d: %s", id, request.url.path, status, why, exc_info=None if foreseen else error)
