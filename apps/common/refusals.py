"""Errors of requests in OpenAI's format, and checks of JSON values that raise such errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


class ApiError(msgspec.Struct, frozen=True):
    """An OpenAI error. `param`: path of the invalid field; `retry_after_s`: seconds before a retry, 0 if not stated."""

    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    status: int = 400
    retry_after_s: float = 0.0

    @property
    def body(self) -> dict[str, dict[str, str | None]]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class RequestRefused(Exception):
    """The refusal of a request. `retry_after_s`: as in `ApiError`; `why`: the cause, only for the log."""

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400,
        type: str = "invalid_request_error", retry_after_s: float = 0.0, why: str = "",
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.error = ApiError(message, type, param, code, status, retry_after_s)
        self.why = why


def field_error(param: str, problem: str, code: str) -> RequestRefused:
    return RequestRefused(f"{param} {problem}", param=param, code=code)


_WORDS = {str: "a text", bool: "true or false", list: "a list", dict: "an object"}


def check_type(value: Any, kind: type[T], where: str, what: str = "") -> T:
    """Return `value` if its type is `kind`, else raise RequestRefused. `what`: the expected value in words."""
    if not isinstance(value, kind):
        raise field_error(where, f"must be {what or _WORDS[kind]}, and is {format_value(value)}", "invalid_type")
    return value


def check_whole_number(value: Any, where: str, *, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        shape = "a whole number of 64 bits" if least < 0 else f"a whole number from {least} to {most}"
        raise field_error(where, f"must be {shape}, and is {format_value(value)}", "invalid_value")
    return value


def check_texts(value: Any, where: str, *, most: int = 0, or_ids: str = "") -> list[str]:
    """Return one or more texts as a list. `most`: maximum number, 0 = unlimited; `or_ids`: appended to an error."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts:
        raise field_error(
            where, f"must be a text or a list of texts{or_ids}, and is {format_value(value)}", "invalid_type"
        )
    if most and len(texts) > most:
        raise field_error(
            where, f"has {len(texts):,} texts; at most {most:,} are allowed in a request", "invalid_value"
        )
    for number, text in enumerate(texts):
        at = where if isinstance(value, str) else f"{where}[{number}]"
        if not isinstance(text, str):
            tokens = "; token ids are not supported: give the text" if isinstance(text, int | list) else ""
            raise field_error(at, f"must be a text, and is {format_value(text)}{tokens}", "invalid_type")
        if not text:
            raise field_error(at, "is empty", "invalid_value")
    return texts


def require_field(body: Mapping[str, Any], name: str) -> Any:
    if body.get(name) is None:
        raise field_error(name, "is missing", "missing_required_parameter")
    return body[name]


def are_equal_json_values(value: Any, other: Any) -> bool:
    """True if two JSON values are equal. In contrast to Python, true does not equal 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def encode_json_text(value: Any) -> str:
    return str(msgspec.json.encode(value), "utf-8")


def format_value(value: Any) -> str:
    text = encode_json_text(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
