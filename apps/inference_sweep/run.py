"""One sweep, from its file to its results.

Every model is a context of its own. The calls of all models are offered to the session at once, so contexts that fit a
device together are hot on it side by side, and those that don't are loaded one after another: that is the manager's
business, not this program's.

The data file is read as the calls are sent, so it may be larger than memory. What grows with the sweep is what the log
keeps of each result: its key, and its place on the disk.
"""

from __future__ import annotations

import contextlib
import itertools
import shlex
import time
import zlib
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

import stoker
from stoker.apps.common.calls import (
    Stopped,
    columns,
    command,
    count,
    in_batches,
    run_calls,
    say_kept,
    session_line,
    stop_on_signals,
)
from stoker.apps.common.data_rows import DataItem
from stoker.apps.inference_sweep import APP
from stoker.apps.inference_sweep.functions import Request, WrittenTexts, generate, language_model
from stoker.apps.inference_sweep.options import SweepOptions, resolve
from stoker.apps.inference_sweep.plan import (
    EXAMPLE,
    Combination,
    Sweep,
    SweepModel,
    combinations,
    read_sweep,
)
from stoker.apps.inference_sweep.results import (
    COLUMNS,
    KEY,
    OpenSweepCall,
    SweepCall,
    first_error,
    make_records,
    make_rows,
)
from stoker.config import load_site
from stoker.console import Screen
from stoker.contexts import Recipe, model_recipe
from stoker.datafile import write_rows
from stoker.run_folder import RecordLog, open_run, read_options
from stoker.sessions import ContextFacts, facts_of
from stoker.units import show_seconds

INTERRUPTED = 130
MOST_ROWS_AHEAD = 16_000
"""At most this many rows of a model are in flight, and at most as many have results that wait to be kept."""
LEAST_CALLS_AHEAD, MOST_CALLS_AHEAD = 256, 2_000
"""The bounds of the number of calls in flight: with fewer calls devices would be idle."""


def run(
    given: dict[str, Any], *, resume: Path | None, out: Path | None, fresh: bool, screen: Screen, json: bool
) -> int:
    """Does the sweep. 0; 1 if some rows have an error; 130 after Ctrl-C (the results so far are kept).

    Raises StokerError for input that cannot be used, and for a call that failed (the results so far are kept then too).
    """
    options = resolve(read_options(resume, app=APP) if resume else {}, given)
    file = Path(options.sweep) if options.sweep else EXAMPLE
    sweep = read_sweep(file, data=Path(options.data) if options.data else None, limit=options.limit)
    combined = combinations(sweep)
    total = len(combined) * len(sweep.rows)
    recipes = {model.name: _recipe(model) for model in sweep.models}
    load_site(options.site or None)  # a wrong site file is said before there is a run folder
    folder = open_run(
        Path("runs"),
        app=APP,
        prefix="sweep",
        parameters={
            "combinations": {one.name: one.digest for one in combined},
            "models": {name: ", ".join(part.name for part in recipe.objects) for name, recipe in recipes.items()},
            "rows": sweep.rows.digest,
            "tensor_batch": options.tensor_batch,
        },
        options=msgspec.to_builtins(options),
        folder=resume or out,
        fresh=fresh,
    )
    with (
        contextlib.closing(folder),
        folder.log(key=KEY) as log,
        folder.attempt_log(key=KEY) as failed,
        stop_on_signals(),
    ):
        try:
            screen.line(_headline(sweep, name=file.name, total=total))
            for note in sweep.rows.notes:
                screen.line(f"  note  {note}")
            if len(log):
                screen.line(f"  going on with {folder.path}: {len(log)} of {total} are there")
            facts, lines = _infer(options, combined, recipes, sweep, log=log, failed=failed, screen=screen)
            errors, first = len(failed), first_error(sweep, combined, failed) if len(failed) else ""
            summary = {"inferences": total, "errors": errors, "models": len(recipes), **facts}
            folder.write_json("summary.json", summary)
            results = folder.finish(
                name=f"results.{options.format}",
                write=lambda path: write_rows(
                    make_rows(sweep, combined, log, failed), path, kind=options.format, columns=COLUMNS
                ),
                complete=not errors,
            )
        except Stopped:
            say_kept(screen, folder=folder.path, kept=len(log), total=total, app=APP)
            return INTERRUPTED
        except BaseException:
            if len(log):
                say_kept(screen, folder=folder.path, kept=len(log), total=total, app=APP, failed=True)
            raise
    if json:
        screen.json({**summary, "run": str(folder.path), "results": str(results)})
    else:
        screen.line()
        for line in [*lines, f"  results  {results}"]:
            screen.line(line)
    if errors:
        screen.line()
        screen.line(f"failed: {errors} of {total} results have no output; the column `error` says why. The first:")
        screen.line(f"  {first}")
        screen.line(f"  try them again:  {command(APP, f'--resume {shlex.quote(str(folder.path))}')}")
        return 1
    if not options.sweep and not json:
        screen.line()
        for line in columns([(command(APP, "--sweep FILE"), f"your sweep; start from a copy of {EXAMPLE}")]):
            screen.line(line)
    return 0


def _headline(sweep: Sweep, *, name: str, total: int) -> str:
    models, prompts = count(len(sweep.models), "model"), count(len(sweep.prompts), "prompt")
    sets, rows = count(len(sweep.parameters), "parameter set"), count(len(sweep.rows), "row")
    return f"inference sweep · {name} · {models} x {prompts} x {sets} x {rows} = {total:,} inferences"


def plan_calls(
    combined: Iterable[Combination], rows: Iterable[DataItem], log: Container[tuple[str, str]], *, batch_size: int
) -> Iterator[SweepCall]:
    """The calls that are still to be made, combination by combination. Each combination reads the rows once more."""
    for combination in combined:
        for batch in in_batches(_missing(rows, log, digest=combination.digest), batch_size):
            yield SweepCall(combination=combination, items=batch)


def _missing(rows: Iterable[DataItem], log: Container[tuple[str, str]], *, digest: str) -> Iterator[DataItem]:
    """The rows for which the log has no result of the combination with this digest."""
    return (item for item in rows if (digest, item.id) not in log)


class SweepRequests:
    """Makes a request of each call when it is to be sent, and keeps its row ids until it comes back.

    Several threads may loop over requests; `take` is for one thread.
    """

    def __init__(self, *, tensor_batch: int) -> None:
        self._tensor_batch = tensor_batch
        self._numbers = itertools.count()
        self._sent: dict[int, OpenSweepCall] = {}

    def __len__(self) -> int:
        """How many calls are in flight."""
        return len(self._sent)

    def of(self, calls: Iterable[SweepCall]) -> Iterator[Request]:
        """The request of each call, made when the loop gets there."""
        for call in calls:
            number = next(self._numbers)
            self._sent[number] = OpenSweepCall(call.combination, tuple(item.id for item in call.items))
            yield _request(number, call, tensor_batch=self._tensor_batch)

    def take(self, number: int) -> OpenSweepCall:
        """The call of this number, which has come back. It is kept no longer."""
        return self._sent.pop(number)


def calls_ahead(batch_size: int) -> int:
    """How many calls of one model are in flight at most, with this many rows each."""
    return max(LEAST_CALLS_AHEAD, min(MOST_CALLS_AHEAD, MOST_ROWS_AHEAD // batch_size))


def _infer(
    options: SweepOptions,
    combined: Sequence[Combination],
    recipes: dict[str, Recipe],
    sweep: Sweep,
    *,
    log: RecordLog,
    failed: RecordLog,
    screen: Screen,
) -> tuple[dict[str, Any], list[str]]:
    """Make the missing results; returns the facts about it, for programs and as lines."""
    kept, infer_s, calls, begun, facts = len(log), 0.0, 0, time.perf_counter(), ContextFacts()
    by_model: dict[str, ContextFacts] = {}
    sweep_requests = SweepRequests(tensor_batch=options.tensor_batch)
    jobs = []
    for name, recipe in recipes.items():
        mine = [one for one in combined if one.model.name == name]
        requests = sweep_requests.of(plan_calls(mine, sweep.rows, log, batch_size=options.batch_size))
        first = next(requests, None)
        if first is not None:  # a model whose results are all there is not loaded
            jobs.append((generate.with_options(context=recipe), itertools.chain([first], requests)))
    if jobs:
        with stoker.load(options.site or None, progress=False) as session:
            screen.line(session_line(session))
            ask = facts_of(session, {recipe.key for recipe in recipes.values()})
            ask_one = {name: facts_of(session, {recipe.key}) for name, recipe in recipes.items()}
            total = len(combined) * len(sweep.rows)
            with screen.progress(total=total, done=kept, noun="inferences", facts=ask) as progress:
                written: WrittenTexts
                for written in run_calls(jobs, window=calls_ahead(options.batch_size)):
                    records, unmade = make_records(sweep_requests.take(written.number), written)
                    progress.advance(log.append(records) + failed.append(unmade))
                    infer_s += written.infer_s
                    calls += 1
            facts = ask()
            by_model = {name: ask_about() for name, ask_about in ask_one.items()}
    wall_s, made = time.perf_counter() - begun, len(log) - kept
    if not jobs:
        attempt = {"inferences": 0, "kept": kept}
        return {"attempt": attempt}, [f"  nothing was left to infer: {kept} were there"]
    # Calls of models that are hot on one device overlap: their sum is no time of devices.
    beside = " (models that share a device work at the same time)" if len(by_model) > 1 else ""
    lines = [
        f"  {count(made, 'inference')} in {show_seconds(wall_s)}, {made / wall_s:.1f}/s on"
        f" {count(facts.devices, 'device')}: calls took {show_seconds(infer_s)} in all, loads"
        f" {show_seconds(facts.load_total_s)}{beside}"
    ]
    lines += [
        f"    {name}: {one.calls} calls, {one.loads} loads of {show_seconds(one.load_s)}, {one.found_hot} found it hot"
        for name, one in by_model.items()
    ]
    return (
        {
            "attempt": {
                "wall_s": wall_s,
                "inferences": made,
                "kept": kept,
                "calls": calls,
                "infer_s": infer_s,
                "load_s": facts.load_total_s,
                "loads": facts.loads,
                "devices": facts.devices,
            }
        },
        lines,
    )


def _recipe(model: SweepModel) -> Recipe:
    return model_recipe(language_model, model.path, dtype=model.dtype, engine=model.engine, slots="auto")


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
