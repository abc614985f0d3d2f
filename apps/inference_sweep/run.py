"""Run one sweep, from the sweep file to the results.

The calls of all models are submitted together. The manager decides when to load each model.

The data file may be larger than memory: only keys and positions of records are in memory. If a model refuses a row, the
column `error` contains the reason. A refused row is only in the log of the attempt, so a resumed run retries the row.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from stoker import causal_lm
from stoker.apps.common.calls import run_calls, split_into_batches
from stoker.apps.common.command_line import columns, command, count, resolve
from stoker.apps.common.data_rows import DataItem
from stoker.apps.common.models_file import model_digest_or_name
from stoker.apps.common.runner import Attempt, OpenRun, Outcome, Records, RunSpec, execute, resume_command
from stoker.apps.inference_sweep import APP
from stoker.apps.inference_sweep.functions import Request, WrittenTexts, generate
from stoker.apps.inference_sweep.plan import (
    EXAMPLE,
    PARAMETERS,
    Combination,
    Sweep,
    SweepModel,
    SweepOptions,
    combinations,
    read_sweep,
)
from stoker.console import Screen
from stoker.contexts import Recipe
from stoker.datafile import write_rows
from stoker.errors import StokerError
from stoker.run_folder import Record
from stoker.units import show_seconds

KEY = ("combination", "id")
"""Fields that identify a result: the digest of the combination and the id of the row."""

COLUMNS: dict[str, type] = {
    "model": str, "prompt": str, **{name: kind for name, (kind, _, _) in PARAMETERS.items()}, "id": str, "input": str,
    "output": str, "infer_s": float, "started_at": float, "worker": str, "error": str,
}  # fmt: skip


class SweepCall(msgspec.Struct, frozen=True):
    combination: Combination
    items: tuple[DataItem, ...]


class OpenSweepCall(msgspec.Struct, frozen=True):
    combination: Combination
    ids: tuple[str, ...]


def make_records(call: OpenSweepCall, written: WrittenTexts) -> tuple[list[Record], list[Record]]:
    """Return the records of the rows that have texts, and the records of the failed rows. Raises StokerError for a
    wrong number of texts.
    """
    if not len(written.texts) == len(written.errors) == len(call.ids):
        raise StokerError(
            f"{call.combination.name}: a call of {len(call.ids)} rows returned {len(written.texts)} texts"
        )
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
    """Yield the rows of the results file, sorted by combination, then by input row. Each has a record in a log."""
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
    for combination in combined:
        digest = combination.digest
        for item in sweep.rows:
            record = failed.get((digest, item.id))
            if record is not None:
                return f"{sweep.rows.path}: {item.place}: row {item.id} with {combination.name}: {record['error']}"
    return ""


MOST_ROWS_AHEAD = 16_000
"""Maximum number of rows of one model that are in flight, or whose results are not stored yet."""
LEAST_CALLS_AHEAD, MOST_CALLS_AHEAD = 256, 2_000
"""Minimum and maximum number of one model's calls in flight. With fewer calls, devices would be idle."""


def run(
    given: dict[str, Any], *, resume: Path | None, out: Path | None, fresh: bool, screen: Screen, json: bool
) -> int:
    """Run the sweep. Return the exit status: 0, 1 if rows have errors, 130 after Ctrl-C.

    Raises StokerError for unusable input and for a failed call. Earlier results are kept in all cases.
    """
    options = resolve(SweepOptions, given, app=APP, resume=resume, files=("sweep", "data"))
    file = Path(options.sweep) if options.sweep else EXAMPLE
    sweep = read_sweep(file, data=Path(options.data) if options.data else None, limit=options.limit)
    combined = combinations(sweep)
    total = len(combined) * len(sweep.rows)
    recipes = {model.name: _recipe(model) for model in sweep.models}
    spec = RunSpec(
        app=APP, prefix="sweep", options=options, key=KEY, total=total, folder=resume or out, fresh=fresh,
        site=options.site,
        parameters={
            "combinations": {one.name: one.digest for one in combined},
            "models": {name: model_digest_or_name(recipe) for name, recipe in recipes.items()},
            "rows": sweep.rows.digest,
            "tensor_batch": options.tensor_batch,
        },
        headline=[_headline(sweep, name=file.name, total=total), *(f"  note  {note}" for note in sweep.rows.notes)],
    )  # fmt: skip
    return execute(spec, lambda work: _results(work, options, sweep, combined, recipes), screen=screen, json=json)


def _headline(sweep: Sweep, *, name: str, total: int) -> str:
    models, prompts = count(len(sweep.models), "model"), count(len(sweep.prompts), "prompt")
    sets, rows = count(len(sweep.parameters), "parameter set"), count(len(sweep.rows), "row")
    return f"inference sweep · {name} · {models} x {prompts} x {sets} x {rows} = {total:,} inferences"


def _results(
    work: OpenRun, options: SweepOptions, sweep: Sweep, combined: Sequence[Combination], recipes: Mapping[str, Recipe]
) -> Outcome:
    _infer(work, options, sweep, combined, recipes)
    total, log, failed = work.spec.total, work.log, work.failed
    errors, first = len(failed), first_error(sweep, combined, failed) if len(failed) else ""
    summary = {"inferences": total, "errors": errors, "models": len(recipes), "attempt": _figures(work.attempt)}
    work.folder.write_json("summary.json", summary)
    results = work.folder.finish(
        name=f"results.{options.format}",
        write=lambda path: write_rows(
            make_rows(sweep, combined, log, failed), path, kind=options.format, columns=COLUMNS
        ),
        complete=not errors,
    )
    report = ["", *_report(work.attempt), f"  results  {results}"]
    if not errors and not options.sweep:
        report += ["", *columns([(command(APP, "--sweep FILE"), f"your sweep; start from a copy of {EXAMPLE}")])]
    failure = [
        "",
        f"failed: {errors} of {total} results have no output; the column `error` says why. The first:",
        f"  {first}",
        f"  try them again:  {resume_command(work.spec, work.folder.path)}",
    ]
    return Outcome(
        summary=summary, files={"results": results}, report=report, errors=errors, failure=failure if errors else ()
    )


def _infer(
    work: OpenRun, options: SweepOptions, sweep: Sweep, combined: Sequence[Combination], recipes: Mapping[str, Recipe]
) -> None:
    sent = SweepRequests(tensor_batch=options.tensor_batch)
    jobs = []
    for name, recipe in recipes.items():
        mine = [one for one in combined if one.model.name == name]
        requests = sent.of(plan_calls(mine, sweep.rows, work.log, batch_size=options.batch_size))
        first = next(requests, None)
        if first is not None:  # do not load a model with complete results
            jobs.append((generate.with_options(context=recipe), itertools.chain([first], requests)))

    def take(written: WrittenTexts) -> int:
        records, unmade = make_records(sent.take(written.number), written)
        work.attempt.infer_s += written.infer_s
        return work.log.append(records) + work.failed.append(unmade)

    window = max_calls_in_flight(options.batch_size)
    work.infer(
        jobs, contexts=recipes, take=take, noun="inferences", results=functools.partial(run_calls, window=window)
    )  # fmt: skip


def _figures(attempt: Attempt) -> dict[str, Any]:
    if not attempt.calls:
        return {"inferences": 0, "kept": attempt.kept}
    return {"inferences": attempt.made, "calls": attempt.calls, **attempt.figures}


def _report(attempt: Attempt) -> Iterator[str]:
    if not attempt.calls:
        yield f"  nothing was left to infer: {attempt.kept} results were kept"
        return
    facts, by_model = attempt.facts, attempt.by_context
    # Calls of models on one device overlap, so the sum of their times is not device time.
    beside = " (models that share a device work at the same time)" if len(by_model) > 1 else ""
    yield (
        f"  {count(attempt.made, 'inference')} in {show_seconds(attempt.wall_s)}, {attempt.rate:.1f}/s on"
        f" {count(facts.devices, 'device')}: calls took {show_seconds(attempt.infer_s)} in all, loads"
        f" {show_seconds(facts.load_total_s)}{beside}"
    )
    for name, one in by_model.items():
        loads = f"{one.loads} loads of {show_seconds(one.load_s)}"
        yield f"    {name}: {one.calls} calls, {loads}, {one.found_hot} found it hot"


def plan_calls(
    combined: Iterable[Combination], rows: Iterable[DataItem], log: Container[tuple[str, str]], *, batch_size: int
) -> Iterator[SweepCall]:
    """Yield the calls whose results are missing, by combination. The rows are read again for each combination."""
    for combination in combined:
        for batch in split_into_batches(_missing(rows, log, digest=combination.digest), batch_size):
            yield SweepCall(combination=combination, items=batch)


def _missing(rows: Iterable[DataItem], log: Container[tuple[str, str]], *, digest: str) -> Iterator[DataItem]:
    return (item for item in rows if (digest, item.id) not in log)


class SweepRequests:
    """Makes the request of a call when the call is sent, and keeps the row ids until the call returns.

    Several threads may iterate over the requests. Only one thread may call `take`.
    """

    def __init__(self, *, tensor_batch: int) -> None:
        self._tensor_batch = tensor_batch
        self._numbers = itertools.count()
        self._sent: dict[int, OpenSweepCall] = {}

    def __len__(self) -> int:
        return len(self._sent)

    def of(self, calls: Iterable[SweepCall]) -> Iterator[Request]:
        for call in calls:
            number = next(self._numbers)
            self._sent[number] = OpenSweepCall(call.combination, tuple(item.id for item in call.items))
            yield _request(number, call, tensor_batch=self._tensor_batch)

    def take(self, number: int) -> OpenSweepCall:
        return self._sent.pop(number)


def max_calls_in_flight(batch_size: int) -> int:
    return max(LEAST_CALLS_AHEAD, min(MOST_CALLS_AHEAD, MOST_ROWS_AHEAD // batch_size))


def _recipe(model: SweepModel) -> Recipe:
    return causal_lm(model.path, dtype=model.dtype, engine=model.engine, devices=model.devices)


def _request(number: int, call: SweepCall, *, tensor_batch: int) -> Request:
    parameters = call.combination.parameters
    return Request(
        number=number,
        texts=tuple(call.combination.prompt.fill(item.fields) for item in call.items),
        seeds=tuple(zlib.crc32(item.id.encode()) for item in call.items),
        max_new_tokens=parameters["max_new_tokens"],
        temperature=parameters["temperature"],
        chat=call.combination.prompt.chat,
        tensor_batch=tensor_batch,
    )
