"""Check the lines of a request file before any call runs.

The file is read twice, for the check and for sending, and may be larger than memory. Only the `custom_id` of each valid
line stays in memory.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from stoker.apps.common.openai_requests import ApiError, ApiRequest, Endpoint, Note, RequestRefused, parse_request_body
from stoker.datafile import Line, read_lines
from stoker.decoding import UNREADABLE, why_not_json
from stoker.errors import ConfigError

_FIELDS = ("custom_id", "method", "url", "body")
Admit = Callable[[ApiRequest], None]
"""A function that raises RequestRefused for a request that no model can answer."""


class RefusedLine(msgspec.Struct, frozen=True):
    """A line that cannot be answered. `custom_id` is None if it is missing or an earlier line has it."""

    line: int
    custom_id: str | None
    error: ApiError


class CheckedFile(msgspec.Struct, frozen=True):
    """A checked request file. `custom_ids`: the line number of each valid request by its `custom_id`, in file order."""

    path: Path
    digest: str
    custom_ids: dict[str, int]
    refused: tuple[RefusedLine, ...]
    counts: dict[tuple[Endpoint, str], int]
    ignored: tuple[str, ...] = ()
    """Names of ignored request fields, which do not change an answer."""

    @property
    def line_count(self) -> int:
        return len(self.custom_ids) + len(self.refused)

    @property
    def endpoint_counts(self) -> Counter[Endpoint]:
        found: Counter[Endpoint] = Counter()
        for (endpoint, _), number in self.counts.items():
            found[endpoint] += number
        return found

    @property
    def model_counts(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for (_, model), number in self.counts.items():
            found[model] += number
        return found


def check_file(path: Path, *, admit: Admit, max_tokens: int = 0) -> CheckedFile:
    """Check each line of a request file. Raises ConfigError if the file is unreadable or has no requests."""
    digest = hashlib.sha256()
    custom_ids: dict[str, int] = {}
    refused: list[RefusedLine] = []
    counts: Counter[tuple[Endpoint, str]] = Counter()
    ignored: set[str] = set()
    for line in read_lines(path):
        digest.update(line.data + b"\n")
        found = parse_request_line(line, seen=custom_ids, admit=admit, max_tokens=max_tokens, ignored=ignored.add)
        if isinstance(found, RefusedLine):
            refused.append(found)
            continue
        custom_ids[found.custom_id] = line.number
        counts[found.endpoint, found.model] += 1
    if not custom_ids and not refused:
        raise ConfigError.in_file(path, "has no requests")
    return CheckedFile(
        path, digest.hexdigest()[:16], custom_ids, tuple(refused), dict(counts), ignored=tuple(sorted(ignored))
    )


def read_requests(checked: CheckedFile, *, max_tokens: int = 0) -> Iterator[ApiRequest]:
    """Yield the valid requests. Raises ConfigError if the file has changed since the check."""
    refused = {one.line for one in checked.refused}
    left = iter(checked.custom_ids.items())
    for line in read_lines(checked.path):
        if line.number in refused:
            continue
        found = parse_request_line(line, seen={}, admit=lambda _request: None, max_tokens=max_tokens)
        custom_id, number = next(left, ("", 0))
        if isinstance(found, RefusedLine) or (found.custom_id, line.number) != (custom_id, number):
            what = "has changed since the file was checked; run again, and do not change the file meanwhile"
            raise ConfigError.in_file(checked.path, what, line=line.number)
        yield found


def parse_request_line(
    line: Line, *, seen: dict[str, int], admit: Admit, max_tokens: int = 0, ignored: Note = lambda _field: None
) -> ApiRequest | RefusedLine:
    """Return the request of a line, or why the line is refused. `seen`: earlier line numbers by `custom_id`."""
    custom_id: str | None = None
    try:
        fields = _parse_json_object(line.data)
        custom_id = _read_unique_custom_id(fields, seen)
        endpoint = _read_endpoint(fields)
    except RequestRefused as refused:
        return _make_refused_line(line, custom_id, refused, below="")
    try:
        request = parse_request_body(
            fields["body"], endpoint=endpoint, custom_id=custom_id, line=line.number, max_tokens=max_tokens,
            ignored=ignored,
        )  # fmt: skip
        admit(request)
    except RequestRefused as refused:
        return _make_refused_line(line, custom_id, refused, below="" if refused.error.param == "body" else "body.")
    return request


def _make_refused_line(line: Line, custom_id: str | None, refused: RequestRefused, *, below: str) -> RefusedLine:
    error = msgspec.structs.replace(refused.error, message=f"line {line.number}: {below}{refused.error.message}")
    return RefusedLine(line=line.number, custom_id=custom_id, error=error)


def _parse_json_object(data: bytes) -> dict[str, Any]:
    try:
        fields = msgspec.json.decode(data)
    except UNREADABLE as error:
        raise RequestRefused(f"is not JSON: {why_not_json(data, error)}", code="invalid_json_line") from None
    if not isinstance(fields, dict):
        raise RequestRefused("must be a JSON object", code="invalid_json_line")
    return fields


def _read_unique_custom_id(fields: dict[str, Any], seen: dict[str, int]) -> str:
    found = fields.get("custom_id")
    if not isinstance(found, str) or not found:
        what = "is missing" if found is None else "must be a text that is not empty"
        raise RequestRefused(f"custom_id {what}", param="custom_id", code="missing_required_parameter")
    if found in seen:
        said = f"custom_id {found} was already used on line {seen[found]}"
        raise RequestRefused(said, param="custom_id", code="duplicate_custom_id")
    return found


def _read_endpoint(fields: dict[str, Any]) -> Endpoint:
    for name in _FIELDS:
        if name not in fields:
            raise RequestRefused(f"{name} is missing", param=name, code="missing_required_parameter")
    for name in fields.keys() - _FIELDS:
        said = f"{name} is not a field of a request ({', '.join(_FIELDS)})"
        raise RequestRefused(said, param=name, code="unknown_parameter")
    if fields["method"] != "POST":
        raise RequestRefused("method must be POST", param="method", code="invalid_method")
    try:
        return Endpoint(fields["url"])
    except ValueError:
        there = ", ".join(endpoint.value for endpoint in Endpoint)
        raise RequestRefused(f"url must be one of {there}", param="url", code="invalid_url") from None
