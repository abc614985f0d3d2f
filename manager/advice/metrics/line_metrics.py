"""What one printed line says. Pure."""

from __future__ import annotations

import msgspec


class Counter(msgspec.Struct, frozen=True):
    """A count that a line shows. `name`: what tells it from other counts of the log, without numbers. `total`: None if
    the line does not say it."""

    name: str
    unit: str
    done: float
    total: float | None = None


class LineMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """The metrics of one line. None is what the line does not say.

    `time_s`: a time that is that of a step in some programs, and the time since the start in others. `line_s`: when the
    line was printed; only differences mean something. `evaluates`: the line belongs to an evaluation in between.
    """

    counters: tuple[Counter, ...] = ()
    loss: float | None = None
    learning_rate: float | None = None
    steps_per_s: float | None = None
    tokens_per_s: float | None = None
    samples_per_s: float | None = None
    elapsed_s: float | None = None
    eta_s: float | None = None
    time_s: float | None = None
    line_s: float | None = None
    rank: int | None = None
    evaluates: bool = False
