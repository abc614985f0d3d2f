"""Determine a program's progress and slowdown from the newest lines of a growing log, in bounded memory. A truncated or
replaced (rotated) log counts as a new file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from statistics import median

import msgspec

from stoker.manager.advice.metrics.formats import LineFormats
from stoker.manager.advice.metrics.lines import (
    EPOCH,
    LONGEST_LINE,
    LineMetrics,
    read_metrics,
    read_stated_totals,
    split_redraws,
)
from stoker.manager.advice.metrics.series import (
    CountSeries,
    choose_progress_series,
    compute_rate,
    drop_outliers,
    group_counts_into_series,
)

MOST_METRIC_LINES, MOST_METRIC_LINES_OF_KIND = 192, 64
"""Maximum number of lines with metrics to read, in total and of one kind. Lines of one kind differ only in numbers,
bars and blanks.
"""
_MOST_LINES = 5_000
_MOST_FRUITLESS_LINES = 200
"""After `MOST_METRIC_LINES_OF_KIND` lines with metrics, the search ends when this number of lines in a row have no
metrics.
"""
_KIND = re.compile(r"\d[\d.,:]*|[#█▏▎▍▌▋▊▉=>━╸.\-]{2,}|\s+")


class LoggedProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a program. `unit`: what `done`, `total` and `rate_per_s` count; epochs if the program counts both
    epochs and steps within an epoch. `whole`: False if `total` covers only a part of the run.
    """

    done: float
    unit: str
    total: float | None = None
    whole: bool = True
    rate_per_s: float | None = None
    steps_per_s: float | None = None
    step: float | None = None
    epoch: float | None = None
    loss: float | None = None
    learning_rate: float | None = None
    tokens_per_s: float | None = None
    samples_per_s: float | None = None
    seconds_left: float | None = None
    evaluates: bool = False


class MetricTracker:
    """Follows one program over several readings of its log. `totals`: the steps and epochs that the program stated at
    its start."""

    def __init__(self, formats: LineFormats | None = None) -> None:
        self.totals: Mapping[str, float] = {}
        self._read_line = formats.read_line if formats is not None else read_metrics
        self._seen: tuple[tuple[str, float | None], float, float] | None = None
        """The last reading: name and total of the count, units done, and time in seconds."""

    def track(self, newest_first: Iterable[str], *, at_s: float | None = None) -> LoggedProgress | None:
        """Return the progress, or None if the lines have no metrics. `at_s`: time of the reading. If the log contains
        no times, the rate is computed from two readings.
        """
        lines = read_newest_metrics(newest_first, read_line=self._read_line)
        if not lines:
            return None
        chosen = choose_progress_series(group_counts_into_series(lines))
        if chosen is None:
            return _progress_without_counts(lines)
        inner, _ = chosen
        rate = compute_rate(inner)
        if at_s is not None:
            count, done = (inner.name, inner.newest.total), _inner_units_done(*chosen)
            before, was_done, was_at_s = self._seen or (None, 0.0, 0.0)
            if rate is None and before == count and done > was_done and at_s > was_at_s:
                rate = (done - was_done) / (at_s - was_at_s)
            self._seen = count, done, at_s
        return _compute_progress(lines, *chosen, rate, self.totals)


def read_newest_metrics(
    newest_first: Iterable[str], *, read_line: Callable[[str], LineMetrics | None]
) -> list[LineMetrics]:
    """Return the metrics of the newest lines, oldest first. Counts of learned formats are used only if the rules find
    none."""
    found: list[LineMetrics] = []
    of_kind: dict[str, float] = {}
    read = in_vain = 0
    for shown in (shown for line in newest_first for shown in reversed(split_redraws(line))):
        if (
            len(found) >= MOST_METRIC_LINES
            or read >= _MOST_LINES
            or (len(found) >= MOST_METRIC_LINES_OF_KIND and in_vain >= _MOST_FRUITLESS_LINES)
        ):
            break
        read += 1
        kind = _KIND.sub("", shown[:64])
        if of_kind.get(kind, 0.0) >= MOST_METRIC_LINES_OF_KIND:
            continue
        metrics = read_line(shown)
        # A line without metrics counts as a quarter of a line, because other lines of the same kind may have metrics.
        of_kind[kind] = of_kind.get(kind, 0.0) + (1.0 if metrics else 0.25)
        in_vain = 0 if metrics else in_vain + 1
        if metrics:
            found.append(metrics)
    if any(line.counters and not line.learned for line in found):
        found = [msgspec.structs.replace(line, counters=()) if line.learned else line for line in found]
    return found[::-1]


def compute_slowdown(before: LoggedProgress | None, after: LoggedProgress | None) -> float | None:
    """Return the share of throughput lost since `before` (negative if faster), or None without rates of the same kind
    (§4.1)."""
    if before is None or after is None or before.evaluates != after.evaluates:
        return None
    metrics = ["steps_per_s", "tokens_per_s", "samples_per_s", *(["rate_per_s"] if before.unit == after.unit else [])]
    rates = ((getattr(before, metric), getattr(after, metric)) for metric in metrics)
    return next((1.0 - now / was for was, now in rates if was and now), None)


def _compute_progress(
    lines: Sequence[LineMetrics],
    inner: CountSeries,
    outer: CountSeries | None,
    per_s: float | None,
    totals: Mapping[str, float],
) -> LoggedProgress:
    now = inner.newest
    done, total, unit, inner_per_unit, whole = now.done, now.total, inner.unit, 1.0, True
    epochs = [each.done for line in reversed(lines) for each in line.counters if each.unit == EPOCH]
    epoch = epochs[0] if epochs else None  # the first epoch count of the newest line with an epoch
    in_an_epoch = any(each.unit == EPOCH for each in inner.points[-1].line.counters)
    if outer is not None and now.total:
        done, total, unit, inner_per_unit = _rounds_done(inner, outer), outer.newest.total, outer.unit, now.total
    elif now.total is None:
        total = totals.get(unit)
        total = total if total is None or total >= done else None
    elif unit != EPOCH and (inner.completed_rounds or in_an_epoch):
        if epoch is not None and (of_epochs := totals.get(EPOCH, 0.0)) >= epoch:
            rounds = epoch if 0 in epochs else max(0.0, epoch - 1)
            done, total, unit, inner_per_unit = rounds + now.done / now.total, of_epochs, EPOCH, now.total
        else:
            whole = False
    recent = [line for line in lines[inner.points[0].at :] if line.evaluates == inner.evaluates]
    rate_per_s = per_s / inner_per_unit if per_s else None
    left = (outer or inner).points[-1].line.eta_s
    return LoggedProgress(
        done=done, total=total, unit=unit, whole=whole, rate_per_s=rate_per_s,
        steps_per_s=per_s if inner.unit != EPOCH else None,
        step=now.done if inner.unit != EPOCH else None, epoch=epoch, loss=_newest_loss(recent),
        learning_rate=next((line.learning_rate for line in reversed(recent) if line.learning_rate is not None), None),
        tokens_per_s=_median_of_field(recent, "tokens_per_s"), samples_per_s=_median_of_field(recent, "samples_per_s"),
        seconds_left=(total - done) / rate_per_s if total is not None and rate_per_s else left,
        evaluates=lines[-1].evaluates,
    )  # fmt: skip


def _inner_units_done(inner: CountSeries, outer: CountSeries | None) -> float:
    now, epochs = inner.newest, (each for each in inner.points[-1].line.counters if each.unit == EPOCH)
    if now.total is None:
        return now.done
    if outer is not None:
        return _rounds_done(inner, outer) * now.total
    return next((each.done for each in epochs if each.name != now.name), 0.0) * now.total + now.done


def _rounds_done(inner: CountSeries, outer: CountSeries) -> float:
    fraction = inner.newest.done / (inner.newest.total or 1.0) if inner.last_at >= outer.last_at else 0.0
    rounds = outer.newest.done
    if not outer.name.startswith("bar") and not outer.starts_at_zero:
        rounds -= 1  # the printed epoch, counted from 1, is not complete yet
    return min(max(0.0, rounds) + fraction, outer.newest.total or rounds + fraction)


def _newest_loss(lines: Sequence[LineMetrics]) -> float | None:
    losses = [line.loss for line in reversed(lines) if line.loss is not None]
    return next(filter(isfinite, losses), losses[0] if losses else None)


def _median_of_field(lines: Sequence[LineMetrics], field: str) -> float | None:
    kept = drop_outliers([value for line in lines if (value := getattr(line, field)) is not None][-32:])
    return median(kept) if kept else None


def _progress_without_counts(lines: Sequence[LineMetrics]) -> LoggedProgress | None:
    trained = [line for line in lines if not line.evaluates] or list(lines)
    found = LoggedProgress(
        done=0.0, unit="", whole=False, loss=_newest_loss(trained), evaluates=lines[-1].evaluates,
        tokens_per_s=_median_of_field(trained, "tokens_per_s"),
        samples_per_s=_median_of_field(trained, "samples_per_s"),
        steps_per_s=_median_of_field(trained, "steps_per_s"),
    )  # fmt: skip
    known = (found.loss, found.tokens_per_s, found.samples_per_s, found.steps_per_s)
    return found if any(each is not None for each in known) else None


# ---- logs that grow


TAIL_BYTES = 262_144
_HEAD_BYTES = 65_536
_LONGEST_BYTES = 4 * LONGEST_LINE
_BINARY = 10
"""A line is binary data if more than 1 in this number of characters is invalid."""


class FollowedLog:
    """Reads the growing log of one program, from byte `start` on. Not thread-safe."""

    def __init__(self, path: str | Path, *, start: int = 0, formats: LineFormats | None = None) -> None:
        self._path = path
        self._start = start
        self._formats = formats
        self._tracker = MetricTracker(formats)
        self._identity: tuple[int, int] | None = None
        self._state: tuple[int, int, int] | None = None
        self._tracked: LoggedProgress | None = None
        self._head_bytes = 0

    def track(self, *, at_s: float) -> LoggedProgress | None:
        """Return the progress, or None if the log cannot be read or has no metrics. `at_s`: time of a monotonic
        clock.
        """
        try:
            with open(self._path, "rb", buffering=0) as log:
                status = os.fstat(log.fileno())
                learned = self._formats.learned_count if self._formats is not None else 0
                identity, state = (status.st_dev, status.st_ino), (status.st_size, status.st_mtime_ns, learned)
                if identity != self._identity or (self._state is not None and status.st_size < self._state[0]):
                    self._identity, self._state, self._head_bytes = identity, None, 0
                    self._tracker = MetricTracker(self._formats)
                if state != self._state:
                    self._read_head(log.fileno(), status.st_size)
                    lines = read_newest_lines(log.fileno(), status.st_size, start=self._start)
                    self._tracked = self._tracker.track(lines, at_s=at_s)
                    self._state = state
        except OSError:
            return None
        return self._tracked

    def _read_head(self, descriptor: int, size: int) -> None:
        if self._head_bytes < min(size - self._start, _HEAD_BYTES):
            head = os.pread(descriptor, _HEAD_BYTES, self._start)
            self._head_bytes = len(head)
            self._tracker.totals = read_stated_totals(split_redraws(head.decode("utf-8", "replace")))


def read_newest_lines(descriptor: int, size: int, *, start: int = 0) -> Iterator[str]:
    """Yield the last lines of a file, newest first, back to byte `start`, without incomplete and too long lines."""
    reach = max(start, size - TAIL_BYTES)
    lines = os.pread(descriptor, size - reach, reach).replace(b"\r", b"\n").replace(b"\0", b"\n").split(b"\n")
    if not lines[-1].rstrip(b" ").endswith((b"]", b"}")):
        lines.pop()  # the program is still writing the last line
    for line in reversed(lines if reach == start else lines[1:]):
        if line and len(line) <= _LONGEST_BYTES and not line.isspace():
            text = line.decode("utf-8", "replace")
            if _BINARY * text.count("\ufffd") <= len(text):
                yield text
