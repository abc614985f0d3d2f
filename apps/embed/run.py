"""Embed the texts of a data file and write the results: Parquet with a row per text, or a NumPy array in file order.

The data file may be larger than memory. The log contains each vector as base64 of its float32 numbers. A text without a
vector has an `error` in Parquet, and NaN in a NumPy array.
"""

from __future__ import annotations

import base64
import functools
import itertools
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from stoker import encoder
from stoker.apps.common.calls import run_calls, split_into_batches
from stoker.apps.common.command_line import RunChoice, format_count, resolve_options
from stoker.apps.common.data_rows import DataItem, DataRows, check_rows, is_empty
from stoker.apps.common.models_file import model_digest_or_name
from stoker.apps.common.runner import ApplicationOutcome, OpenRun, Records, RunSpec, execute_run, find_result
from stoker.apps.embed import APP
from stoker.apps.embed.functions import EmbeddedTexts, EmbedRequest, embed_texts
from stoker.apps.embed.options import EmbedOptions
from stoker.contexts import Recipe
from stoker.errors import ConfigError
from stoker.run_folder import Record, RecordLog

KEY = ("id",)
"""Fields that identify a result."""
_CHUNK_ROWS = 4096
_FLOAT_BYTES = 4
_NPY_ALIGNED = 64


def make_log_records(ids: tuple[str, ...], found: EmbeddedTexts) -> tuple[list[Record], list[Record]]:
    """Return the records of the texts that have vectors, and of the failed texts."""
    made, failed = [], []
    for id, vector, error in zip(ids, found.vectors, found.errors, strict=True):
        if error:
            failed.append({"id": id, "error": error})
        else:
            made.append({"id": id, "vector": base64.b64encode(vector).decode()})
    return made, failed


def write_parquet(path: Path, items: Iterable[DataItem], log: Records, failed: Records) -> None:
    """Write `id`, `embedding` (list of float32, or null) and `error` (empty if the row has a vector)."""
    import pyarrow  # imported here, because the import takes 0.25 s
    import pyarrow.parquet

    schema = pyarrow.schema(
        [("id", pyarrow.string()), ("embedding", pyarrow.list_(pyarrow.float32())), ("error", pyarrow.string())]
    )
    left = _read_vectors_or_errors(items, log, failed)
    with pyarrow.parquet.ParquetWriter(path, schema, compression="zstd") as file:
        while chunk := list(itertools.islice(left, _CHUNK_ROWS)):
            ids, vectors, errors = zip(*chunk, strict=True)
            offsets = [0, *itertools.accumulate(len(vector) // _FLOAT_BYTES for vector in vectors)]
            numbers = pyarrow.Array.from_buffers(
                pyarrow.float32(), offsets[-1], [None, pyarrow.py_buffer(b"".join(vectors))]
            )
            starts = [at if vector else None for at, vector in zip(offsets, vectors, strict=False)]
            lists = pyarrow.ListArray.from_arrays(pyarrow.array([*starts, offsets[-1]], pyarrow.int32()), numbers)
            columns = [pyarrow.array(ids, pyarrow.string()), lists, pyarrow.array(errors, pyarrow.string())]
            file.write_table(pyarrow.Table.from_arrays(columns, schema=schema))


def write_npy(path: Path, items: Iterable[DataItem], log: Records, failed: Records, *, rows: int) -> None:
    """Write a float32 array `[rows, width]` in NumPy's format (version 1.0), in file order."""
    first = next((vector for _, vector, _ in _read_vectors_or_errors(items, log, failed) if vector), b"")
    width = len(first) // _FLOAT_BYTES
    missing = struct.pack("<f", float("nan")) * width
    with path.open("wb") as file:
        file.write(_make_npy_header(rows, width))
        for _, vector, _ in _read_vectors_or_errors(items, log, failed):
            file.write(vector or missing)


def format_first_error(items: Iterable[DataItem], failed: Records, *, file: Path) -> str:
    for item in items if len(failed) else ():
        if (record := failed.get((item.id,))) is not None:
            return f"{file}: {item.place}: row {item.id}: {record['error']}"
    return ""


def _read_vectors_or_errors(
    items: Iterable[DataItem], log: Records, failed: Records
) -> Iterator[tuple[str, bytes, str]]:
    for item in items:
        record = find_result((item.id,), log, failed, what=f"row {item.id}")
        yield item.id, base64.b64decode(record.get("vector", "")), record.get("error", "")


def _make_npy_header(rows: int, width: int) -> bytes:
    """Return the header of a .npy file (numpy.lib.format, version 1.0)."""
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {width}), }}"
    fixed = len(b"\x93NUMPY\x01\x00") + 2
    padded = text + " " * (-(fixed + len(text) + 1) % _NPY_ALIGNED) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(padded)) + padded.encode("latin1")


_ROWS_AHEAD = 32_000
"""Maximum number of rows in the calls in flight, unless `_LEAST_CALLS_AHEAD` calls have more."""
_LEAST_CALLS_AHEAD = 32
"""Minimum number of calls in flight, so that devices do not idle."""


def run_embedding(given_options: dict[str, Any], choice: RunChoice) -> int:
    """Embed texts. Return the exit status: 0, 1 if texts have errors, 130 after Ctrl-C. Raises StokerError."""
    options = resolve_options(EmbedOptions, given_options, app=APP, resume=choice.resume, files=("data",))
    for name, what in (("data", "a file of texts: stoker run embed FILE"), ("model", "an encoder: --model PATH")):
        if not getattr(options, name):
            raise ConfigError(f"embed needs {what}", key=name)
    recipe = encoder(options.model, dtype=options.dtype)
    rows = check_rows(
        Path(options.data), column=options.id, wanted={"--text": (options.text,)}, limit=options.limit,
        empty_means="these rows get an error, and no vector", texts=True,
    )  # fmt: skip
    names = ("text", "id", "pooling", "normalize", "truncate", "dtype")
    model = model_digest_or_name(recipe, options.model)
    spec = RunSpec(
        app=APP, prefix="embed", options=options, key=KEY, total=len(rows), site=options.site,
        parameters={"model": model, "rows": rows.digest, **{name: getattr(options, name) for name in names}},
        headline=[
            f"embeddings · {rows.path.name} · {format_count(len(rows), 'text')} · {Path(options.model).name}",
            *(f"  note  {note}" for note in rows.notes),
        ],
    )  # fmt: skip
    return execute_run(spec, lambda work: _write_results(work, options, recipe, rows), choice)


def _write_results(work: OpenRun, options: EmbedOptions, recipe: Recipe, rows: DataRows) -> ApplicationOutcome:
    _run_missing_calls(work, options, recipe, rows)
    attempt, log, failed = work.attempt, work.log, work.failed

    def write_file(path: Path) -> None:
        if options.format == "npy":
            write_npy(path, rows, log, failed, rows=len(rows))
        else:
            write_parquet(path, rows, log, failed)

    line = f"  nothing was left to embed: {attempt.kept:,} vectors were kept"
    return work.write_row_results(
        f"results.{options.format}", write_file, noun="text", lacks="vector", more={},
        first=format_first_error(rows, failed, file=rows.path),
        figures={"texts": attempt.made, "tokens": attempt.tokens, "calls": attempt.calls},
        report=[attempt.format_throughput_line("text") if attempt.calls else line],
    )  # fmt: skip


def _run_missing_calls(work: OpenRun, options: EmbedOptions, recipe: Recipe, rows: DataRows) -> None:
    sent = dict[int, tuple[str, ...]]()

    def store_vectors(found: EmbeddedTexts) -> int:
        made, unmade = make_log_records(sent.pop(found.number), found)
        work.attempt.tokens += found.tokens
        work.attempt.infer_s += found.infer_s
        return work.log.append(made) + work.failed.append(unmade)

    window = max(_LEAST_CALLS_AHEAD, _ROWS_AHEAD // options.batch_size)
    job = (embed_texts.with_options(context=recipe), _make_missing_requests(options, rows, work.log, sent=sent))
    work.run_jobs(
        [job] if len(work.log) < len(rows) else [], contexts={"": recipe}, take=store_vectors,
        noun="texts", also="tokens", results=functools.partial(run_calls, window=window),
    )  # fmt: skip


def _make_missing_requests(
    options: EmbedOptions, rows: DataRows, log: RecordLog, *, sent: dict[int, tuple[str, ...]]
) -> Iterator[EmbedRequest]:
    missing = (item for item in rows if (item.id,) not in log)
    for number, batch in enumerate(split_into_batches(missing, options.batch_size)):
        cells = (item.fields[options.text] for item in batch)
        sent[number] = tuple(item.id for item in batch)
        yield EmbedRequest(
            number=number, texts=tuple("" if is_empty(cell) else str(cell) for cell in cells), pooling=options.pooling,
            normalize=options.normalize, truncate=options.truncate, tensor_batch=options.tensor_batch,
        )  # fmt: skip
