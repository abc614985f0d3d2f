"""Metrics, progress and time left of a program, from the lines that it prints (SchedMate §3.2).

names.py    metric names, and their values in a line
lines.py    the metrics, counts and progress bars of one line
formats.py  line formats that a language model has explained
series.py   counts over time: which count shows the progress, and its rate
tracker.py  the progress in a growing log, and slowdowns (§4.1)
"""

from stoker.manager.advice.metrics.formats import LineFormats
from stoker.manager.advice.metrics.lines import LineMetrics, read_metrics
from stoker.manager.advice.metrics.tracker import FollowedLog, LoggedProgress, MetricTracker, slowdown

__all__ = ["FollowedLog", "LineFormats", "LineMetrics", "LoggedProgress", "MetricTracker", "read_metrics", "slowdown"]
