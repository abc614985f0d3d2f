"""One printed line, and its metrics (SchedMate §3.2). Pure.

The paper's tracker filters lines by embeddings and reads what is left with a language model. Programs print their
metrics in few forms, so here one regular expression filters, and tables of names and counts read (keys.py, counts.py):
thousands of lines a second on one core, and the same answer each time.

A line is progress if it has a count with a total, or a count next to something that only a running program knows (a
loss, a rate, a time). Learning rates, numbers of epochs and seeds are known before: a dump of them is no metric.
"""

from __future__ import annotations

import re

from stoker.manager.advice.metrics.counts import EPOCH, STEP, Bar, bar, counters, with_stated_totals
from stoker.manager.advice.metrics.keys import pairs
from stoker.manager.advice.metrics.line_metrics import Counter, LineMetrics
from stoker.manager.advice.metrics.numerals import line_time

LONGEST_LINE = 4096
"""Characters. A longer line is data, not a report."""

_REDRAWN = re.compile(r"[\r\n\x00\x08\x0b\x0c]+|\x1b\[\d*[AF]")
_ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])|[\x00-\x08\x0e-\x1f\x7f]")
_WORTH_READING = re.compile(
    r"\d\s?/\s?\d|\d (?:out )?of \d|loss|[kM]?it \[|/s\b|/sec|step|iter|epoch|\bep\b|batch|update|time|elapsed|eta\b"
    r"|\d%|nll|cost|rmse|logloss|error|mae\b|mse\b|\bl[12]:|wps|tps",
    re.IGNORECASE,
)
_SETTINGS_START = re.compile(
    r"\s*(?:namespace\(|\w*(?:config|arguments|args|params|settings)\s?[({:=]|(?:\S*/)?(?:python|torchrun|srun|sbatch|deepspeed|"
    r"accelerate|mpirun)\S* |--\w|#|\+ |usage:|export )",
    re.IGNORECASE,
)
_SETTING = re.compile(
    r"(?<![A-Za-z0-9])(?:\w*batch_?size|optim\w*|weight_?decay|\w*seed|\w*dropout|hidden_\w+|n(?:um)?_\w+|warmup\w*"
    r"|max_\w+|min_\w+|gamma|beta\w*|momentum|model_\w+|data_?\w*|output_\w+|\w+_dir|save_\w+|log_\w+|eval_\w+|vocab_\w+"
    r"|block_size|epochs|patience|device|dtype|depth|width|eta|max_depth|verbosity|scheduler)['\"]?\s*[:=]",
    re.IGNORECASE,
)
_SUMMARY = re.compile(r"\btrain_runtime\b|\btraining (?:took|complete|finished)", re.IGNORECASE)
"""Means over a run that is over."""
_TRACE = re.compile(r"\s*(?:File \".*\", line \d+|Traceback|at \S+:\d+|\S*(?:Error|Exception|Warning): )")
_RANK = re.compile(
    r"\s*(?:\[?\(?(?:\w*rank|default|worker|node\d+ gpu)[\s:=]?(?P<rank>\d{1,5})\)?\]?:?\s"
    r"|\[\d+,(?P<mpi>\d+)\]<std\w+>:\s?"
    r"|\(\w+ pid=(?P<pid>\d+)[^)]*\)\s)",
    re.IGNORECASE,
)
_INNER_RANK = re.compile(r"\[rank (?P<rank>\d{1,5})\]", re.IGNORECASE)
_LABEL = re.compile(r"\s{0,3}(?P<rank>\d{1,4}): (?=.*\d)")
_EVALUATES = re.compile(
    r"(?<![A-Za-z])(?:eval\w*|valid\w*|val|test(?:ing)?|dev|predict\w*|generating|sanity checking)(?![A-Za-z])", re.I
)
_TRAINS = re.compile(r"train|fit", re.IGNORECASE)

_LEADING_ROUNDS = re.compile(r"\s*(\d+)\s?/\s?(\d+)\s")
"""In front of a bar: the epoch, in a column."""


def redraws(text: str) -> list[str]:
    """The texts that a line shows one after the other, oldest first: a bar is drawn again after a carriage return."""
    return [part for part in _REDRAWN.split(text) if part and not part.isspace()]


def read_metrics(line: str) -> LineMetrics | None:
    """The metrics of a line; of a line with several redraws, those of the last one that has any."""
    for shown in reversed(redraws(line)):
        if len(shown) <= LONGEST_LINE and _WORTH_READING.search(shown):
            metrics = _read(_ESCAPES.sub("", shown))
            if metrics is not None:
                return metrics
    return None


def _read(text: str) -> LineMetrics | None:
    rank, text = _rank(text)
    line_s, text = line_time(text)
    if rank is None:
        rank, text = _rank(text)
    inner = _INNER_RANK.search(text, 0, 120)
    if inner:
        rank, text = int(inner["rank"]), text[: inner.start()] + text[inner.end() :]
    if _SETTINGS_START.match(text) or _TRACE.match(text) or _SUMMARY.search(text):
        return None
    text = text.strip()
    drawn = bar(text)
    counted = _bar_counters(drawn) if drawn else counters(text)
    values, evaluated = pairs(drawn.post if drawn else text)
    if drawn and drawn.elapsed_s is not None:
        values["elapsed_s"] = drawn.elapsed_s
        if drawn.eta_s is not None:
            values["eta_s"] = drawn.eta_s
    if not _tells_progress(text, counted, values, evaluated):
        return None
    if step_s := values.pop("step_s", 0.0):
        values.setdefault("steps_per_s", 1.0 / step_s)
    return LineMetrics(
        counters=tuple(with_stated_totals(counted, text)),
        line_s=line_s,
        rank=rank,
        evaluates=evaluated or _evaluates(drawn.before if drawn else text),
        **{name: value for name, value in values.items() if name in LineMetrics.__struct_fields__},
    )


def _rank(text: str) -> tuple[int | None, str]:
    if found := _RANK.match(text):
        return int(found["rank"] or found["mpi"] or found["pid"]), text[found.end() :]
    if (found := _LABEL.match(text)) and counters(text[found.end() :]):
        return int(found["rank"]), text[found.end() :]
    return None, text


def _bar_counters(drawn: Bar) -> list[Counter]:
    """The bar's own count, and what the text before it counts (`Epoch 3/10: 45%|...`)."""
    around = [each for each in counters(drawn.before) if each.unit != drawn.counter.unit]
    if not around and (leading := _LEADING_ROUNDS.match(drawn.before)) and int(leading[1]) <= int(leading[2]):
        around = [Counter(EPOCH, EPOCH, float(leading[1]), float(leading[2]))]
    return [*around, drawn.counter]


def _tells_progress(text: str, counted: list[Counter], values: dict[str, float], evaluated: bool) -> bool:
    measured = values.keys() - {"learning_rate", "time_s", "eta_s"}
    if evaluated and counted:
        return True
    if not ("loss" in values and counted) and len(_SETTING.findall(text)) >= 2:
        return False
    if any(each.total is not None for each in counted):
        return True
    if not counted:
        return bool(measured & {"loss", "steps_per_s", "tokens_per_s"})
    if counted[0].name == "[]" and "loss" not in values:
        return False
    return bool(measured) or ("time_s" in values and any(each.unit == STEP for each in counted))


def _evaluates(text: str) -> bool:
    """True if the text in front of its first number names an evaluation, and no training."""
    start = re.split(r"\d", text, maxsplit=1)[0]
    return bool(_EVALUATES.search(start)) and not _TRAINS.search(start)
