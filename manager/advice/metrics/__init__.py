"""Metrics, progress and time left of a program, from the lines that it prints, without a change to it (SchedMate §3.2).

reading.py       one line and its metrics (keys.py: names and values; counts.py: counts and bars; numerals.py: numbers)
line_metrics.py  what one line says
series.py        counts over time, and which of them is the progress
pace.py          the rate of a count (robust.py: medians and their spread)
tracker.py       the progress by the newest lines; the slowdown between two of them (§4.1)
settings.py      how long a program says at its start that it is going to run
follow.py        the end of a log that grows
"""

from __future__ import annotations

from stoker.manager.advice.metrics.follow import FollowedLog
from stoker.manager.advice.metrics.line_metrics import Counter, LineMetrics
from stoker.manager.advice.metrics.reading import read_metrics
from stoker.manager.advice.metrics.tracker import LoggedProgress, MetricTracker, Slowdown, Tracked, slowdown

__all__ = [
    "Counter", "FollowedLog", "LineMetrics", "LoggedProgress", "MetricTracker", "Slowdown", "Tracked", "read_metrics",
    "slowdown",
]  # fmt: skip
