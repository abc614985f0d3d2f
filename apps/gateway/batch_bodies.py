"""What the body of a request for a batch asks, checked field by field."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from stoker.apps.common.openai.request import Endpoint, RequestRefused
from stoker.decoding import why_not_json

_FIELDS = ("endpoint", "input_file_id", "completion_window", "metadata")
_UNSUPPORTED = {"output_expires_after": "files are removed after 30 days"}
_WINDOW = re.compile(r"([0-9]{1,3})([hd])")
_LONGEST_WINDOW_S = 30 * 86_400
_MOST_PAIRS, _LONGEST_KEY, _LONGEST_VALUE = 16, 64, 512


class AskedBatch(msgspec.Struct, frozen=True):
    """A batch that is asked for. `metadata` comes back with it and means nothing here. It expires after `window_s`
    seconds."""

    endpoint: str
    input_file_id: str
    metadata: dict[str, str] | None = None
    completion_window: str = "24h"
    window_s: int = 86_400


def read_batch(data: bytes) -> AskedBatch:
    """What a body asks. Raises RequestRefused, which names the field."""
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestRefused(f"the body is not JSON: {why_not_json(data, error)}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise RequestRefused("the body must be a JSON object", code="invalid_json")
    for name, value in body.items():
        if name in _UNSUPPORTED and value is not None:
            raise _refused(name, f"is not supported here: {_UNSUPPORTED[name]}", "unsupported_parameter")
        if name not in _FIELDS and name not in _UNSUPPORTED:
            raise _refused(f"{name:.80}", "is no field that a batch is known to have", "unknown_parameter")
    endpoint, file = body.get("endpoint"), body.get("input_file_id")
    known = [each.value for each in Endpoint]
    if endpoint not in known:
        raise _refused("endpoint", f"must be one of {', '.join(known)}", "invalid_value")
    window, window_s = _window(body.get("completion_window"))
    if file is None:
        raise _refused("input_file_id", "is missing", "missing_required_parameter")
    if not isinstance(file, str):
        raise _refused("input_file_id", "must be a text", "invalid_type")
    return AskedBatch(endpoint, file, _metadata(body.get("metadata")), window, window_s)


def _window(value: Any) -> tuple[str, int]:
    """A window (`24h`, `7d`) and its seconds."""
    found = _WINDOW.fullmatch(value) if isinstance(value, str) else None
    seconds = int(found[1]) * (3600 if found[2] == "h" else 86_400) if found else 0
    if not 0 < seconds <= _LONGEST_WINDOW_S:
        raise _refused("completion_window", "must be 24h, or other hours or days up to 30d", "invalid_value")
    return str(value), seconds


def _metadata(value: Any) -> dict[str, str] | None:
    if value is None:
        return None
    texts = isinstance(value, dict) and all(isinstance(each, str) for each in value.values())
    if not texts:
        raise _refused("metadata", "must be an object whose values are texts", "invalid_type")
    if len(value) > _MOST_PAIRS or any(
        len(key) > _LONGEST_KEY or len(each) > _LONGEST_VALUE for key, each in value.items()
    ):
        problem = f"may have {_MOST_PAIRS} pairs, keys of {_LONGEST_KEY} and values of {_LONGEST_VALUE} characters"
        raise _refused("metadata", problem, "invalid_value")
    found: dict[str, str] = value
    return found


def _refused(param: str, problem: str, code: str) -> RequestRefused:
    return RequestRefused(f"{param} {problem}", param=param, code=code)
