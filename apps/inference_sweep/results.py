"""From what calls bring back to the rows of the final file.

A row that a model cannot take (an empty prompt, more tokens than it reads) has the reason in its column `error` and no
output. Such a row is not kept in the log of results, so that a run that goes on tries it again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from stoker.apps.inference_sweep.functions import WrittenTexts
from stoker.apps.inference_sweep.plan import Combination, Sweep, SweepItem
from stoker.errors import StokerError
from stoker.run_folder import Record, RecordLog

KEY = ("combination", "id")
"""What identifies a result: the combination's digest and the row's id."""

Failed = dict[tuple[str, str], Record]
"""The records of rows that a model could not take, by key."""


class SweepCall(msgspec.Struct, frozen=True):
    """One call to be made."""

    combination: Combination
    items: tuple[SweepItem, ...]


def make_records(call: SweepCall, written: WrittenTexts) -> tuple[list[Record], Failed]:
    """The records of one call for the log, and those of the rows that the model could not take.

    Raises StokerError when the call brought back another number of texts.
    """
    if not len(written.texts) == len(written.errors) == len(call.items):
        raise StokerError(
            f"{call.combination.name}: {len(call.items)} rows went out and {len(written.texts)} came back"
        )
    records: list[Record] = []
    failed: Failed = {}
    for item, text, error in zip(call.items, written.texts, written.errors, strict=True):
        record = {
            "combination": call.combination.digest,
            "id": item.id,
            "output": None if error else text,
            "infer_s": round(written.infer_s / len(call.items), 6),
            "started_at": round(written.started_at, 3),
            "worker": written.worker,
        }
        if error:
            failed[call.combination.digest, item.id] = {**record, "error": error}
        else:
            records.append(record)
    return records, failed


def make_rows(sweep: Sweep, combined: Sequence[Combination], log: RecordLog, failed: Failed) -> list[dict[str, Any]]:
    """The final rows, combination by combination in the order of the data. Each is in the log or among the failed."""
    rows: list[dict[str, Any]] = []
    for combination in combined:
        for item in sweep.items:
            record = _record_of(combination, item, log, failed)
            rows.append(
                {
                    "model": combination.model.name,
                    "prompt": combination.prompt.name,
                    **combination.parameters,
                    "id": item.id,
                    "input": combination.prompt.fill(item.fields),
                    "output": record["output"],
                    "infer_s": record["infer_s"],
                    "started_at": record["started_at"],
                    "worker": record["worker"],
                    "error": record.get("error", ""),
                }
            )
    return rows


def first_error(sweep: Sweep, combined: Sequence[Combination], failed: Mapping[tuple[str, str], Record]) -> str:
    """The first row that failed, with its file, place, model, prompt and reason; empty if none did."""
    for combination in combined:
        for item in sweep.items:
            record = failed.get((combination.digest, item.id))
            if record is not None:
                return f"{sweep.data}: {item.place}: row {item.id} with {combination.name}: {record['error']}"
    return ""


def _record_of(combination: Combination, item: SweepItem, log: RecordLog, failed: Failed) -> Record:
    key = (combination.digest, item.id)
    record = log.get(key) or failed.get(key)
    if record is None:
        raise StokerError(f"{log.path}: has no result for row {item.id} with {combination.name}; run again")
    return record
