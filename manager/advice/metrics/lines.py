"""Read the metrics of one log line from counts, progress bars, and pairs of name and value. A count with a total
follows a counting word (step, epoch, ...), is in brackets, or precedes a bar. Other numbers with a slash are dates,
paths or fractions."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from stoker.manager.advice.metrics.names import (
    CLOCK,
    WHOLE,
    join_alternative_patterns,
    lower_keeping_length,
    parse_duration_s,
    parse_number,
    read_named_metrics,
    split_off_line_time,
)


class Counter(msgspec.Struct, frozen=True):
    """A count, such as `step 3/10`. `name` identifies the count within the log."""

    name: str
    unit: str
    done: float
    total: float | None = None


class LineMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """The metrics of one line. `time_s`: seconds per step, or since the start, depending on the program. `line_s`: time
    of the line, from an unknown origin. `learned`: True if a learned format was needed to read the line.
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
    learned: bool = False


# ---- counts and bars


EPOCH, STEP, SAMPLE, BYTE, PERCENT = "epoch", "step", "sample", "byte", "percent"

_UNITS = {
    EPOCH: "epochs|epoch|ep.|ep",
    STEP: "global_step|global step|micro_step|num_updates|train_steps|train_step|training step|steps|step|iterations"
    "|iteration|iters|iter|batches|batch|updates|update|up.|it|round|rounds",
    SAMPLE: "samples|sample|sen.|examples|example|images|image|documents|document|sequences|rows|records|files|file"
    "|items|item|prompts|prompt|claims|claim|tasks|task|trials|trial|episodes|episode|chunks|chunk|shards|shard|games|game",
    "token": "tokens|token",
}
_UNIT = {name.replace(" ", "_"): unit for unit, names in _UNITS.items() for name in names.split("|")}
_WORDS = join_alternative_patterns(
    re.escape(name).replace(r"\ ", "[ _]")
    for name in sorted((name for names in _UNITS.values() for name in names.split("|")), key=len, reverse=True)
)

_TIMES = rf"(?P<elapsed>{CLOCK})(?:<(?P<eta>{CLOCK}|\?))?,?\s*(?P<post>[^\]]*)\]?"
_BAR = re.compile(
    r"(?P<before>.*?)(?P<percent>\d{1,3})%\|[^|]*\|\s*(?P<done>\d+(?:\.\d+)?)(?P<done_scale>[kMGT]?)"
    rf"(?P<unit>[A-Za-z]*)/(?P<total>\d+(?:\.\d+)?)(?P<total_scale>[kMGT]?)[A-Za-z]*\s*\[{_TIMES}",
    re.DOTALL,
)
"""Matches a tqdm progress bar with a total."""
_OPEN_BAR = re.compile(
    rf"(?P<before>.*?)(?<![\w.])(?P<done>\d+(?:\.\d+)?)(?P<done_scale>[kMGT]?)(?P<unit>[A-Za-z]+)\s\[{_TIMES}",
    re.DOTALL,
)
"""Matches a tqdm progress bar without a total: 90it [00:30, 3.02it/s]."""

_OF = rf"(?P<done>{WHOLE})\s*(?:/|\sof\s|\sout of\s)\s*(?P<total>{WHOLE})(?![\w/.-]*[\w/])"
_NAMED = re.compile(rf"(?<![A-Za-z0-9_\-.])(?P<word>{_WORDS})(?P<mark>\s?[#\[(:=]{{0,2}}\s*){_OF}", re.IGNORECASE)
_BRACKETED = re.compile(rf"[\[(]\s*{_OF}(?=\s*[\])(])")
_TRAIN_EPOCH = re.compile(r"(?:^|\s)train: (?P<done>\d+) \[")
_BARRED = re.compile(
    rf"(?:^|(?<=[\s:|]))(?P<done>{WHOLE})\s?/\s?(?P<total>{WHOLE})(?=\s+(?:[\[|(]?[=>.#\-━╸█▌]{{2,}}|\[))|"
    rf"(?:^|(?<=[:|]))\s*(?P<done2>{WHOLE})\s?/\s?(?P<total2>{WHOLE})(?=\s+[A-Za-z_]+\s?[=:])"
)
"""Matches a count (`3/10`) before a progress bar, or at the start of a text before a name and a value."""
_AFTER = re.compile(rf"(?<![\w./-]){_OF}\s+(?P<word>{_WORDS})\b")
_PLAIN_OF = re.compile(rf"(?<![\w./-])(?P<done>{WHOLE})\s(?:of|out of)\s(?P<total>{WHOLE})\b(?![./]\d)", re.IGNORECASE)
_NOT_PROGRESS = re.compile(
    r"(?:gpus?|rank|node|attempt|retry|retries|worker|page|version|part|device|layer|loading|shard|try)\W{0,3}$", re.I
)
_REACH = 32
_NO_COUNT = re.compile(
    r"(?:^|[^a-z])(?:skipped|nan|number of|num|total|max|warmup|every|per|in|last|save\w*|log\w*)\W?$", re.I
)
_NAMED_ALONE = re.compile(
    rf"(?<![A-Za-z0-9_\-.])(?P<word>{_WORDS})(?:\(train\))?[\s#\[(:='\"]{{0,5}}(?P<done>\d+\.\d+|{WHOLE})"
    r"(?:[eE][+]?\d+)?(?![\w,.]*\d)(?!\s?(?:/\s?\d|of\b|[A-Za-z]+/s|ms\b|s\b|%))"
)
_GLUED = re.compile(r"(?<![\w.])(?:\d+-)?(?P<done>\d+)(?P<word>epoch|batch|iter|step)(?![a-z/])")
_LEADING = re.compile(r"^\[(?P<done>\d+)\](?=[\s:])")
_PERCENT = re.compile(r"(?:progress|completed?|done)\W{1,3}(?P<before>\d{1,3}(?:\.\d+)?)\s?%|"
                      r"(?<![\d.])(?P<after>\d{1,3}(?:\.\d+)?)\s?%\s(?:done|complete)", re.IGNORECASE)  # fmt: skip
_DIGITS = re.compile(r"\d[\d.,]*")


def read_progress_bar(text: str) -> tuple[Counter, str, str, dict[str, float]] | None:
    """Return a progress bar's count, the texts before and after it, and its times."""
    found = (_BAR.match(text) if "%|" in text else _OPEN_BAR.match(text)) if "[" in text else None
    if found is None:
        return None
    parts = found.groupdict()
    unit = parts["unit"] or "it"
    total = parse_number(parts["total"], parts["total_scale"]) if parts.get("total") else None
    before = found["before"].strip(" :\t")
    bare = _DIGITS.sub("", before)
    counts_epochs = _UNIT.get(bare.lower().strip(" :#/[]()").rpartition(" ")[2]) == EPOCH
    if re.search(r"[kMG]?i?B/s", found["post"]) or unit in ("B", "iB"):
        counted = BYTE
    elif counts_epochs and not before[-1:].isdigit() and ":" not in before:
        counted = EPOCH
    else:
        counted = _UNIT.get(unit.lower(), STEP)
    counter = Counter(
        "bar " + bare.strip().lower()[:40], counted, parse_number(parts["done"], parts["done_scale"]), total
    )
    stated = {"elapsed_s": found["elapsed"], "eta_s": (found["eta"] or "").strip("?")}
    seconds = {name: parse_duration_s(said) for name, said in stated.items() if said}
    return counter, before, found["post"], {name: known for name, known in seconds.items() if known is not None}


def read_counters(text: str) -> list[Counter]:
    """Return the counts of a line without a progress bar, one per name. A count without a total needs a counting word,
    or brackets at the start.
    """
    text = lower_keeping_length(text)
    found: dict[str, Counter] = {}
    taken: list[tuple[int, int]] = []
    patterns = [_NAMED, _AFTER] if "/" in text or "of" in text else []
    patterns += [_BRACKETED, _BARRED] if "/" in text else []
    patterns += [_PLAIN_OF] if " of " in text else []
    for match in (match for pattern in patterns for match in pattern.finditer(text)):
        parts = match.groupdict()
        done = parse_number(parts["done"] or parts.get("done2") or "0")
        total = parse_number(parts["total"] or parts.get("total2") or "0")
        word = _normalize_word(parts.get("word"))
        before = text[max(0, match.start() - _REACH) : match.start()]
        counts = done <= total and total >= (1 if word else 2) and not _NOT_PROGRESS.search(before)
        if counts and not _overlaps_any(match, taken):
            taken.append(match.span())
            name = word or "of " + "".join(re.findall(r"[a-z]+", before.lower())[-1:])
            found.setdefault(name, Counter(name, _UNIT.get(word, STEP), done, total))
    for glued in _GLUED.finditer(text):
        found.setdefault(glued["word"], Counter(glued["word"], _UNIT[glued["word"]], float(glued["done"])))
    if named := _TRAIN_EPOCH.search(text):
        found[EPOCH] = Counter(EPOCH, EPOCH, float(named["done"]))
    for match in _NAMED_ALONE.finditer(text):
        named_before = _NO_COUNT.search(text, max(0, match.start() - _REACH), match.start())
        if not named_before and not _overlaps_any(match, taken):
            word = _normalize_word(match["word"])
            found.setdefault(word, Counter(word, _UNIT[word], parse_number(match["done"])))
    if not found and (leading := _LEADING.match(text)):
        found["[]"] = Counter("[]", STEP, float(leading["done"]))
    if not found and "%" in text and (percent := _PERCENT.search(text)):
        found[PERCENT] = Counter(PERCENT, PERCENT, parse_number(percent["before"] or percent["after"]), 100.0)
    return list(found.values())


def _overlaps_any(match: re.Match[str], taken: Iterable[tuple[int, int]]) -> bool:
    return any(match.start() < end and start < match.end() for start, end in taken)


def _add_stated_totals(counted: list[Counter], text: str) -> list[Counter]:
    low = text.lower()
    totals = read_stated_totals([low]) if any(word in low for word in ("total", "max", "num")) else {}
    return [
        msgspec.structs.replace(each, total=totals[each.unit])
        if each.total is None and each.done <= totals.get(each.unit, -1.0)
        else each
        for each in counted
    ]


def _normalize_word(word: str | None) -> str:
    return (word or "").lower().replace(" ", "_")


LONGEST_LINE = 4096

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
"""Matches an epoch (`3/10`) in a column before a progress bar."""


def split_redraws(text: str) -> list[str]:
    return [part for part in _REDRAWN.split(text) if part and not part.isspace()]


def read_metrics(line: str) -> LineMetrics | None:
    """Return the metrics of a line, or None. If a bar is redrawn, the last redraw counts."""
    for shown in reversed(split_redraws(line)):
        report = parse_progress_line(shown)
        metrics = _read_line_metrics(report) if report is not None else None
        if metrics is not None:
            return metrics
    return None


class ProgressLine(msgspec.Struct, frozen=True):
    """A line that may report progress. `text`: the line without its rank and time."""

    text: str
    rank: int | None
    line_s: float | None


def parse_progress_line(shown: str) -> ProgressLine | None:
    """Return the line's text, rank and time, or None for settings, tracebacks and other lines."""
    if len(shown) > LONGEST_LINE or not _WORTH_READING.search(shown):
        return None
    rank, text = _split_off_rank(_ESCAPES.sub("", shown))
    line_s, text = split_off_line_time(text)
    if rank is None:
        rank, text = _split_off_rank(text)
    if inner := _INNER_RANK.search(text, 0, 120):
        rank, text = int(inner["rank"]), text[: inner.start()] + text[inner.end() :]
    if _SETTINGS_START.match(text) or _TRACE.match(text) or _SUMMARY.search(text):
        return None
    return ProgressLine(text.strip(), rank, line_s)


def reports_evaluation(text: str) -> bool:
    start = re.split(r"\d", text, maxsplit=1)[0]
    return bool(_EVALUATES.search(start)) and not _TRAINS.search(start)


def _read_line_metrics(report: ProgressLine) -> LineMetrics | None:
    text = report.text
    drawn, times = read_progress_bar(text), dict[str, float]()
    if drawn is None:
        counted, before, post = read_counters(text), text, text
    else:
        counter, before, post, times = drawn
        around = [each for each in read_counters(before) if each.unit != counter.unit]
        if not around and (leading := _LEADING_ROUNDS.match(before)) and int(leading[1]) <= int(leading[2]):
            around = [Counter(EPOCH, EPOCH, float(leading[1]), float(leading[2]))]
        counted = [*around, counter]
    values, evaluated = read_named_metrics(post)
    values |= times
    if not _is_progress_report(text, counted, values, evaluated):
        return None
    if step_s := values.pop("step_s", 0.0):
        values.setdefault("steps_per_s", 1.0 / step_s)
    return LineMetrics(
        counters=tuple(_add_stated_totals(counted, text)),
        line_s=report.line_s,
        rank=report.rank,
        evaluates=evaluated or reports_evaluation(before),
        learned=False,
        **{name: value for name, value in values.items() if name in LineMetrics.__struct_fields__},
    )


def _split_off_rank(text: str) -> tuple[int | None, str]:
    if found := _RANK.match(text):
        return int(found["rank"] or found["mpi"] or found["pid"]), text[found.end() :]
    if (found := _LABEL.match(text)) and read_counters(text[found.end() :]):
        return int(found["rank"]), text[found.end() :]
    return None, text


def _is_progress_report(text: str, counted: list[Counter], values: dict[str, float], evaluated: bool) -> bool:
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


# ---- totals that a program states at its start


_STATED_AT_START = re.compile(
    r"(?<![A-Za-z0-9])(?:(?P<step>total optimization steps|max_iters|max_steps|max_train_steps|train_iters|total_steps"
    r"|num_train_steps|num_steps|num_iterations|total steps|max_updates?|num_boost_round|n_estimators)"
    r"|(?P<epoch>num epochs|num_train_epochs|num_epochs|max_epochs?|epochs|total_epochs|n_epochs))"
    rf"['\"]?[\s.]*[:= ]\s*(?P<value>{WHOLE})(?![\w.]*\w)",
    re.IGNORECASE,
)


def read_stated_totals(lines: Iterable[str]) -> dict[str, float]:
    """Return the first total steps and the first total epochs that the lines state, by unit."""
    found: dict[str, float] = {}
    for line in lines:
        for match in _STATED_AT_START.finditer(line[:4096]):
            if (value := parse_number(match["value"])) > 0:
                found.setdefault(STEP if match["step"] else EPOCH, value)
    return found
