"""Tables of an engine's step times, by the number of tokens read and the mean number of tokens attended to.

SLINFER (§VI-B) measures prefill by prompt length, and decode by batch size and mean length, at powers of two, and
interpolates linearly. Here prefill times also have two dimensions, because a step may read a part of a prompt. A *cell*
contains the samples that are nearest to the same powers of two.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import msgspec

MOST_SAMPLES = 200
"""Maximum `count` of a `StepCell`; with larger counts, new samples would hardly change the cell's mean."""
MOST_CELLS = 512
"""Maximum number of `StepCell`s: 16 powers of two for tokens times 32 for lengths."""
_MAX_NUMBER = 2.0**31
_RELIABLE_COUNT = 4
_MAX_FORECAST_RATIO = 3.0
"""Maximum ratio of a step's time to its forecast; a longer time is replaced by this multiple of the forecast."""


class StepSample(msgspec.Struct, frozen=True, array_like=True):
    """A measured step. It read `tokens` tokens, which attended to `length` tokens each on average."""

    prefill: bool
    tokens: float
    length: float
    seconds: float


class StepCell(msgspec.Struct, frozen=True, array_like=True):
    """The mean of `count` similar samples."""

    tokens: float
    length: float
    seconds: float
    count: int = 1

    def joined_with(self, other: StepCell) -> StepCell:
        share = other.count / (self.count + other.count)
        return StepCell(
            self.tokens + (other.tokens - self.tokens) * share,
            self.length + (other.length - self.length) * share,
            self.seconds + (other.seconds - self.seconds) * share,
            min(MOST_SAMPLES, self.count + other.count),
        )


class StepError(msgspec.Struct, frozen=True, array_like=True):
    """Mean relative error of the forecasts, measured on `count` new samples."""

    mean: float = 0.0
    count: int = 0

    def joined_with(self, other: StepError) -> StepError:
        if not other.count:
            return self
        share = other.count / (self.count + other.count)
        return StepError(self.mean + (other.mean - self.mean) * share, min(MOST_SAMPLES, self.count + other.count))


class StepTimes(msgspec.Struct, frozen=True):
    prefill: tuple[StepCell, ...] = ()
    decode: tuple[StepCell, ...] = ()
    prefill_error: StepError = StepError()
    decode_error: StepError = StepError()

    @property
    def sample_count(self) -> int:
        return sum(cell.count for cell in (*self.prefill, *self.decode))

    def joined_with(self, other: StepTimes) -> StepTimes:
        return StepTimes(
            tuple(StepTable([*self.prefill, *other.prefill])),
            tuple(StepTable([*self.decode, *other.decode])),
            self.prefill_error.joined_with(other.prefill_error),
            self.decode_error.joined_with(other.decode_error),
        )

    def scale_to_speed(self, speed: float) -> StepTimes:
        def scale_cells(cells: tuple[StepCell, ...]) -> tuple[StepCell, ...]:
            return tuple(msgspec.structs.replace(cell, seconds=cell.seconds / speed) for cell in cells)

        return msgspec.structs.replace(self, prefill=scale_cells(self.prefill), decode=scale_cells(self.decode))

    def has_plausible_numbers(self) -> bool:
        """True if no number is negative or too large for a measurement."""
        cells, errors = (*self.prefill, *self.decode), (self.prefill_error, self.decode_error)
        numbers = [number for cell in cells for number in (cell.tokens, cell.length, cell.seconds)]
        return (
            max(len(self.prefill), len(self.decode)) <= MOST_CELLS
            and all(0 <= number <= _MAX_NUMBER for number in (*numbers, *(error.mean for error in errors)))
            and all(0 < cell.count <= MOST_SAMPLES for cell in cells)
            and all(0 <= error.count <= MOST_SAMPLES for error in errors)
        )


class StepTable:
    def __init__(self, cells: Iterable[StepCell] = ()) -> None:
        self._rows: dict[int, dict[int, StepCell]] = {}
        self._lines: dict[int, list[StepCell]] = {}
        self._sorted_powers: list[int] = []
        self._count = 0
        for cell in cells:
            self.add(cell)

    def __iter__(self) -> Iterator[StepCell]:
        return (cell for place in sorted(self._rows) for cell in self._sorted_cells(place))

    def find_cell(self, tokens: float, length: float) -> StepCell | None:
        return self._rows.get(rounded_log2(tokens), {}).get(rounded_log2(length))

    def add(self, cell: StepCell) -> None:
        if cell.tokens < 1:
            cell = msgspec.structs.replace(cell, tokens=1.0)
        place, at = rounded_log2(cell.tokens), rounded_log2(cell.length)
        row = self._rows.get(place)
        known = row.get(at) if row is not None else None
        if known is None and self._count >= MOST_CELLS:
            return
        if row is None:
            row = self._rows[place] = {}
            self._sorted_powers = sorted(self._rows)
        self._count += known is None
        row[at] = cell if known is None else known.joined_with(cell)
        self._lines.pop(place, None)

    def estimate_seconds(self, tokens: float, length: float) -> float:
        order = self._sorted_powers
        if not order:
            raise LookupError("no step has been measured")
        if len(order) == 1:
            most, seconds = self._cell_at_length(order[0], length)
            return seconds * tokens / most if tokens > most else seconds
        at = sum(self._cell_at_length(place, length)[0] <= tokens for place in order)
        low = min(max(at - 1, 0), len(order) - 2)
        return _interpolate(
            self._cell_at_length(order[low], length), self._cell_at_length(order[low + 1], length), tokens
        )

    def lower_bounds(self, *, length: float, most: int) -> tuple[float, float]:
        """Return the minimum seconds of a step, and its minimum seconds per token, for steps of 1 to `most` tokens that
        attend to at least `length` tokens each. Raises LookupError without samples.

        A step takes at least the seconds of the faster neighbouring cell. Below the smallest cell, seconds decrease at
        most in proportion to the tokens.
        """
        if not self._rows:
            raise LookupError("no step has been measured")
        rows = []
        for place in self._sorted_powers:
            lengths = [length, *(cell.length for cell in self._sorted_cells(place) if cell.length > length)]
            rows.append([self._cell_at_length(place, each) for each in lengths])
        first, beyond = max(1.0, *(tokens for tokens, _ in rows[0])), max(most, *(tokens for tokens, _ in rows[-1]))
        meet = len(rows) > 1 and min(rows[-1])[0] <= max(rows[-2])[0]
        step_s = min(*(seconds for row in rows for _, seconds in row), *(seconds / first for _, seconds in rows[0]))
        token_s = min(
            *(seconds / tokens for row in rows for tokens, seconds in row),
            *(seconds / beyond for row in (rows[-2:] if meet else rows[-1:]) for _, seconds in row),
        )
        return step_s, token_s

    def _cell_at_length(self, place: int, length: float) -> tuple[float, float]:
        line = self._sorted_cells(place)
        if len(line) == 1:
            only = line[0]
            return only.tokens, max(0.0, only.seconds + self._seconds_per_length(place, only) * (length - only.length))
        at = sum(cell.length <= length for cell in line)
        low = min(max(at - 1, 0), len(line) - 2)
        a, b = line[low], line[low + 1]
        share = (length - a.length) / (b.length - a.length) if b.length > a.length else 0.0
        seconds = _interpolate((a.length, a.seconds), (b.length, b.seconds), length)
        return a.tokens + (b.tokens - a.tokens) * min(max(share, 0.0), 1.0), seconds

    def _seconds_per_length(self, place: int, only: StepCell) -> float:
        others = [other for other in self._sorted_powers if len(self._rows[other]) > 1]
        if not others:
            return 0.0
        line = self._sorted_cells(min(others, key=lambda other: abs(other - place)))
        first, last = line[0], line[-1]
        if last.length <= first.length:
            return 0.0
        return max(0.0, (last.seconds - first.seconds) / (last.length - first.length) * only.tokens / last.tokens)

    def _sorted_cells(self, place: int) -> list[StepCell]:
        line = self._lines.get(place)
        if line is None:
            line = self._lines[place] = [cell for _, cell in sorted(self._rows[place].items())]
        return line


class StepModel:
    def __init__(self, times: StepTimes | None = None) -> None:
        times = times or StepTimes()
        self._tables = {True: StepTable(times.prefill), False: StepTable(times.decode)}
        self._errors = {True: times.prefill_error, False: times.decode_error}

    @property
    def times(self) -> StepTimes:
        prefill, decode = tuple(self._tables[True]), tuple(self._tables[False])
        return StepTimes(prefill, decode, self._errors[True], self._errors[False])

    def step_s(self, *, prefill: bool, tokens: float, length: float) -> float:
        return self._tables[prefill].estimate_seconds(tokens, length)

    def record_error(self, deviation: float, *, prefill: bool) -> None:
        self._errors[prefill] = self._errors[prefill].joined_with(StepError(deviation, 1))

    def add(self, sample: StepSample) -> None:
        self._tables[sample.prefill].add(StepCell(sample.tokens, sample.length, sample.seconds))

    def add_limited_sample(self, sample: StepSample) -> tuple[StepSample, float | None]:
        """Add a sample, but limit its time to 3 times the forecast. Return the limited sample, and the relative error
        of the forecast.
        """
        table, deviation = self._tables[sample.prefill], None
        cell = table.find_cell(sample.tokens, sample.length)
        if cell is not None and sample.seconds > 0:
            expected = table.estimate_seconds(sample.tokens, sample.length)
            deviation = min(abs(sample.seconds - expected) / sample.seconds, _MAX_FORECAST_RATIO)
            self.record_error(deviation, prefill=sample.prefill)
            if cell.count >= _RELIABLE_COUNT and sample.seconds > _MAX_FORECAST_RATIO * expected:
                sample = StepSample(sample.prefill, sample.tokens, sample.length, _MAX_FORECAST_RATIO * expected)
        self.add(sample)
        return sample, deviation


def group_samples(samples: Iterable[StepSample], *, weight: int = 1) -> StepTimes:
    tables = {True: StepTable(), False: StepTable()}
    for sample in samples:
        tables[sample.prefill].add(StepCell(sample.tokens, sample.length, sample.seconds, weight))
    return StepTimes(tuple(tables[True]), tuple(tables[False]))


def powers_of_two_up_to(most: int, *, least: int = 1) -> list[int]:
    found = [1 << power for power in range(max(0, most).bit_length()) if least <= 1 << power <= most]
    return found if not found or found[-1] == most else [*found, most]


def mean_attended_tokens(reads: Sequence[tuple[int, int]]) -> float:
    """Return the mean number of tokens that a read token attends to. `reads`: index of the first token, and count."""
    total = sum(count for _, count in reads)
    return sum(count * (start + count / 2) for start, count in reads) / total if total else 0.0


def mean_padded_length(rows: Iterable[tuple[int, float]]) -> float:
    """Return the mean length that the continuous engine computes for `rows` (reserved size, length).

    The engine pads each row to the longest row with the same reserved size.
    """
    found: dict[int, list[float]] = {}
    for size, length in rows:
        found.setdefault(size, []).append(length)
    count = sum(map(len, found.values()))
    return sum(max(lengths) * len(lengths) for lengths in found.values()) / count if count else 0.0


def rounded_log2(value: float) -> int:
    return round(math.log2(value)) if value > 1 else 0


def _interpolate(a: tuple[float, float], b: tuple[float, float], at: float) -> float:
    if b[0] <= a[0]:
        return (a[1] + b[1]) / 2
    slope = (b[1] - a[1]) / (b[0] - a[0])
    if at > b[0]:
        return b[1] + max(0.0, slope) * (at - b[0])
    line = a[1] + slope * (at - a[0])
    return max(line, a[1] * at / a[0]) if at < a[0] else line


class StepProfile(msgspec.Struct, frozen=True):
    """Measured step times of an engine. `left_out`: number of samples skipped for lack of memory or time."""

    times: StepTimes
    engine: str
    device: str
    took_s: float
    left_out: int = 0


_MIN_LENGTH = 1.0
_EXTRAPOLATED_TOKENS = 65_536.0
_ROUNDING = 1e-9
_MAX_CACHED_PREFILLS = 32_768
"""Maximum number of cached prefill forecasts."""


class StepSeconds:
    """Fast step times for simulators: the seconds of a constant table, multiplied by `factor`.

    For each batch size, linear parts of the table are computed once as straight lines.
    """

    def __init__(self, times: StepTimes, *, factor: float = 1.0) -> None:
        self._model = StepModel(times)
        self._lengths = sorted({_MIN_LENGTH, *(cell.length for cell in times.decode if cell.length > _MIN_LENGTH)})
        self._factor = factor
        self._prefills: dict[tuple[int, float], float] = {}
        self._lines: dict[int, tuple[list[float], list[float | None]]] = {}
        """By batch size: seconds at each length, and slope to the next length (None if not linear)."""

    def prefill_s(self, tokens: int, length: float) -> float:
        known = self._prefills.get((tokens, length))
        if known is None:
            known = self._factor * self._model.step_s(prefill=True, tokens=tokens, length=length)
            if len(self._prefills) >= _MAX_CACHED_PREFILLS:
                self._prefills.clear()
            self._prefills[tokens, length] = known
        return known

    def decode_s(self, rows: int, length: float, *, count: int = 1) -> list[float]:
        """Return the seconds of `count` decode steps of `rows` requests. The mean length grows by one token per step.

        Raises LookupError without samples.
        """
        if rows not in self._lines:
            self._lines[rows] = self._fit_lines(rows)
        (values, slopes), lengths, found = self._lines[rows], self._lengths, list[float]()
        while len(found) < count:
            at = length + len(found)
            place = bisect_right(lengths, at) - 1
            slope = slopes[place] if place >= 0 else None
            if slope is None:
                found.append(self._step_seconds_from_table(rows, at))
                continue
            first, steps = values[place] + (at - lengths[place]) * slope, count - len(found)
            if place + 1 < len(lengths):
                steps = min(steps, 1 + int(lengths[place + 1] - at))
            found += [first + slope * number for number in range(steps)]
        return found

    def _fit_lines(self, rows: int) -> tuple[list[float], list[float | None]]:
        knots = [*self._lengths, self._lengths[-1] + _EXTRAPOLATED_TOKENS]
        values = [self._step_seconds_from_table(rows, length) for length in knots]
        slopes: list[float | None] = []
        for (start, end), (low, high) in zip(pairwise(knots), pairwise(values), strict=True):
            parts = [
                (self._step_seconds_from_table(rows, start + (end - start) * part), part) for part in (0.25, 0.5, 0.75)
            ]
            is_line = all(abs(low + (high - low) * part - value) <= _ROUNDING * (value + 1e-3) for value, part in parts)
            slopes.append((high - low) / (end - start) if is_line and end - start > 1e-6 else None)
        return values[:-1], slopes

    def _step_seconds_from_table(self, rows: int, length: float) -> float:
        return self._factor * self._model.step_s(prefill=False, tokens=rows, length=length)
