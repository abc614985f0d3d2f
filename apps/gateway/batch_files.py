"""`/v1/files`: input files that clients upload for batches, and output files of batches.

Each stored file has a folder with its content (`data`), and `file.json` with the name, the owner and the size.
"""

from __future__ import annotations

import email.parser
import email.policy
import re
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from stoker.apps.common.batch_state import OK, encode_json_line, read_json, read_json_lines
from stoker.apps.common.openai_requests import Endpoint, RequestRefused, field_error, parse_json_object
from stoker.apps.common.refusals import check_type, require_field

DAY_S = 86_400
KEPT_S = 30 * DAY_S
"""Files and batches are deleted after 30 days, as at OpenAI."""
_ENDS = ("completed", "failed", "expired", "cancelled")
_ID = re.compile(r"file-[0-9a-f]{24}")


class StoredFile(msgspec.Struct, frozen=True):
    """A stored file. `owner`: name of the owner's API key; empty if the gateway has no keys."""

    id: str
    owner: str
    filename: str
    purpose: str
    created_at: int
    bytes: int

    @property
    def body(self) -> dict[str, Any]:
        return {
            "id": self.id, "object": "file", "bytes": self.bytes, "created_at": self.created_at,
            "expires_at": self.created_at + KEPT_S, "filename": self.filename, "purpose": self.purpose,
            "status": "processed",
        }  # fmt: skip


class FileStore:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add_file(self, data: bytes | Path, *, filename: str, purpose: str, owner: str) -> StoredFile:
        id = f"file-{secrets.token_hex(12)}"
        place = self._folder / id
        place.mkdir(mode=0o700, parents=True)
        try:
            if isinstance(data, Path):
                shutil.copyfile(data, place / "data")
            else:
                (place / "data").write_bytes(data)
            size = (place / "data").stat().st_size
            made = StoredFile(id, owner, filename, purpose, int(time.time()), size)
            (place / "file.json").write_bytes(msgspec.json.encode(made))  # written last: marks a complete file
        except OSError:  # usually a full disk
            shutil.rmtree(place, ignore_errors=True)
            raise
        return made

    def get_file(self, id: str, *, owner: str) -> StoredFile:
        """Return a file of this owner. Raises RequestRefused (404)."""
        found = read_json(self._folder / id / "file.json", StoredFile) if _ID.fullmatch(id) else None
        if found is not None and found.owner == owner:
            return found
        raise RequestRefused(f"there is no file {id!r:.80}", param="id", code="file_not_found", status=404)

    def content_path(self, id: str) -> Path:
        return self._folder / id / "data"

    def list_files(self, *, owner: str) -> list[StoredFile]:
        found = []
        for place in self._folder.glob("file-*"):
            try:
                found.append(self.get_file(place.name, owner=owner))
            except RequestRefused:  # a file of another owner, or an incomplete file
                continue
        return sorted(found, key=lambda one: one.created_at, reverse=True)

    def remove_file(self, id: str, *, owner: str) -> None:
        shutil.rmtree(self._folder / self.get_file(id, owner=owner).id)

    def remove_old_files(self, now: float, *, needed: Collection[str]) -> None:
        """Delete old files that are not `needed`, and remains of interrupted uploads."""
        for place in self._folder.glob("file-*"):
            with suppress(OSError):
                if place.name not in needed and place.stat().st_mtime + KEPT_S < now:
                    shutil.rmtree(place)


def parse_file_upload(content_type: str, body: bytes) -> tuple[str, str, bytes]:
    head = b"Content-Type: " + content_type.encode("latin-1") + b"\r\n\r\n"
    form = email.parser.BytesParser(policy=email.policy.HTTP).parsebytes(head + body)
    fields: dict[str, tuple[str, bytes]] = {}
    for part in form.iter_parts() if form.is_multipart() else ():
        name = part.get_param("name", header="content-disposition")
        payload = part.get_payload(decode=True)
        if isinstance(name, str) and isinstance(payload, bytes):
            fields[name] = (part.get_filename() or "", payload)
    for name in ("file", "purpose"):
        if name not in fields:
            raise RequestRefused(f"{name} is missing", param=name, code="missing_required_parameter")
    purpose = fields["purpose"][1].decode(errors="replace")
    if purpose != "batch":
        raise RequestRefused(
            f"purpose is {purpose!r:.60}; only batch is supported", param="purpose", code="invalid_value"
        )
    for name in fields.keys() - {"file", "purpose"}:
        text = f"{name:.80} is not supported here: files are removed after 30 days"
        raise RequestRefused(text, param=name, code="unsupported_parameter")
    filename, data = fields["file"]
    return filename or "file", purpose, data


_SUCCESS_MARK = b'"response":{"status_code":200'
"""Bytes that only log lines of successful answers contain. Texts cannot contain them, because JSON escapes quotes."""


def write_batch_output_files(
    log: Path, requests: Path, *, responses: Path, errors: Path, code: str, message: str
) -> tuple[int, int]:
    """Write the output files of a batch. Unanswered requests get the error `code` and `message`. Return the numbers of
    answers and errors.
    """
    seen: set[str] = set()
    completed = 0
    with responses.open("wb") as answered, errors.open("wb") as others:
        for record in read_json_lines(log, dict):
            line, custom_id = record.get("line"), record.get("custom_id")
            if not isinstance(line, dict) or not isinstance(custom_id, str) or custom_id in seen:
                continue
            seen.add(custom_id)
            is_answer = line["response"]["status_code"] == OK
            completed += is_answer
            (answered if is_answer else others).write(encode_json_line(line))
        failed = len(seen) - completed
        for number, request in enumerate(read_json_lines(requests, dict), 1):
            custom_id = request.get("custom_id")
            if not isinstance(custom_id, str) or custom_id not in seen:
                error = {"code": code, "message": message}
                line = {"id": f"batch_req_{number:024x}", "custom_id": custom_id, "response": None, "error": error}
                others.write(encode_json_line(line))
    return completed, failed


def count_answers(log: Path) -> tuple[int, int]:
    """Return the numbers of answers and of errors in the log of a running batch."""
    with log.open("rb") as file:
        counts = Counter(_SUCCESS_MARK in line for line in file if line.endswith(b"\n"))
    return counts[True], counts[False]


def copy_errors_for_client(errors: Path, out: Path) -> None:
    """Copy a file of errors. Omit the causes of failed calls, because causes name hosts and folders."""
    with out.open("wb") as cleaned:
        for line in read_json_lines(errors, dict):
            error = ((line.get("response") or {}).get("body") or {}).get("error") or {}
            if error.get("type") == "server_error":
                error["message"] = error["message"].partition(": ")[0] + ": the call failed; send the request again"
            cleaned.write(encode_json_line(line))


_BATCH_FIELDS = ("endpoint", "input_file_id", "completion_window", "metadata", "output_expires_after")
_WINDOW = re.compile(r"([0-9]{1,3})([hd])")
_MOST_PAIRS, _LONGEST_KEY, _LONGEST_VALUE = 16, 64, 512


class GatewayBatch(msgspec.Struct):
    """One batch in OpenAI's format. `owner`: name of an API key; `waits`: why a step is retried (not stored)."""

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    created_at: int
    metadata: dict[str, str] | None = None
    status: str = "in_progress"
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    ended_at: int | None = None
    cancelling_at: int | None = None
    problem: str = ""
    waits: str = ""
    completion_window: str = "24h"
    window_s: int = DAY_S

    @property
    def body(self) -> dict[str, Any]:
        code, message = ("batch_failed", self.problem) if self.problem else ("batch_waits", self.waits)
        problem = {"code": code, "message": message, "line": None, "param": None}
        ends = {f"{end}_at": self.ended_at if self.status == end else None for end in _ENDS}
        return {
            "id": self.id, "object": "batch", "endpoint": self.endpoint, "completion_window": self.completion_window,
            "errors": {"object": "list", "data": [problem]} if message else None, "status": self.status,
            "input_file_id": self.input_file_id, "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id, "created_at": self.created_at, "in_progress_at": self.created_at,
            "expires_at": self.created_at + self.window_s, "cancelling_at": self.cancelling_at, **ends,
            "finalizing_at": None, "metadata": self.metadata,
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
        }  # fmt: skip


def parse_batch_request(data: bytes, *, owner: str = "") -> GatewayBatch:
    """Parse a request that creates a batch. Raises RequestRefused."""
    body = parse_json_object(data)
    for name in body.keys() - _BATCH_FIELDS:
        raise field_error(f"{name:.80}", "is not a known field of a batch", "unknown_parameter")
    if body.get("output_expires_after") is not None:
        problem = "is not supported here: files are removed after 30 days"
        raise field_error("output_expires_after", problem, "unsupported_parameter")
    endpoint = body.get("endpoint")
    known = [each.value for each in Endpoint]
    if endpoint not in known:
        raise field_error("endpoint", f"must be one of {', '.join(known)}", "invalid_value")
    window, window_s = _parse_completion_window(body.get("completion_window"))
    file = check_type(require_field(body, "input_file_id"), str, "input_file_id")
    return GatewayBatch(
        f"batch_{secrets.token_hex(12)}", owner, endpoint, file, int(time.time()), _read_metadata(body.get("metadata")),
        completion_window=window, window_s=window_s,
    )  # fmt: skip


def _parse_completion_window(value: Any) -> tuple[str, int]:
    found = _WINDOW.fullmatch(value) if isinstance(value, str) else None
    seconds = int(found[1]) * (3600 if found[2] == "h" else DAY_S) if found else 0
    if not 0 < seconds <= 30 * DAY_S:
        raise field_error(
            "completion_window", "must be a number of hours or days up to 30d, as in 24h", "invalid_value"
        )
    return value, seconds


def _read_metadata(value: Any) -> dict[str, str] | None:
    if value is None:
        return None
    if not isinstance(value, dict) or not all(isinstance(each, str) for each in value.values()):
        raise field_error("metadata", "must be an object whose values are texts", "invalid_type")
    if len(value) > _MOST_PAIRS or any(
        len(key) > _LONGEST_KEY or len(each) > _LONGEST_VALUE for key, each in value.items()
    ):
        most = f"at most {_MOST_PAIRS} pairs, keys of {_LONGEST_KEY} and values of {_LONGEST_VALUE} characters"
        raise field_error("metadata", f"may have {most}", "invalid_value")
    return value
