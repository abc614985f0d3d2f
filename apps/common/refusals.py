"""Errors of requests in OpenAI's format, and functions that show JSON values in these errors."""

from __future__ import annotations

from typing import Any

import msgspec


class ApiError(msgspec.Struct, frozen=True):
    """The reason why a request has no answer, as an OpenAI error. `param`: path of the invalid field in the body."""

    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    status: int = 400

    @property
    def body(self) -> dict[str, dict[str, str | None]]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class RequestRefused(Exception):
    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400,
        type: str = "invalid_request_error",
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.error = ApiError(message, type=type, param=param, code=code, status=status)


def refused(param: str, problem: str, code: str) -> RequestRefused:
    return RequestRefused(f"{param} {problem}", param=param, code=code)


def equals(value: Any, other: Any) -> bool:
    """Return True if two JSON values are equal. In contrast to Python, true does not equal 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def encode_json_text(value: Any) -> str:
    return str(msgspec.json.encode(value), "utf-8")


def shown(value: Any) -> str:
    text = encode_json_text(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
