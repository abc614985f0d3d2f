"""The output files of a batch that was cancelled, expired or failed: they keep the answers so far."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

_OK = 200
_ANSWERED = b'"response":{"status_code":200'
"""In the log's lines: no text of JSON holds these quotes."""


class KeptAnswers(msgspec.Struct, frozen=True):
    """Counts of answered and of refused requests."""

    completed: int = 0
    failed: int = 0


def keep_answers(log: Path, requests: Path, *, responses: Path, errors: Path, code: str, message: str) -> KeptAnswers:
    """Write the two output files of a batch. `log` is the log of its `stoker batch`, `requests` its input file. Each
    request without an answer gets a line in `errors` with this code and message. Raises OSError."""
    seen: set[str] = set()
    completed = 0
    with responses.open("wb") as answered, errors.open("wb") as others:
        for record in _objects(log):
            line, custom_id = record.get("line"), record.get("custom_id")
            if not isinstance(line, dict) or not isinstance(custom_id, str) or custom_id in seen:
                continue
            seen.add(custom_id)
            is_answer = line["response"]["status_code"] == _OK
            completed += is_answer
            (answered if is_answer else others).write(_line(line))
        failed = len(seen) - completed
        for number, request in enumerate(_objects(requests), 1):
            custom_id = request.get("custom_id")
            if not isinstance(custom_id, str) or custom_id not in seen:
                error = {"code": code, "message": message}
                line = {"id": f"batch_req_{number:024x}", "custom_id": custom_id, "response": None, "error": error}
                others.write(_line(line))
    return KeptAnswers(completed, failed)


def count_answers(log: Path) -> KeptAnswers:
    """Count the answers of a running batch. Raises OSError."""
    lines = completed = 0
    with log.open("rb") as file:
        for line in file:
            lines += line.endswith(b"\n")
            completed += line.endswith(b"\n") and _ANSWERED in line
    return KeptAnswers(completed, lines - completed)


def for_client(errors: Path, out: Path) -> None:
    """Copy a file of errors without the causes of failed calls, which name hosts, folders and calls. Raises OSError."""
    with out.open("wb") as cleaned:
        for line in _objects(errors):
            error = ((line.get("response") or {}).get("body") or {}).get("error") or {}
            if error.get("type") == "server_error":
                error["message"] = error["message"].partition(": ")[0] + ": the call failed; send the request again"
            cleaned.write(_line(line))


def _line(value: Any) -> bytes:
    """A line of JSON in ASCII: some readers end a line at other characters than `\\n`."""
    return json.dumps(value).encode() + b"\n"


def _objects(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file with one object a line. Other lines are skipped; a missing file is empty."""
    with suppress(FileNotFoundError), path.open("rb") as lines:
        for line in lines:
            with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                found = msgspec.json.decode(line)
                if isinstance(found, dict):
                    yield found
