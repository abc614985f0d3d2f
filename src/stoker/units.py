"""Parse and format sizes and times in text (`"4 GB"`, `"90 s"`, `"1h30m"`).

Prefixes are decimal or binary (`GB` = 10^9, `GiB` = 2^30). A size needs a unit, even as a Python number. A duration in
text needs a unit; a Python number means seconds. Zero needs no unit.
"""

from __future__ import annotations

import math
import re
import signal

from stoker.errors import UnitError

_BYTES = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9, "t": 10**12, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_SECONDS = {"s": 1.0, "sec": 1.0, "ms": 1e-3, "us": 1e-6, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_UNITS_OF = {"duration": ("h", "min"), "size": (" GB", " MB"), "rate": (" GB/s", " Gbit/s")}
_SURELY_BYTES = 1e7  # a larger number must be in bytes, because no machine has 10 million MB
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)")
_RATE = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]+)\s*/\s*s")


def parse_bytes(text: str | int | float) -> int:
    """Return the number of bytes in `"4 GB"` or `"512MiB"`.

    Args:
        text: A size.

    Raises:
        UnitError: The size is invalid, or lacks its unit.
    """
    if isinstance(text, int | float) and not isinstance(text, bool):
        _refuse_number(text, "size")
        return 0
    found = _NUMBER.fullmatch(str(text).rstrip())
    if found and not found[2] and float(found[1]):
        raise without_unit(repr(text), number=found[1], what="size")
    if not found or found[2].lower() not in _BYTES:
        raise UnitError(f"{text!r} is not a size; write a number and one of B, kB, MB, GB, TB, KiB, MiB, GiB, TiB")
    return int(float(found[1]) * _BYTES[found[2].lower()])


def parse_rate(text: str | int | float) -> float:
    """Return the rate in `"1.2 GB/s"`, `"10 Gbit/s"` or `"unlimited"` in bytes per second.

    Args:
        text: A rate.

    Raises:
        UnitError: The rate is invalid, or lacks its unit.
    """
    if isinstance(text, int | float) and not isinstance(text, bool):
        _refuse_number(text, "rate")
        return 0.0
    if str(text).strip() == "unlimited":
        return math.inf
    found = _RATE.fullmatch(str(text).strip())
    bits = found is not None and found[2].lower().endswith("bit")
    prefix = found[2][:-3] if found and bits else found[2] if found else ""
    if not found or prefix.lower() not in _BYTES or (not bits and not prefix.endswith("B")):
        raise UnitError(f"{text!r} is not a rate; write a number and a unit, as in 1.2 GB/s or 10 Gbit/s")
    return float(found[1]) * _BYTES[prefix.lower()] / (8 if bits else 1)


def parse_seconds(text: str | int | float) -> float:
    """Return the number of seconds in `"90 s"`, `"1h30m"`, `"2 min"` or a plain number.

    Args:
        text: A duration.

    Raises:
        UnitError: The duration is invalid, or lacks its unit.
    """
    if isinstance(text, int | float) and not isinstance(text, bool):
        if not text >= 0:  # `not >=` also refuses NaN
            raise UnitError(f"{text} is not a duration: write a number of seconds, 0 or more")
        return float(text)
    rest, total = str(text).rstrip(), 0.0
    while rest:
        found = _NUMBER.match(rest)
        if found and not found[2] and not rest[found.end() :]:
            if float(found[1]):
                raise without_unit(repr(text), number=found[1])
            return total
        if not found or found[2].lower() not in _SECONDS:
            break
        total += float(found[1]) * _SECONDS[found[2].lower()]
        rest = rest[found.end() :]
    if rest or not str(text).strip():
        raise UnitError(f"{text!r} is not a duration; write a number and one of ms, s, m, min, h, d (as in 1h30m)")
    return total


def without_unit(text: str, *, number: str, what: str = "duration") -> UnitError:
    """Return the error for a value without a unit.

    Args:
        text: The written value.
        number: The number without a unit.
        what: `duration`, `size` or `rate`.
    """
    one, other = _UNITS_OF[what]
    write = f'"{number}{one}" or "{number}{other}"'
    if what == "size" and float(number) >= _SURELY_BYTES:
        write = f'"{number} B" (if bytes are meant: {show_bytes(float(number))})'
    return UnitError(f"{text} is not a {what}: the unit of {number} is missing; write {write}")


def _refuse_number(number: float, what: str) -> None:
    """Raise UnitError for a number without a unit. The number 0 is valid."""
    if not 0 <= number < math.inf:
        raise UnitError(f"{number} is not a {what}: write a number, 0 or more, and a unit")
    if number:
        raise without_unit(str(number), number=f"{number:.15g}", what=what)


def show_bytes(size: float) -> str:
    """Return a size as `7.1 GB`: at most three digits, decimal prefixes.

    Args:
        size: Bytes.
    """
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(size) >= factor * 0.9995:
            value = size / factor
            return f"{value:.0f} {unit}" if value >= 99.5 else f"{value:.1f} {unit}"
    return f"{size:.0f} B"


def show_seconds(seconds: float) -> str:
    """Return a duration as text: `0.4 s`, `12 s`, `1 min 22 s`, `2 h 14 min`.

    Args:
        seconds: A duration; infinity is `unlimited`.
    """
    if seconds == math.inf:
        return "unlimited"
    if seconds < 0.0995:
        return f"{seconds * 1e3:.{int(seconds < 0.0095)}f} ms"
    if seconds < 59.5:
        return f"{seconds:.{int(seconds < 9.95)}f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


def show_about(seconds: float) -> str:
    """Return a forecast as rounded text: `8.2 s`, `4 min 20 s`, `22 min`, `3 h 10 min`.

    Args:
        seconds: A duration.
    """
    step_s = 1e-9 if seconds < 60 else 10 if seconds < 600 else 60 if seconds < 7200 else 600
    return show_seconds(step_s * round(seconds / step_s))


def forecast_tolerance_s(left_s: float) -> float:
    """Return the tolerance of a forecast in seconds: 10 %, at least 1 s.

    Args:
        left_s: Seconds until the forecast event.
    """
    return max(1.0, 0.1 * left_s)


def show_margin(margin_s: float, *, left_s: float) -> str:
    """Return how an expected end compares with its deadline: `in time by 1 min`, `late by 2 h`, or `about in time`.

    Args:
        margin_s: Seconds from the end to the deadline; negative if late.
        left_s: Seconds until the end.
    """
    if margin_s >= 1.0:
        return f"in time by {show_seconds(margin_s)}"
    return f"late by {show_seconds(-margin_s)}" if -margin_s >= forecast_tolerance_s(left_s) else "about in time"


def show_signal(number: int) -> str:
    """Return the name of a signal, or its number if it has no name (`signal 35`).

    Args:
        number: A signal number.
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def show_line(text: str) -> str:
    """Return a text on one line, with single spaces.

    Args:
        text: The text.
    """
    return " ".join(text.split())


def first_words(text: str) -> str:
    """Return the first line of a text. If that line ends with a colon, add the second line.

    Args:
        text: The text.
    """
    first, _, rest = text.partition("\n")
    second = rest.partition("\n")[0].strip()
    return f"{first} {second}" if second and first.endswith(":") else first


MOST_S = 1e10
"""Longest valid time in seconds, 300 years."""
LONGEST_S = 1e9
"""Longest time in an option in seconds, 30 years. The current Unix time plus this limit is below MOST_S."""
MOST_BYTES = 1 << 60
MOST_NUMBER = 1 << 40
"""Highest valid id of a library, block, call or frame."""
MOST_AT_ONCE = 100_000
"""Maximum number of slots of a library, devices of a context, or members of a gang."""
