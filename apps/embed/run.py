"""One run from its file to its results.

The data file is read as the calls are sent, so it may be larger than memory. What grows with the run is what the log
keeps of each result: its key, and its place on the disk.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stoker import encoder
from stoker.apps.common.calls import in_batches, run_calls
from stoker.apps.common.command_line import count, resolve
from stoker.apps.common.data_rows import DataItem, DataRows, check_rows, is_empty
from stoker.apps.common.runner import Attempt, OpenRun, Outcome, RunSpec, execute, resume_command
from stoker.apps.embed import APP
from stoker.apps.embed.functions import EmbeddedTexts, EmbedRequest, embed_texts
from stoker.apps.embed.options import EmbedOptions
from stoker.apps.embed.results import KEY, first_error, make_records, write_npy, write_parquet
from stoker.console import Screen
from stoker.contexts import Recipe
from stoker.errors import ConfigError
from stoker.run_folder import RecordLog

_ROWS_AHEAD = 32_000
"""The rows that are in flight at the most, unless that would be fewer calls than `_LEAST_CALLS_AHEAD`."""
_LEAST_CALLS_AHEAD = 32
"""Calls in flight at the most, where calls are large: with fewer of them devices would be idle."""


def run(
    given: dict[str, Any], *, resume: Path | None, out: Path | None, fresh: bool, screen: Screen, json: bool
) -> int:
    """Embed the file. 0; 1 if some texts have an error; 130 after Ctrl-C (the vectors so far are kept).

    Raises StokerError for input that cannot be used, and for a call that failed (the vectors so far are kept then too).
    """
    options = resolve(EmbedOptions, given, app=APP, resume=resume, files=("data",))
    for name, what in (("data", "a file of texts: stoker run embed FILE"), ("model", "an encoder: --model PATH")):
        if not getattr(options, name):
            raise ConfigError(f"embed wants {what}", key=name)
    recipe = encoder(options.model, dtype=options.dtype)
    rows = check_rows(
        Path(options.data), column=options.id, wanted={"--text": (options.text,)}, limit=options.limit,
        empty_means="these rows get an error, and no vector", texts=True,
    )  # fmt: skip
    spec = RunSpec(
        app=APP, prefix="embed", parameters=_parameters(options, recipe, rows), options=options, key=KEY,
        total=len(rows), folder=resume or out, fresh=fresh, site=options.site,
        headline=[
            f"embeddings · {rows.path.name} · {count(len(rows), 'text')} · {Path(options.model).name}",
            *(f"  note  {note}" for note in rows.notes),
        ],
    )  # fmt: skip
    return execute(spec, lambda work: _results(work, options, recipe, rows), screen=screen, json=json)


def _parameters(options: EmbedOptions, recipe: Recipe, rows: DataRows) -> dict[str, Any]:
    """What a vector depends on."""
    names = ("text", "id", "pooling", "normalize", "truncate", "dtype")
    model = ", ".join(part.name for part in recipe.objects) or options.model
    return {"model": model, "rows": rows.digest, **{name: getattr(options, name) for name in names}}


def _results(work: OpenRun, options: EmbedOptions, recipe: Recipe, rows: DataRows) -> Outcome:
    """Make the missing vectors, and the final file."""
    _infer(work, options, recipe, rows)
    attempt, log, failed = work.attempt, work.log, work.failed
    errors, first = len(failed), first_error(rows, failed, file=rows.path) if len(failed) else ""
    figures = {"texts": attempt.made, "tokens": attempt.tokens, "calls": attempt.calls, **attempt.figures}
    summary = {"texts": len(rows), "errors": errors, "attempt": figures}
    work.folder.write_json("summary.json", summary)

    def write(path: Path) -> None:
        if options.format == "npy":
            write_npy(path, rows, log, failed, rows=len(rows))
        else:
            write_parquet(path, rows, log, failed)

    results = work.folder.finish(name=f"results.{options.format}", write=write, complete=not errors)
    failure = [
        "",
        f"failed: {errors:,} of {len(rows):,} texts have no vector; `error` says why. The first:",
        f"  {first}",
        f"  try them again:  {resume_command(work.spec, work.folder.path)}",
    ]
    return Outcome(
        summary=summary, files={"results": results}, report=_report(attempt, results=results), errors=errors,
        failure=failure if errors else (),
    )  # fmt: skip


def _infer(work: OpenRun, options: EmbedOptions, recipe: Recipe, rows: DataRows) -> None:
    sent = dict[int, tuple[str, ...]]()

    def take(found: EmbeddedTexts) -> int:
        made, unmade = make_records(sent.pop(found.number), found)
        work.attempt.tokens += found.tokens
        work.attempt.infer_s += found.infer_s
        return work.log.append(made) + work.failed.append(unmade)

    window = max(_LEAST_CALLS_AHEAD, _ROWS_AHEAD // options.batch_size)
    job = (embed_texts.with_options(context=recipe), _requests(options, rows, work.log, sent=sent))
    work.infer(
        [job] if len(work.log) < len(rows) else [], contexts={"": recipe}, take=take, noun="texts", also="tokens",
        results=functools.partial(run_calls, window=window),
    )  # fmt: skip


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


def _report(attempt: Attempt, *, results: Path) -> Iterator[str]:
    yield ""
    if attempt.calls:
        yield attempt.throughput("text")
    else:
        yield f"  nothing was left to embed: {attempt.kept:,} were there"
    yield f"  results  {results}"
