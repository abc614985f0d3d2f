"""From what calls bring back to the rows of the final file.

A row that a model cannot take (an empty prompt, more tokens than it reads) has the reason in its column `error` and no
output. Such a row is not kept in the log of results but in a log of the attempt, so that a run that goes on tries it
again. Both logs hold their records on disk, and the final file is written as the data file is read once more for each
combination: no step holds all rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import msgspec

from stoker.apps.common.data_rows import DataItem
from stoker.apps.inference_sweep.functions import WrittenTexts
from stoker.apps.inference_sweep.plan import PARAMETERS, Combination, Sweep
from stoker.errors import StokerError
from stoker.run_folder import Record

KEY = ("combination", "id")
"""What identifies a result: the combination's digest and the row's id."""

COLUMNS: dict[str, type] = {
    "model": str, "prompt": str, **{name: kind for name, (kind, _, _) in PARAMETERS.items()}, "id": str, "input": str,
    "output": str, "infer_s": float, "started_at": float, "worker": str, "error": str,
}  # fmt: skip
"""The columns of the final file."""


class Records(Protocol):
    """Records by their keys: a log of them, or a dict."""

    def get(self, key: tuple[Any, ...], /) -> Record | None:
        """The record of this key, if it is there."""


class SweepCall(msgspec.Struct, frozen=True):
    """One call to be made."""

    combination: Combination
    items: tuple[DataItem, ...]


class OpenSweepCall(msgspec.Struct, frozen=True):
    """What is kept of a call until it comes back: its combination, and the ids of its rows."""

    combination: Combination
    ids: tuple[str, ...]


def make_records(call: OpenSweepCall, written: WrittenTexts) -> tuple[list[Record], list[Record]]:
    """The records of one call for the log, and those of the rows that the model could not take.

    Raises StokerError when the call brought back another number of texts.
    """
    if not len(written.texts) == len(written.errors) == len(call.ids):
        raise StokerError(f"{call.combination.name}: {len(call.ids)} rows went out and {len(written.texts)} came back")
    records: list[Record] = []
    failed: list[Record] = []
    for id, text, error in zip(call.ids, written.texts, written.errors, strict=True):
        record = {
            "combination": call.combination.digest,
            "id": id,
            "output": None if error else text,
            "infer_s": round(written.infer_s / len(call.ids), 6),
            "started_at": round(written.started_at, 3),
            "worker": written.worker,
        }
        if error:
            failed.append({**record, "error": error})
        else:
            records.append(record)
    return records, failed


def make_rows(sweep: Sweep, combined: Sequence[Combination], log: Records, failed: Records) -> Iterator[dict[str, Any]]:
    """The final rows, combination by combination in the order of the data. Each is in the log or among the failed."""
    for combination in combined:
        digest = combination.digest
        for item in sweep.rows:
            record = log.get((digest, item.id)) or failed.get((digest, item.id))
            if record is None:
                raise StokerError(f"there is no result for row {item.id} with {combination.name}; run again")
            yield {
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


def first_error(sweep: Sweep, combined: Sequence[Combination], failed: Records) -> str:
    """The first row that failed, with its file, place, model, prompt and reason; empty if none did."""
    for combination in combined:
        digest = combination.digest
        for item in sweep.rows:
            record = failed.get((digest, item.id))
            if record is not None:
                return f"{sweep.rows.path}: {item.place}: row {item.id} with {combination.name}: {record['error']}"
    return ""
