"""Metrics, progress and time left of a program, from the lines that it prints, without a change to it (SchedMate §3.2).

names.py    the table of names of metrics, and their values in a line
lines.py    one line and its metrics, with counts and progress bars
series.py   counts over time, which of them is the progress, and its rate
tracker.py  the progress by the newest lines of a log that grows; the slowdown between two of them (§4.1)
"""

from __future__ import annotations

from stoker.manager.advice.metrics.lines import Counter, LineMetrics, read_metrics
from stoker.manager.advice.metrics.tracker import (
    FollowedLog,
    LoggedProgress,
    MetricTracker,
    Slowdown,
    Tracked,
    slowdown,
)

__all__ = [
    "Counter", "FollowedLog", "LineMetrics", "LoggedProgress", "MetricTracker", "Slowdown", "Tracked", "read_metrics",
    "slowdown",
]  # fmt: skip
