"""One run from its file to its results.

The data file is read as the calls are sent, so it may be larger than memory. What grows with the run is what the log
keeps of each result: its key, and its place on the disk.
"""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

import stoker
from stoker import encoder
from stoker.apps.common.calls import (
    Stopped,
    command,
    count,
    in_batches,
    run_calls,
    say_kept,
    session_line,
    stop_on_signals,
)
from stoker.apps.common.data_rows import DataItem, DataRows, check_rows, is_empty
from stoker.apps.embed import APP
from stoker.apps.embed.functions import EmbeddedTexts, EmbedRequest, embed_texts
from stoker.apps.embed.options import EmbedOptions, resolve
from stoker.apps.embed.results import KEY, first_error, make_records, write_npy, write_parquet
from stoker.config import load_site
from stoker.console import Screen
from stoker.contexts import Recipe
from stoker.run_folder import RecordLog, open_run, read_options
from stoker.sessions import ContextFacts, facts_of
from stoker.units import show_seconds

INTERRUPTED = 130
_ROWS_AHEAD = 32_000
"""The rows that are in flight at the most, unless that would be fewer calls than `_LEAST_CALLS_AHEAD`."""
_LEAST_CALLS_AHEAD = 32
"""Calls in flight at the most, where calls are large: with fewer of them devices would be idle."""


class EmbedAttempt(msgspec.Struct):
    """What this run has done itself; times are seconds."""

    kept: int = 0
    made: int = 0
    tokens: int = 0
    calls: int = 0
    infer_s: float = 0.0
    wall_s: float = 0.0
    facts: ContextFacts = ContextFacts()

    @property
    def figures(self) -> dict[str, Any]:
        """For programs."""
        return {
            "texts": self.made, "kept": self.kept, "tokens": self.tokens, "calls": self.calls, "wall_s": self.wall_s,
            "infer_s": self.infer_s, "load_s": self.facts.load_total_s, "loads": self.facts.loads,
            "devices": self.facts.devices,
        }  # fmt: skip


def run(
    given: dict[str, Any], *, resume: Path | None, out: Path | None, fresh: bool, screen: Screen, json: bool
) -> int:
    """Embeds the file. 0; 1 if some texts have an error; 130 after Ctrl-C (the vectors so far are kept).

    Raises StokerError for input that cannot be used, and for a call that failed (the vectors so far are kept then too).
    """
    options = resolve(read_options(resume, app=APP) if resume else {}, given)
    recipe = encoder(options.model, dtype=options.dtype)
    rows = check_rows(
        Path(options.data), column=options.id, wanted={"--text": (options.text,)}, limit=options.limit,
        empty_means="these rows get an error, and no vector", texts=True,
    )  # fmt: skip
    load_site(options.site or None)  # a wrong site file is said before there is a run folder
    folder = open_run(
        Path("runs"),
        app=APP,
        prefix="embed",
        parameters={
            "model": ", ".join(part.name for part in recipe.objects) or options.model,
            "rows": rows.digest,
            **options.kinds,
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
            screen.line(f"embeddings · {rows.path.name} · {count(len(rows), 'text')} · {Path(options.model).name}")
            for note in rows.notes:
                screen.line(f"  note  {note}")
            if len(log):
                screen.line(f"  going on with {folder.path}: {len(log):,} of {len(rows):,} are there")
            attempt = _infer(options, recipe, rows, log=log, failed=failed, screen=screen)
            first = first_error(rows, failed, file=rows.path) if len(failed) else ""
            summary = {"texts": len(rows), "errors": len(failed), "attempt": attempt.figures}
            folder.write_json("summary.json", summary)
            results = folder.finish(
                name=f"results.{options.format}",
                write=lambda path: _write(path, options.format, rows, log=log, failed=failed),
                complete=not len(failed),
            )
        except Stopped:
            say_kept(screen, folder=folder.path, kept=len(log), total=len(rows), app=APP)
            return INTERRUPTED
        except BaseException:
            if len(log):
                say_kept(screen, folder=folder.path, kept=len(log), total=len(rows), app=APP, failed=True)
            raise
    if json:
        screen.json({**summary, "run": str(folder.path), "results": str(results)})
    else:
        for line in _report(attempt, results=results):
            screen.line(line)
    if summary["errors"]:
        screen.line()
        errors = f"{summary['errors']:,} of {len(rows):,} texts"
        screen.line(f"failed: {errors} have no vector; `error` says why. The first:")
        screen.line(f"  {first}")
        screen.line(f"  try them again:  {command(APP, f'--resume {shlex.quote(str(folder.path))}')}")
        return 1
    return 0


def _infer(
    options: EmbedOptions, recipe: Recipe, rows: DataRows, *, log: RecordLog, failed: RecordLog, screen: Screen
) -> EmbedAttempt:
    """Make the missing vectors."""
    attempt = EmbedAttempt(kept=len(log))
    if len(log) == len(rows):
        return attempt
    begun, sent = time.perf_counter(), dict[int, tuple[str, ...]]()
    requests = _requests(options, rows, log, sent=sent)
    app = embed_texts.with_options(context=recipe)
    with stoker.load(options.site or None, progress=False) as session:
        screen.line(session_line(session))
        ask = facts_of(session, {recipe.key})
        window = max(_LEAST_CALLS_AHEAD, _ROWS_AHEAD // options.batch_size)
        with screen.progress(total=len(rows), done=len(log), noun="texts", facts=ask, also="tokens") as progress:
            found: EmbeddedTexts
            for found in run_calls([(app, requests)], window=window):
                made, unmade = make_records(sent.pop(found.number), found)
                progress.advance(log.append(made) + failed.append(unmade), also=found.tokens)
                attempt.tokens += found.tokens
                attempt.infer_s += found.infer_s
                attempt.calls += 1
        attempt.facts = ask()
    attempt.wall_s, attempt.made = time.perf_counter() - begun, len(log) - attempt.kept
    return attempt


def _requests(
    options: EmbedOptions, rows: DataRows, log: RecordLog, *, sent: dict[int, tuple[str, ...]]
) -> Iterator[EmbedRequest]:
    """The calls that are still to be made; `sent` keeps the ids of each."""
    missing = (item for item in rows if (item.id,) not in log)
    for number, batch in enumerate(in_batches(missing, options.batch_size)):
        texts = tuple(_text(item, options.text) for item in batch)
        sent[number] = tuple(item.id for item in batch)
        yield EmbedRequest(
            number=number, texts=texts, pooling=options.pooling, normalize=options.normalize,
            truncate=options.truncate, tensor_batch=options.tensor_batch,
        )  # fmt: skip


def _text(item: DataItem, column: str) -> str:
    """The text of a row; empty for a row without one, which gets an error in place of a vector."""
    value = item.fields[column]
    return "" if is_empty(value) else str(value)


def _write(path: Path, kind: str, rows: DataRows, *, log: RecordLog, failed: RecordLog) -> None:
    if kind == "npy":
        write_npy(path, rows, log, failed, rows=len(rows))
    else:
        write_parquet(path, rows, log, failed)


def _report(attempt: EmbedAttempt, *, results: Path) -> Iterator[str]:
    yield ""
    if attempt.calls:
        facts, wall_s = attempt.facts, attempt.wall_s
        yield (
            f"  {count(attempt.made, 'text')} in {show_seconds(wall_s)}, {attempt.made / wall_s:,.1f} texts/s and"
            f" {attempt.tokens / wall_s:,.0f} tokens/s on {count(facts.devices, 'device')};"
            f" {count(facts.loads, 'load')} of {show_seconds(facts.load_s)}"
        )
    else:
        yield f"  nothing was left to embed: {attempt.kept:,} were there"
    yield f"  results  {results}"
