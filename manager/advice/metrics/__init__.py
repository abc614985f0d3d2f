"""Metrics, progress and time left of a program, from the lines that it prints (SchedMate §3.2).

names.py    the table of metric names, and their values in a line
lines.py    one line and its metrics, with counts and progress bars
series.py   counts over time, which of them is the progress, and its rate
tracker.py  the progress by the newest lines of a growing log; the slowdown between two progresses (§4.1)
"""

from stoker.manager.advice.metrics.lines import LineMetrics, read_metrics
from stoker.manager.advice.metrics.tracker import FollowedLog, LoggedProgress, MetricTracker, slowdown

__all__ = ["FollowedLog", "LineMetrics", "LoggedProgress", "MetricTracker", "read_metrics", "slowdown"]
