"""Numbers, durations and times of day as programs print them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import date
from math import inf, nan

NUMBER = (
    r"[+-]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d[\d_]*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?(?![\d.]*[\d])"
    r"|[+-]?(?:nan|inf)\b"
)
"""A number, with separators of thousands or without."""
WHOLE = r"\d{1,3}(?:,\d{3})+|\d+"
CLOCK = r"(?:(?:\d+) days?,? ?)?\d{1,4}:\d\d(?::\d\d)?(?:\.\d+)?"
"""A duration with colons: 1:02, 1:02:03, 1 day, 2:03:04."""
WORDED = (
    r"(?:\d+(?:\.\d+)?\s?(?:days?|d|hours?|hrs?|h)[,\s]*)?(?:\d+(?:\.\d+)?\s?(?:minutes?|mins?|m)\b[,\s]*)?"
    r"(?:\d+(?:\.\d+)?\s?(?:seconds?|secs?|s|ms)\b)?"
)
"""A duration with words: 1h 2m 3s, 5 min, 30s."""

_SCALES = {"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
_SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_WORDED_PART = re.compile(r"(\d+(?:\.\d+)?)\s?(ms|days?|d|hours?|hrs?|h|minutes?|mins?|m|seconds?|secs?|s)\b")
_DATED = re.compile(
    r"(?:\[[\w.-]{1,40}\] )?\W{0,3}(?:(?P<year>\d{4})[-/](?P<month>\d\d)[-/](?P<day>\d\d)[ T_]"
    r"|(?P<month2>\d\d)[-/](?P<day2>\d\d) "
    r"|[IWEF](?P<month3>\d\d)(?P<day3>\d\d) )?"
    r"(?P<hour>[012]\d):(?P<minute>[0-5]\d):(?P<second>[0-5]\d)(?:[.,:](?P<part>\d{1,6}))?(?:Z|[+-]\d\d:?\d\d)?\b\]?"
)


def any_of(patterns: Iterable[str]) -> str:
    """A pattern that matches one of these, the first that fits. They are grouped by their first letter, as the engine
    tries one after the other at each place of a line."""
    groups: dict[str, list[str]] = {}
    for pattern in patterns:
        groups.setdefault(pattern[0], []).append(pattern[1:])
    return "|".join(f"{letter}(?:{'|'.join(rests)})" for letter, rests in groups.items())


def lower(text: str) -> str:
    """The text in lower case, with each character at its place."""
    low = text.lower()
    return low if len(low) == len(text) else text


def number(text: str, scale: str = "") -> float:
    """The value of a number that NUMBER matches, times its suffix (k, M, ...)."""
    plain = text.replace(",", "").replace("_", "").lower()
    if plain.lstrip("+-") in ("nan", "inf"):
        return nan if plain.endswith("nan") else (-inf if plain[0] == "-" else inf)
    return float(plain) * _SCALES.get(scale, 1.0)


def unit_seconds(unit: str) -> float | None:
    """Seconds in a unit of time; None for another unit."""
    low = unit.lower()
    if low in _SECONDS:
        return _SECONDS[low]
    for start, short in (("sec", "s"), ("min", "m"), ("hour", "h"), ("hr", "h"), ("day", "d"), ("milli", "ms")):
        if low.startswith(start):
            return _SECONDS[short]
    return None


def duration_s(text: str) -> float | None:
    """Seconds of a duration that CLOCK or WORDED matches. Two fields with a colon are minutes and seconds."""
    if ":" not in text:
        parts = _WORDED_PART.findall(text)
        return sum(float(value) * (unit_seconds(unit) or 0.0) for value, unit in parts) if parts else None
    days, _, rest = text.rpartition("day")
    fields = [float(field) for field in rest.lstrip("s, ").split(":")]
    seconds = 0.0
    for field in fields:
        seconds = seconds * 60 + field
    return seconds + (float(days) * _SECONDS["d"] if days else 0.0)


def line_time(text: str) -> tuple[float | None, str]:
    """The time at the start of a line, in seconds of an unknown origin, and the line without it. Only differences
    mean something; without a date they are those of a day."""
    found = _DATED.match(text)
    if found is None:
        return None, text
    month = found["month"] or found["month2"] or found["month3"]
    day = found["day"] or found["day2"] or found["day3"]
    days = 0
    if month:
        try:
            days = date(int(found["year"] or 2024), int(month), int(day)).toordinal()
        except ValueError:
            return None, text
    part = float(f"0.{found['part']}") if found["part"] else 0.0
    seconds = int(found["hour"]) * 3600 + int(found["minute"]) * 60 + int(found["second"])
    return days * 86400.0 + seconds + part, text[found.end() :]
