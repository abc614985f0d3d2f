"""Read pairs of metric name and value from a line: `"loss": 0.3`, `Loss 0.3 (0.4)`, `elapsed time per iteration (ms):
512.3`. A value with the unit of a rate (`3.02it/s`, `100ms/step`) needs no name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import date

NUMBER = (
    r"[+-]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d[\d_]*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?(?![\d.]*[\d])"
    r"|[+-]?(?:nan|inf)\b"
)
WHOLE = r"\d{1,3}(?:,\d{3})+|\d+"
CLOCK = r"(?:(?:\d+) days?,? ?)?\d{1,4}:\d\d(?::\d\d)?(?:\.\d+)?"
"""Pattern of a duration with colons: 1:02, 1:02:03, 1 day, 2:03:04."""
WORDED = (
    r"(?:\d+(?:\.\d+)?\s?(?:days?|d|hours?|hrs?|h)[,\s]*)?(?:\d+(?:\.\d+)?\s?(?:minutes?|mins?|m)\b[,\s]*)?"
    r"(?:\d+(?:\.\d+)?\s?(?:seconds?|secs?|s|ms)\b)?"
)
"""Pattern of a duration with units: 1h 2m 3s, 5 min, 30s."""

_SCALES = {"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
_SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_WORDED_PART = re.compile(r"(\d+(?:\.\d+)?)\s?(ms|days?|d|hours?|hrs?|h|minutes?|mins?|m|seconds?|secs?|s)\b")
_DATED = re.compile(
    r"(?:\[[\w.-]{1,40}\] )?\W{0,3}(?:(?P<year>\d{4})[-/](?P<month>\d\d)[-/](?P<day>\d\d)[ T_]"
    r"|(?P<month2>\d\d)[-/](?P<day2>\d\d) "
    r"|[IWEF](?P<month3>\d\d)(?P<day3>\d\d) )?"
    r"(?P<hour>[012]\d):(?P<minute>[0-5]\d):(?P<second>[0-5]\d)(?:[.,:](?P<part>\d{1,6}))?(?:Z|[+-]\d\d:?\d\d)?\b\]?"
)


def join_alternative_patterns(patterns: Iterable[str]) -> str:
    groups: dict[str, list[str]] = {}
    for pattern in patterns:
        groups.setdefault(pattern[0], []).append(pattern[1:])
    return "|".join(f"{letter}(?:{'|'.join(rests)})" for letter, rests in groups.items())


def lower_keeping_length(text: str) -> str:
    low = text.lower()
    return low if len(low) == len(text) else text


def parse_number(text: str, scale: str = "") -> float:
    return float(text.replace(",", "").replace("_", "")) * _SCALES.get(scale, 1.0)


def seconds_per_unit(unit: str) -> float | None:
    low = unit.lower()
    starts = (("sec", "s"), ("min", "m"), ("hour", "h"), ("hr", "h"), ("day", "d"), ("milli", "ms"))
    return _SECONDS.get(low) or next((_SECONDS[short] for start, short in starts if low.startswith(start)), None)


def parse_duration_s(text: str) -> float | None:
    """Return the seconds of a duration that CLOCK or WORDED matches."""
    if ":" not in text:
        parts = _WORDED_PART.findall(text)
        return sum(float(value) * (seconds_per_unit(unit) or 0.0) for value, unit in parts) if parts else None
    days, _, rest = text.rpartition("day")
    seconds = 0.0
    for field in rest.lstrip("s, ").split(":"):
        seconds = seconds * 60 + float(field)
    return seconds + float(days or 0) * _SECONDS["d"]


def split_off_line_time(text: str) -> tuple[float | None, str]:
    """Return the time at the start of a line, in seconds from an unknown origin, and the rest."""
    found = _DATED.match(text)
    if found is None:
        return None, text
    month = found["month"] or found["month2"] or found["month3"]
    day = found["day"] or found["day2"] or found["day3"]
    try:
        days = date(int(found["year"] or 2024), int(month), int(day)).toordinal() if month else 0
    except ValueError:
        return None, text
    seconds = int(found["hour"]) * 3600 + int(found["minute"]) * 60 + int(found["second"])
    return days * 86400.0 + seconds + float(f"0.{found['part'] or 0}"), text[found.end() :]


# ---- names and values


_NAMES = {
    "loss0": "total loss|overall loss|loss train total",
    "loss1": "loss|lm loss|nll|cost|objective",
    "loss2": "average loss|avg loss|running loss|mean loss|loss avg|nll loss|mlm loss|ce loss|cross entropy|xent",
    "loss3": "rmse|mae|mse|logloss|mlogloss|binary_logloss|multi_logloss|merror|error|l1|l2",
    "learning_rate": "learning rate|l.r.|lr",
    "steps_per_s": "steps per second|steps per sec|iterations per second|it per sec|iters per sec|ups|steps/s|steps/sec"
    "|it/s|iter/s|iters/s|batches per second",
    "step_s": "elapsed time per iteration|time per iteration|time per step|step time|iter time|iteration time"
    "|batch time|seconds per step|sec per step|s/step|sec/step|s/it|s/iter|sec/iter|time/step|time/iter|step duration",
    "step_ms": "step time ms|ms/step|ms per step|iter time ms|time ms|ms/iter",
    "tokens_per_s": "tokens per second|tokens per sec|tokens/s|tokens/sec|tok/s|tok/sec|token/s|tps|wps"
    "|words per second|words/s|words/sec|tokens/s/device|tokens/s/gpu|tokens/sec/gpu|tokens per second per gpu|tgs",
    "samples_per_s": "samples per second|samples per sec|samples/s|samples/sec|examples per second|examples per sec"
    "|examples/s|examples/sec|images/s|images/sec|img/s|imgs/s|images per second|throughput|currsamplespersec"
    "|runningavgsamplespersec|sequences per second",
    "elapsed_s": "elapsed|elapsed time|time elapsed|train runtime|wall|wall time|total time|running time",
    "eta_s": "eta|time left|remaining|time remaining|remaining time|estimated time remaining",
    "time_s": "time",
}
"""Names that programs print for each metric. `loss0` is the most informative loss. Blanks or any of `_-/.` may separate
words.
"""

_EVALUATION = r"val(?:id(?:ation)?)?(?:_\d+'s)?|eval(?:uation)?|test|dev"
_UNIT = r"us|µs|ms|secs?|seconds?|s|minutes?|mins?|hours?|hrs?|h|k|m"


_METRIC = {re.sub(r"[\s_\-/.]", "", name): metric for metric, names in _NAMES.items() for name in names.split("|")}
_LONGEST_FIRST = sorted((name for names in _NAMES.values() for name in names.split("|")), key=len, reverse=True)
_SPELLINGS = [r"[\s_\-/.]?".join(map(re.escape, re.split(r"[ _]", name))) for name in _LONGEST_FIRST]
_PAIR = re.compile(
    rf"(?<![a-z0-9_])(?P<kind>(?:{_EVALUATION}|train(?:ing)?(?:'s)?)[\s_/.:\-]{{1,2}})?"
    rf"(?P<key>{join_alternative_patterns(_SPELLINGS)})['\"]?\s?"
    rf"(?:\((?P<key_unit>ms|s|secs?|seconds?)\))?(?P<mark>\s*[:=]\s*|\s+)['\"\[(]{{0,2}}"
    rf"(?:(?P<clock>{CLOCK})|(?P<value>{NUMBER})(?:\s?(?P<unit>{_UNIT})(?![a-z/]))?(?P<more>(?:\s?\d+\s?[hms]\b)*))"
    r"(?P<after>\s?[%/])?"
)
_RATE_SIGN = re.compile(
    r"(?:/|\bper )\s?(?:s(?:ec(?:onds?)?)?\b(?!/)|(?:it|iter|iteration|step|batch|update)\b)", re.IGNORECASE
)
_RATE_REACH = 40
"""Maximum number of characters between a value and a rate unit (`/s`) after it."""
_PER_SECOND = re.compile(
    rf"(?<![\w.])(?P<value>{NUMBER})\s?(?P<scale>[kKMG](?=[\s/a-zA-Z]))?\s?"
    r"(?:(?P<steps>it|iters?|iterations?|steps?|batch(?:es)?|updates?)|(?P<tokens>tok(?:en)?s?|words?|w)"
    r"|(?P<samples>samples?|imgs?|images?|ex|examples?|seqs?|sequences?|sents?|sentences?)|)"
    r"\s?(?:/|\bper )\s?s(?:ec(?:onds?)?)?$",
    re.IGNORECASE,
)
_SECONDS_PER = re.compile(
    rf"(?<![\w.])(?P<value>{NUMBER})\s?(?P<unit>us|ms|s|secs?|seconds?|min)\s?(?:/|\bper )\s?"
    r"(?:it|iter|iteration|step|batch|update)$",
    re.IGNORECASE,
)
_RATES = frozenset({"steps_per_s", "step_s", "tokens_per_s", "samples_per_s"})
_VALUE_BEFORE = re.compile(r"(?<![=:\w])\d[\d.,]*[kKMG]?\s?$")
"""Matches a number before the name of its metric: `12.5k tokens/s 0.5 s/step`."""
_OTHER_LOSS = re.compile(
    rf"(?<![A-Za-z0-9_])(?!(?:{_EVALUATION}|best|min|max|last)[\s_/.\-])[A-Za-z]\w{{0,20}}[ _/.-]?loss['\"]?"
    rf"\s*[:=]\s*(?P<value>{NUMBER})",
    re.IGNORECASE,
)
_WORDED_VALUE = re.compile(WORDED)
_NESTED = re.compile(r"[\s_\-/.'\"]")


def read_named_metrics(text: str) -> tuple[dict[str, float], bool]:
    """Return a line's values by metric (`step_s` and fields of LineMetrics), and True if the line reports an evaluation
    without a training loss. Of several losses, return the most informative; of other repeated metrics, the first.
    """
    found: dict[str, float] = {}
    evaluated = False
    low = lower_keeping_length(text)
    for pair in _PAIR.finditer(low):
        metric = _METRIC.get(_NESTED.sub("", pair["key"]))
        if metric is None or (pair["after"] and pair["after"].strip() == "/"):
            continue
        near = max(0, pair.start() - _RATE_REACH)
        if metric in _RATES and pair["mark"].isspace() and _VALUE_BEFORE.search(text, near, pair.start()):
            continue
        if pair["kind"] and not pair["kind"].startswith("train"):
            evaluated = True
        elif not (pair["kind"] and metric in ("elapsed_s", "time_s")):
            value = _parse_metric_value(text, pair, metric)
            if value is not None and metric == "step_ms":
                found.setdefault("step_s", value / 1000)
            elif value is not None:
                found.setdefault(metric, value)
    _add_rates(text, found)
    losses = [found.pop(name) for name in ("loss0", "loss1", "loss2", "loss3") if name in found]
    if not losses and "loss" in low and (other := _OTHER_LOSS.search(text)):
        losses = [parse_number(other["value"])]
    if losses:
        found["loss"] = losses[0]
    return found, evaluated and not losses


def _parse_metric_value(text: str, pair: re.Match[str], metric: str) -> float | None:
    timed = metric in ("elapsed_s", "eta_s", "time_s", "step_s")
    if pair["clock"]:
        return parse_duration_s(pair["clock"]) if timed else None
    start, end = pair.span("unit")
    unit = pair["key_unit"] or (text[start:end] if pair["unit"] else "")
    if not timed:
        # The unit in `loss 3 s` shows that 3 is a time, not a loss.
        known = unit in ("", "k", "K", "M") and not pair["more"]
        return parse_number(pair["value"], unit) if known else None
    if pair["more"] or unit.lower() in ("h", "m"):
        worded = _WORDED_VALUE.match(text, pair.start("value"))
        return parse_duration_s(worded[0]) if worded else None
    seconds = seconds_per_unit(unit) if unit else 1.0
    return parse_number(pair["value"]) * seconds if seconds is not None else None


def _add_rates(text: str, found: dict[str, float]) -> None:
    for sign in _RATE_SIGN.finditer(text):
        within = text[max(0, sign.start() - _RATE_REACH) : sign.end()]
        if rate := _PER_SECOND.search(within):
            metric = "steps_per_s" if rate["steps"] else "tokens_per_s" if rate["tokens"] else "samples_per_s"
            found.setdefault(metric, parse_number(rate["value"], rate["scale"] or ""))
        elif rate := _SECONDS_PER.search(within):
            found.setdefault("step_s", parse_number(rate["value"]) * (seconds_per_unit(rate["unit"]) or 1.0))
