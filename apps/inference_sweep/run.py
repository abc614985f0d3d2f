"""One sweep, from its file to its results.

Every model is a context of its own. The calls of all models are offered to the session at once, so contexts that fit a
device together are hot on it side by side, and those that don't are loaded one after another: that is the manager's
business, not this program's.
"""

from __future__ import annotations

import contextlib
import shlex
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

import stoker
from stoker.apps.common.calls import Stopped, in_batches, run_calls, session_line, stop_on_signals
from stoker.apps.common.hints import columns, command, count, say_kept
from stoker.apps.inference_sweep import APP
from stoker.apps.inference_sweep.functions import Request, WrittenTexts, generate, language_model
from stoker.apps.inference_sweep.options import SweepOptions, resolve
from stoker.apps.inference_sweep.plan import (
    EXAMPLE,
    Combination,
    Sweep,
    SweepItem,
    SweepModel,
    combinations,
    digest_items,
    read_sweep,
)
from stoker.apps.inference_sweep.results import KEY, Failed, SweepCall, first_error, make_records, make_rows
from stoker.config import load_site
from stoker.console import Screen
from stoker.contexts import Recipe, model_recipe
from stoker.datafile import write_rows
from stoker.run_folder import RecordLog, open_run, read_options
from stoker.sessions import ContextFacts, facts_of
from stoker.units import show_seconds

INTERRUPTED = 130


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
    total = len(combined) * len(sweep.items)
    recipes = {model.name: _recipe(model) for model in sweep.models}
    load_site(options.site or None)  # a wrong site file is said before there is a run folder
    folder = open_run(
        Path("runs"),
        app=APP,
        prefix="sweep",
        parameters={
            "combinations": {one.name: one.digest for one in combined},
            "models": {name: ", ".join(part.name for part in recipe.objects) for name, recipe in recipes.items()},
            "rows": digest_items(sweep.items),
            "tensor_batch": options.tensor_batch,
        },
        options=msgspec.to_builtins(options),
        folder=resume or out,
        fresh=fresh,
    )
    with contextlib.closing(folder), folder.log(key=KEY) as log, stop_on_signals():
        try:
            screen.line(_headline(sweep, name=file.name, total=total))
            for note in sweep.notes:
                screen.line(f"  note  {note}")
            if len(log):
                screen.line(f"  going on with {folder.path}: {len(log)} of {total} are there")
            facts, failed, lines = _infer(options, combined, recipes, sweep, log=log, screen=screen)
            summary = {"inferences": total, "errors": len(failed), "models": len(recipes), **facts}
            folder.write_json("summary.json", summary)
            rows = make_rows(sweep, combined, log, failed)
            results = folder.finish(
                name=f"results.{options.format}",
                write=lambda path: write_rows(rows, path, kind=options.format),
                complete=not failed,
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
    if failed:
        screen.line()
        screen.line(f"failed: {len(failed)} of {total} results have no output; the column `error` says why. The first:")
        screen.line(f"  {first_error(sweep, combined, failed)}")
        screen.line(f"  try them again:  {command(APP, f'--resume {shlex.quote(str(folder.path))}')}")
        return 1
    if not options.sweep and not json:
        screen.line()
        for line in columns([(command(APP, "--sweep FILE"), f"your sweep; start from a copy of {EXAMPLE}")]):
            screen.line(line)
    return 0


def _headline(sweep: Sweep, *, name: str, total: int) -> str:
    models, prompts = count(len(sweep.models), "model"), count(len(sweep.prompts), "prompt")
    sets, rows = count(len(sweep.parameters), "parameter set"), count(len(sweep.items), "row")
    return f"inference sweep · {name} · {models} x {prompts} x {sets} x {rows} = {total:,} inferences"


def plan_calls(
    combined: Sequence[Combination], items: Sequence[SweepItem], log: RecordLog, *, batch_size: int
) -> list[SweepCall]:
    """The calls that are still to be made."""
    calls: list[SweepCall] = []
    for combination in combined:
        left = [item for item in items if (combination.digest, item.id) not in log]
        calls.extend(SweepCall(combination=combination, items=batch) for batch in in_batches(left, batch_size))
    return calls


def _infer(
    options: SweepOptions,
    combined: Sequence[Combination],
    recipes: dict[str, Recipe],
    sweep: Sweep,
    *,
    log: RecordLog,
    screen: Screen,
) -> tuple[dict[str, Any], Failed, list[str]]:
    """Makes the missing results: the facts of it for programs, the rows that failed, and the facts as lines."""
    calls = plan_calls(combined, sweep.items, log, batch_size=options.batch_size)
    kept, infer_s, begun, facts = len(log), 0.0, time.perf_counter(), ContextFacts()
    by_model: dict[str, ContextFacts] = {}
    failed: Failed = {}
    if calls:
        with stoker.load(options.site or None, progress=False) as session:
            screen.line(session_line(session))
            ask = facts_of(session, {recipe.key for recipe in recipes.values()})
            ask_one = {name: facts_of(session, {recipe.key}) for name, recipe in recipes.items()}
            jobs = []
            for name, recipe in recipes.items():
                mine = [number for number, call in enumerate(calls) if call.combination.model.name == name]
                if mine:
                    requests = [_request(number, calls[number], options) for number in mine]
                    jobs.append((generate.with_options(context=recipe), requests))
            total = len(combined) * len(sweep.items)
            with screen.progress(total=total, done=kept, noun="inferences", facts=ask) as progress:
                written: WrittenTexts
                for written in run_calls(jobs):
                    records, unmade = make_records(calls[written.number], written)
                    failed.update(unmade)
                    progress.advance(log.append(records) + len(unmade))
                    infer_s += written.infer_s
            facts = ask()
            by_model = {name: ask_about() for name, ask_about in ask_one.items()}
    wall_s, made = time.perf_counter() - begun, len(log) - kept
    if not calls:
        attempt = {"inferences": 0, "kept": kept}
        return {"attempt": attempt}, failed, [f"  nothing was left to infer: {kept} were there"]
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
                "calls": len(calls),
                "infer_s": infer_s,
                "load_s": facts.load_total_s,
                "loads": facts.loads,
                "devices": facts.devices,
            }
        },
        failed,
        lines,
    )


def _recipe(model: SweepModel) -> Recipe:
    return model_recipe(language_model, model.path, dtype=model.dtype, engine=model.engine, slots="auto")


def _request(number: int, call: SweepCall, options: SweepOptions) -> Request:
    parameters = call.combination.parameters
    return Request(
        number=number,
        texts=tuple(call.combination.prompt.fill(item.fields) for item in call.items),
        seeds=tuple(zlib.crc32(item.id.encode()) for item in call.items),
        max_new_tokens=parameters["max_new_tokens"],
        temperature=parameters["temperature"],
        chat=call.combination.prompt.chat,
        tensor_batch=options.tensor_batch,
    )
