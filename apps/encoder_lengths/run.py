"""Measure an encoder, and print its latency by length, the recommended lengths, and code that uses them."""

from __future__ import annotations

import itertools
import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from stoker import encoder
from stoker.apps.common.calls import measure_on_device
from stoker.apps.common.data_rows import is_empty, make_row_error
from stoker.apps.encoder_lengths.functions import LengthsRequest, measure_lengths
from stoker.config import load_site
from stoker.contexts import EncoderProfile, RuntimeLengths, keep_encoder_profile, lengths_that_pay, token_counter
from stoker.datafile import Row, read_rows
from stoker.errors import ConfigError

_WIDTH = 10
_MOST_SPREAD = 0.05
"""Maximum relative spread of times in an undisturbed measurement."""


def format_length_table(profile: EncoderProfile, counts: Sequence[int]) -> list[str]:
    heads = ["tokens", "ms", "spread", "more", *(["texts"] if counts else [])]
    lines = ["  " + "".join(f"{head:>{_WIDTH}}" for head in heads)]
    tokens, before = [each.tokens for each in profile.lengths], None
    texts = Counter(bisect_left(tokens, count) for count in counts)
    for place, each in enumerate(profile.lengths):
        more = "" if before is None else f"{1000 * (each.seconds - before):+.2f}"
        cells = [f"{each.tokens:,}", f"{1000 * each.seconds:.2f}", f"{1000 * each.spread_s:.2f}", more]
        cells += [f"{texts[place] / len(counts):.1%}"] if counts else []
        lines.append("  " + "".join(f"{cell:>{_WIDTH}}" for cell in cells))
        before = each.seconds
    return lines


def format_advice(model: str, profile: EncoderProfile, pay: RuntimeLengths) -> list[str]:
    told = {"dtype": profile.dtype, "compiled": profile.compiled}
    options = "".join(f", {name}={value!r}" for name, value in told.items() if value != "auto")
    if len(pay.tokens) == 1:
        why = pay.why.partition(": ")[2]
        lines = [f"one runtime is enough, of {pay.tokens[0]:,} tokens: {why}"]
        lines += ["", f"  encoder({model!r}, length={pay.tokens[0]}{options})"]
    else:
        lines = [pay.why, "", f"  encoder_family({model!r}, lengths={list(pay.tokens)}{options})"]
    if not profile.is_compiled:
        lines += [
            "",
            "  note  nothing was compiled on this device: encoder(...) without a length is at least as fast, because it"
            " does not pad a text that is computed alone",
        ]
    return lines


def format_length_warning(profile: EncoderProfile, counts: Sequence[int]) -> str:
    longest = profile.lengths[-1].tokens
    many = sum(count > longest for count in counts)
    if not many:
        return ""
    return f"{many:,} of {len(counts):,} texts have more than {longest:,} tokens: runtimes accept them only truncated"


def format_disturbance_warning(profile: EncoderProfile) -> str:
    """Return a warning if other processes disturbed the measurement, else an empty text."""
    spread = median(each.spread_s / each.seconds for each in profile.lengths)
    if spread <= _MOST_SPREAD:
        return ""
    return (
        f"times of one length differ by {spread:.0%} from their median: other processes use the device; measure again"
        " when it is free"
    )


SAMPLE = 4000
"""Maximum number of sampled texts whose tokens are counted."""
_READ_ROWS = 200_000
"""Number of rows from which the sample is drawn."""


def sample_texts(path: Path, column: str) -> list[str]:
    """Return a uniform sample of the texts in a file's first rows. Raises ConfigError."""
    chance, found, count = random.Random(1), list[str](), 0
    for row in itertools.islice(read_rows(path), _READ_ROWS):
        text = _read_text_cell(row, column, path=path)
        if not text:
            continue
        count += 1
        if len(found) < SAMPLE:
            found.append(text)
        elif (place := chance.randrange(count)) < SAMPLE:
            found[place] = text
    if not found:
        raise ConfigError.in_file(path, f"no row has a text in {column}", key=column)
    return found


def _read_text_cell(row: Row, column: str, *, path: Path) -> str:
    value = row.fields.get(column)
    if column in row.fields and is_empty(value):
        return ""
    if not isinstance(value, str):
        what = f"is {value!r:.40}" if column in row.fields else f"is missing (the row has {', '.join(row.fields)})"
        problem = f"{column} must be text, and {what}; name another column with --text"
        raise make_row_error(problem, row, path=path, key=column)
    return value


def measure_encoder(
    *, model: str = "", texts: str = "", text: str = "text", site: str = "", step: int = 0, dtype: str = "auto",
    compiled: str = "auto", json: bool,
) -> int:  # fmt: skip
    """Measure an encoder. `texts`: a data file; `text`: its column. Return the exit status: 0, or 130 after Ctrl-C."""
    if not model:
        raise ConfigError("encoder_lengths needs an encoder: --model PATH", key="model")
    recipe = encoder(model, dtype=dtype)
    sample = sample_texts(Path(texts), text) if texts else []
    load_site(site or None)  # report an invalid site file before texts are counted
    counts = list(map(token_counter(model), sample)) if sample else []

    def format_profile(profile: EncoderProfile) -> tuple[dict[str, Any], Iterator[str]]:
        kept, pay = keep_encoder_profile(model, profile), lengths_that_pay(profile, counts)
        summary = {
            "model": model, "lengths": list(pay.tokens), "why": pay.why, "mean_s": pay.mean_s,
            "alone_s": pay.alone_s, "texts": len(counts), "profile": msgspec.to_builtins(profile), "kept": str(kept),
        }  # fmt: skip
        return summary, _format_report(model, profile, pay, counts=counts, kept=kept)

    request = LengthsRequest(step, dtype, {"yes": True, "no": False}.get(compiled, compiled))
    return measure_on_device(measure_lengths, recipe, request, site=site, json=json, show=format_profile)


def _format_report(
    model: str, profile: EncoderProfile, pay: RuntimeLengths, *, counts: Sequence[int], kept: Path
) -> Iterator[str]:
    how = "compiled" if profile.is_compiled else "not compiled"
    yield f"{Path(model).name} · {profile.computed_dtype}, {how}, on {profile.device} · PyTorch {profile.torch}"
    yield f"milliseconds of one text, padded to each length: the median of {profile.repeats} measurements"
    yield ""
    yield from format_length_table(profile, counts)
    for note in filter(None, (format_length_warning(profile, counts), format_disturbance_warning(profile))):
        yield f"  note  {note}"
    yield ""
    yield from format_advice(model, profile, pay)
    yield ""
    yield f"  kept in  {kept}"
