"""Measured times of an encoder by text length, and the lengths that are worth a runtime (Arlo §3.3, Fig. 2).

    <state folder>/encoder-lengths/<digest>.json        one file per model, options and device kind

The chosen lengths minimize the mean latency of the expected texts.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import msgspec

from stoker.contexts.folders import state_folder
from stoker.contexts.model_source import find_model_source, shown_name
from stoker.contexts.objects import make_object_ref
from stoker.errors import RecipeError
from stoker.whole_files import write_whole

log = logging.getLogger(__name__)

MOST_RUNTIMES = 8
"""Maximum number of input lengths; Arlo uses 8 for BERT."""
MIN_GAIN = 0.05
"""Minimum saving by one more length, as a share of the mean latency. Arlo §3.3 calls less than 5 % tiny."""


class LengthTime(msgspec.Struct, frozen=True):
    """Median seconds for a text padded to `tokens` tokens. `spread_s`: median deviation from it in seconds."""

    tokens: int
    seconds: float
    spread_s: float


class RuntimeLengths(msgspec.Struct, frozen=True):
    """The chosen lengths. `mean_s`: mean latency of the texts; `alone_s`: mean latency with only the longest length."""

    tokens: tuple[int, ...]
    mean_s: float
    alone_s: float

    @property
    def why(self) -> str:
        """Reason for the choice, as a sentence."""
        if len(self.tokens) == 1:
            return f"one runtime of {self.tokens[0]} tokens: shorter runtimes would save less than {MIN_GAIN:.0%}"
        listed = ", ".join(map(str, self.tokens))
        return f"runtimes of {listed} tokens: {1 - self.mean_s / self.alone_s:.0%} less time than the longest alone"


_FORMAT = 1
_FOLDER = "encoder-lengths"
_LENGTH_STEP = 16
"""Step in tokens between measured lengths; no kernel has smaller tiles."""
_MAX_LENGTHS = 32
_DEFAULT_LONGEST = 512
"""Longest length for a model without a limit."""


class EncoderProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Median times of `repeats` batches with one text per length, shortest first.

    `computed_dtype`, `is_compiled`: effective values of `dtype` and `compiled`.
    """

    lengths: tuple[LengthTime, ...]
    name: str
    dtype: str
    computed_dtype: str
    compiled: bool | str
    is_compiled: bool
    device: str
    threads: int
    torch: str
    repeats: int
    measured_at: float
    model: str = ""
    format: int = _FORMAT

    def __post_init__(self) -> None:
        if not self.lengths or any(a.tokens >= b.tokens for a, b in pairwise(self.lengths)):
            raise ValueError("a profile needs at least one length, each larger than the one before")
        if any(each.tokens < 1 or not 0 < each.seconds < math.inf for each in self.lengths):
            raise ValueError("a length must have at least 1 token, and a time above 0 s")


def lengths_to_measure(longest: int, *, step: int = 0) -> tuple[int, ...]:
    """Return the multiples of `step` below `longest` (0 = unlimited), and `longest`. A `step` of 0 gives at most 32
    lengths.
    """
    top = longest or _DEFAULT_LONGEST
    step = step or _LENGTH_STEP * math.ceil(top / (_LENGTH_STEP * _MAX_LENGTHS))
    return (*range(step, top, step), top)


def lengths_that_pay(profile: EncoderProfile, counts: Iterable[int] = ()) -> RuntimeLengths:
    """Return the lengths that are worth a runtime.

    Args:
        profile: Measured times of the model.
        counts: Number of tokens in each expected text. Empty: all lengths are equally likely.

    Raises:
        RecipeError: All expected texts are longer than the longest measured length.
    """
    tokens = [each.tokens for each in profile.lengths]
    places = Counter(bisect_left(tokens, count) for count in counts)
    texts = [places[place] for place in range(len(tokens))] if places else [1] * len(tokens)
    if not any(texts):
        raise RecipeError(f"every expected text has more tokens than the longest length measured, {tokens[-1]}")
    # If a shorter length was slower than a longer one (noise), use the time of the longer length.
    seconds = list(accumulate((each.seconds for each in reversed(profile.lengths)), min))[::-1]
    before = list(accumulate(texts, initial=0))
    chosen, mean_s = [len(tokens) - 1], seconds[-1]
    for total, found in _best_lengths_per_count(seconds, before)[1:]:
        found_s = total / before[-1]
        if mean_s <= found_s * (1 + MIN_GAIN):
            break
        chosen, mean_s = found, found_s
    return RuntimeLengths(tuple(tokens[place] for place in chosen), mean_s, seconds[-1])


def _best_lengths_per_count(seconds: Sequence[float], before: Sequence[float]) -> list[tuple[float, list[int]]]:
    """Return the total time and the indices of the best 1, 2, ... lengths (dynamic program). `before`: number of texts
    that are shorter than each length.
    """
    places = range(len(seconds))
    costs = [before[place + 1] * seconds[place] for place in places]
    ways: list[list[int]] = [[place] for place in places]
    found = [(costs[-1], ways[-1])]
    for _ in range(1, min(MOST_RUNTIMES, len(seconds))):
        further, chosen = [math.inf] * len(seconds), list(ways)
        for place in places:
            for shorter in range(place):
                cost = costs[shorter] + (before[place + 1] - before[shorter + 1]) * seconds[place]
                if cost < further[place]:
                    further[place], chosen[place] = cost, [*ways[shorter], place]
        costs, ways = further, chosen
        found.append((costs[-1], ways[-1]))
    return found


def keep_encoder_profile(path: str | os.PathLike[str], profile: EncoderProfile) -> Path:
    """Store a model's profile for later programs.

    Args:
        path: Folder or hub name of the model.
        profile: Measured times of the model.

    Returns:
        The file with the profile.
    """
    whole = msgspec.structs.replace(profile, model=_model_digest(path), name=shown_name(os.fspath(path)))
    folder = state_folder() / _FOLDER
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    facts = [whole.model, whole.dtype, str(whole.compiled), whole.device]
    file = folder / f"{hashlib.sha256(repr(facts).encode()).hexdigest()[:24]}.json"
    write_whole(file, msgspec.json.format(msgspec.json.encode(whole)) + b"\n")
    return file


def kept_encoder_profile(
    path: str | os.PathLike[str], *, dtype: str = "auto", compiled: bool | str = "auto"
) -> EncoderProfile | None:
    """Return the newest stored profile of a model, or None.

    Args:
        path: Folder or hub name of the model.
        dtype, compiled: As in `encoder`; they select the profile.
    """
    model = _model_digest(path)
    found = [one for one in _read_stored_profiles() if (one.model, one.dtype, one.compiled) == (model, dtype, compiled)]
    return max(found, key=lambda one: one.measured_at, default=None)


def _read_stored_profiles() -> Iterator[EncoderProfile]:
    for file in sorted((state_folder() / _FOLDER).glob("[!.]*.json")):
        try:
            profile = msgspec.json.decode(file.read_bytes(), type=EncoderProfile)
            if profile.format != _FORMAT:
                raise ValueError(f"its format is {profile.format}, and this version of Stoker reads {_FORMAT}")
        except (OSError, ValueError, RecursionError) as error:
            log.warning("the profile %s cannot be read (%s), and is ignored; remove it", file, error)
        else:
            yield profile


def _model_digest(path: str | os.PathLike[str]) -> str:
    source, is_local = find_model_source(os.fspath(path))
    return make_object_ref(source).name if is_local else source
