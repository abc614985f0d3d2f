"""Run one sweep. The calls of all models are submitted together; the manager decides when to load each model.

The data file may be larger than memory. If a model refuses a row, the column `error` contains the reason, and a resumed
run retries the row.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from stoker import causal_lm
from stoker.apps.common.calls import run_calls, split_into_batches
from stoker.apps.common.command_line import RunChoice, align_next_steps, format_command, format_count, resolve_options
from stoker.apps.common.data_rows import DataItem
from stoker.apps.common.models_file import model_digest_or_name
from stoker.apps.common.runner import (
    ApplicationOutcome,
    OpenRun,
    Records,
    RunAttempt,
    RunSpec,
    execute_run,
    find_result,
)
from stoker.apps.inference_sweep import APP
from stoker.apps.inference_sweep.functions import SweepRequest, WrittenTexts, generate
from stoker.apps.inference_sweep.plan import EXAMPLE, Combination, Sweep, SweepModel, SweepOptions, read_sweep
from stoker.contexts import Recipe
from stoker.datafile import write_rows
from stoker.run_folder import Record
from stoker.units import show_seconds

KEY = ("combination", "id")
"""Fields that identify a result: the digest of the combination and the id of the row."""

COLUMNS: dict[str, type] = {
    "model": str, "prompt": str, "max_new_tokens": int, "temperature": float, "id": str, "input": str, "output": str,
    "infer_s": float, "started_at": float, "worker": str, "error": str,
}  # fmt: skip

SentRows = dict[int, tuple[Combination, tuple[str, ...]]]
"""The combination and the row ids of each call in flight, by the call's number."""


def make_log_records(
    combination: Combination, ids: tuple[str, ...], written: WrittenTexts
) -> tuple[list[Record], list[Record]]:
    """Return the records of the rows that have texts, and the records of the failed rows."""
    records: list[Record] = []
    failed: list[Record] = []
    for id, text, error in zip(ids, written.texts, written.errors, strict=True):
        record = {
            "combination": combination.digest, "id": id, "output": None if error else text,
            "infer_s": round(written.infer_s / len(ids), 6), "started_at": round(written.started_at, 3),
            "worker": written.worker,
        }  # fmt: skip
        if error:
            failed.append({**record, "error": error})
        else:
            records.append(record)
    return records, failed


def make_result_rows(sweep: Sweep, log: Records, failed: Records) -> Iterator[dict[str, Any]]:
    """Yield the rows of the results file: for each combination, one row per input row."""
    for combination in sweep.combinations:
        digest, name = combination.digest, combination.name
        for item in sweep.rows:
            record = find_result((digest, item.id), log, failed, what=f"row {item.id} with {name}")
            given = ("output", "infer_s", "started_at", "worker")
            yield {
                "model": combination.model.name, "prompt": combination.prompt.name, **combination.parameters,
                "id": item.id, "input": combination.prompt.fill(item.fields),
                **{field: record[field] for field in given}, "error": record.get("error", ""),
            }  # fmt: skip


def format_first_error(sweep: Sweep, failed: Records) -> str:
    for combination in sweep.combinations if len(failed) else ():
        digest = combination.digest
        for item in sweep.rows:
            if (record := failed.get((digest, item.id))) is not None:
                return f"{sweep.rows.path}: {item.place}: row {item.id} with {combination.name}: {record['error']}"
    return ""


MOST_ROWS_AHEAD = 16_000
"""Maximum number of one model's rows in flight, if a call has up to 62 rows (`MOST_ROWS_AHEAD` / `LEAST_CALLS_AHEAD`).
With larger calls, `LEAST_CALLS_AHEAD` calls are in flight. Results that wait to be stored do not count."""
LEAST_CALLS_AHEAD, MOST_CALLS_AHEAD = 256, 2_000
"""Minimum and maximum number of one model's calls in flight. With fewer calls, devices would be idle."""


def run_sweep(given_options: dict[str, Any], choice: RunChoice) -> int:
    """Run a sweep. Return the exit status: 0, 1 if rows have errors, 130 after Ctrl-C. Raises StokerError."""
    options = resolve_options(SweepOptions, given_options, app=APP, resume=choice.resume, files=("sweep", "data"))
    file = Path(options.sweep) if options.sweep else EXAMPLE
    sweep = read_sweep(file, data=Path(options.data) if options.data else None, limit=options.limit)
    total = len(sweep.combinations) * len(sweep.rows)
    recipes = {model.name: _make_recipe(model) for model in sweep.models}
    models, prompts = len(sweep.models), len(sweep.prompts)
    numbers = (models, prompts, len(sweep.combinations) // (models * prompts), len(sweep.rows))
    sizes = " x ".join(map(format_count, numbers, ("model", "prompt", "parameter set", "row")))
    spec = RunSpec(
        app=APP, prefix="sweep", options=options, key=KEY, total=total, site=options.site,
        parameters={
            "combinations": {one.name: one.digest for one in sweep.combinations},
            "models": {name: model_digest_or_name(recipe) for name, recipe in recipes.items()},
            "rows": sweep.rows.digest,
            "tensor_batch": options.tensor_batch,
        },
        headline=[
            f"inference sweep · {file.name} · {sizes} = {total:,} inferences",
            *(f"  note  {note}" for note in sweep.rows.notes),
        ],
    )  # fmt: skip
    return execute_run(spec, lambda work: _write_results(work, options, sweep, recipes), choice)


def _write_results(
    work: OpenRun, options: SweepOptions, sweep: Sweep, recipes: Mapping[str, Recipe]
) -> ApplicationOutcome:
    _run_missing_calls(work, options, sweep, recipes)
    attempt, log, failed = work.attempt, work.log, work.failed

    def write_file(path: Path) -> None:
        write_rows(make_result_rows(sweep, log, failed), path, kind=options.format, columns=COLUMNS)

    found = work.write_row_results(
        f"results.{options.format}", write_file, noun="inference", lacks="output", more={"models": len(recipes)},
        first=format_first_error(sweep, failed), figures={"inferences": attempt.made, "calls": attempt.calls},
        report=_format_report(attempt),
    )  # fmt: skip
    if found.errors or options.sweep:
        return found
    more = align_next_steps([(format_command(APP, "--sweep FILE"), f"your sweep; start from a copy of {EXAMPLE}")])
    return msgspec.structs.replace(found, report=[*found.report, "", *more])


def _run_missing_calls(work: OpenRun, options: SweepOptions, sweep: Sweep, recipes: Mapping[str, Recipe]) -> None:
    sent, numbers, jobs = SentRows(), itertools.count(), []
    for name, recipe in recipes.items():
        mine = [one for one in sweep.combinations if one.model.name == name]
        calls = plan_calls(mine, sweep.rows, work.log, batch_size=options.batch_size)
        requests = make_requests(calls, numbers, sent, tensor_batch=options.tensor_batch)
        first = next(requests, None)
        if first is not None:  # do not load a model whose results are complete
            jobs.append((generate.with_options(context=recipe), itertools.chain([first], requests)))

    def store_texts(written: WrittenTexts) -> int:
        records, unmade = make_log_records(*sent.pop(written.number), written)
        work.attempt.infer_s += written.infer_s
        return work.log.append(records) + work.failed.append(unmade)

    window = max_calls_in_flight(options.batch_size)
    work.run_jobs(
        jobs, contexts=recipes, take=store_texts, noun="inferences", results=functools.partial(run_calls, window=window)
    )  # fmt: skip


def _format_report(attempt: RunAttempt) -> Iterator[str]:
    if not attempt.calls:
        yield f"  nothing was left to infer: {attempt.kept} results were kept"
        return
    facts, by_model = attempt.facts, attempt.by_context
    # Calls of models on one device overlap, so the sum of their times is not device time.
    beside = " (models that share a device work at the same time)" if len(by_model) > 1 else ""
    yield (
        f"  {format_count(attempt.made, 'inference')} in {show_seconds(attempt.wall_s)},"
        f" {attempt.results_per_second:.1f}/s on {format_count(facts.devices, 'device')}:"
        f" calls took {show_seconds(attempt.infer_s)} in all, loads {show_seconds(facts.load_total_s)}{beside}"
    )
    for name, one in by_model.items():
        loads = f"{one.loads} loads of {show_seconds(one.load_s)}"
        yield f"    {name}: {one.calls} calls, {loads}, {one.found_hot} found it hot"


def plan_calls(
    combined: Iterable[Combination], rows: Iterable[DataItem], log: Container[tuple[str, str]], *, batch_size: int
) -> Iterator[tuple[Combination, tuple[DataItem, ...]]]:
    """Yield the combination and the rows of each missing call."""
    for combination in combined:
        digest = combination.digest
        missing = (item for item in rows if (digest, item.id) not in log)
        for batch in split_into_batches(missing, batch_size):
            yield combination, batch


def make_requests(
    calls: Iterable[tuple[Combination, tuple[DataItem, ...]]], numbers: Iterator[int], sent: SentRows, *,
    tensor_batch: int,
) -> Iterator[SweepRequest]:  # fmt: skip
    """Yield the request of each call, and record its row ids in `sent`. `numbers`: shared source of unique numbers."""
    for combination, items in calls:
        number = next(numbers)
        sent[number] = combination, tuple(item.id for item in items)
        yield SweepRequest(
            number=number, texts=tuple(combination.prompt.fill(item.fields) for item in items),
            seeds=tuple(zlib.crc32(item.id.encode()) for item in items), chat=combination.prompt.chat,
            tensor_batch=tensor_batch, **combination.parameters,
        )  # fmt: skip


def max_calls_in_flight(batch_size: int) -> int:
    return max(LEAST_CALLS_AHEAD, min(MOST_CALLS_AHEAD, MOST_ROWS_AHEAD // batch_size))


def _make_recipe(model: SweepModel) -> Recipe:
    return causal_lm(model.path, dtype=model.dtype, engine=model.engine, devices=model.devices)
