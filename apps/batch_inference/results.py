"""Write the two output files of a batch (responses and errors) in the format of OpenAI's Batch API.

The log of a run has a record for each request that a model answered or refused. A resumed run retries failed calls.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from stoker.apps.batch_inference.functions import BatchAnswer
from stoker.apps.batch_inference.request_file import CheckedFile
from stoker.apps.common.batch_state import OK, write_lines
from stoker.apps.common.openai_answers import build_answer_body, build_embedding_body
from stoker.apps.common.openai_requests import ApiError
from stoker.apps.common.runner import find_result
from stoker.errors import StokerError
from stoker.run_folder import Record, RecordLog


def make_answer_line(answer: BatchAnswer, *, digest: str) -> dict[str, Any]:
    """Return the output line of a request. `digest`: digest of the request file."""
    key = f"{digest} {answer.line}"
    if answer.error is not None:
        return make_error_line(answer.custom_id, answer.error, key=key)
    name, created = _make_request_id(key), int(answer.ended_at)
    if answer.vectors is not None:
        body = build_embedding_body(answer.vectors, model=answer.model, packed=answer.packed)
    else:
        body = build_answer_body(answer.endpoint, answer.choices, name=name, model=answer.model, created=created)
    return _make_output_line(answer.custom_id, name=name, status=200, body=body)


def make_error_line(custom_id: str | None, error: ApiError, *, key: str) -> dict[str, Any]:
    return _make_output_line(custom_id, name=_make_request_id(key), status=error.status, body=error.body)


def _make_output_line(custom_id: str | None, *, name: str, status: int, body: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": f"batch_req_{name}",
        "custom_id": custom_id,
        "response": {"status_code": status, "request_id": f"req_{name}", "body": body},
        "error": None,
    }


def _make_request_id(key: str) -> str:
    """Return an id for a request. A second run of the same file gives each request the same id."""
    return hashlib.sha256(key.encode()).hexdigest()[:24]


KEY = ("custom_id",)
Failures = dict[str, ApiError]
"""Errors of failed calls by `custom_id`."""


class BatchTotals(msgspec.Struct):
    """Totals of a batch. `refused`: ids of the requests that models refused."""

    answered: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    refused: set[str] = msgspec.field(default_factory=set)


def make_log_record(answer: BatchAnswer, *, digest: str) -> Record:
    line = make_answer_line(answer, digest=digest)
    return {"custom_id": answer.custom_id, "infer_s": round(answer.infer_s, 6), "line": line}


def make_call_failed_error(error: Exception, *, line: int) -> ApiError:
    said = (str(error) or type(error).__name__).partition("\n")[0]
    text = said if isinstance(error, StokerError) else f"{type(error).__name__}: {said}"
    return ApiError(f"line {line}: {text}", type="server_error", code="call_failed", status=500)


def count_totals(log: RecordLog) -> BatchTotals:
    totals = BatchTotals()
    for record in log:
        response = record["line"]["response"]
        if response["status_code"] != OK:
            totals.refused.add(record["custom_id"])
            continue
        totals.answered += 1
        totals.prompt_tokens += response["body"]["usage"]["prompt_tokens"]
        totals.completion_tokens += response["body"]["usage"].get("completion_tokens", 0)
    return totals


def write_responses(path: Path, checked: CheckedFile, log: RecordLog, totals: BatchTotals) -> None:
    answered = (one for one in checked.custom_ids if (one,) in log and one not in totals.refused)
    write_lines(path, (_read_output_line(log, custom_id) for custom_id in answered))


def make_error_lines(
    checked: CheckedFile, log: RecordLog, totals: BatchTotals, failed: Failures
) -> list[dict[str, Any]]:
    """Return the output lines of requests without an answer, in the order of the request file."""
    lines = {
        one.line: make_error_line(one.custom_id, one.error, key=f"{checked.digest} {one.line}")
        for one in checked.refused
    }
    for custom_id in totals.refused:
        lines[checked.custom_ids[custom_id]] = _read_output_line(log, custom_id)
    for custom_id, error in failed.items():
        line = checked.custom_ids[custom_id]
        lines[line] = make_error_line(custom_id, error, key=f"{checked.digest} {line}")
    return [lines[line] for line in sorted(lines)]


def _read_output_line(log: RecordLog, custom_id: str) -> dict[str, Any]:
    line: dict[str, Any] = find_result((custom_id,), log, what=custom_id)["line"]
    return line
