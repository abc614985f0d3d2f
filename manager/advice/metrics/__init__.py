"""Read metrics, progress and time left of a program from the lines that the program prints (SchedMate §3.2).

names.py    find metric names and their values in a line
lines.py    read the metrics, counts and progress bars of one line
formats.py  store line formats that a language model has explained
series.py   choose the count that shows the progress, and determine its rate
tracker.py  follow the progress in a growing log, and find slowdowns (§4.1)
"""

from stoker.manager.advice.metrics.formats import LineFormats
from stoker.manager.advice.metrics.lines import LineMetrics, read_metrics
from stoker.manager.advice.metrics.tracker import FollowedLog, LoggedProgress, MetricTracker, compute_slowdown

__all__ = [
    "FollowedLog",
    "LineFormats",
    "LineMetrics",
    "LoggedProgress",
    "MetricTracker",
    "compute_slowdown",
    "read_metrics",
]
