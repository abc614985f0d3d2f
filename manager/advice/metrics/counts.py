"""Counts and progress bars in a line: `[640/60000 (1%)]`, `step 3/10`, `30 of 100`, `45%|##  | 90/200 [...]`. Pure.

A count with a total stands behind a word that counts (step, epoch, batch, ...), in brackets, or in front of a bar. Two
numbers with a slash elsewhere are a date, a path, a fraction or a network: they count nothing.
"""

from __future__ import annotations

import re

import msgspec

from stoker.manager.advice.metrics.line_metrics import Counter
from stoker.manager.advice.metrics.numerals import CLOCK, WHOLE, any_of, duration_s, lower, number

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
_WORDS = any_of(
    re.escape(name).replace(r"\ ", "[ _]")
    for name in sorted((name for names in _UNITS.values() for name in names.split("|")), key=len, reverse=True)
)

_TIMES = rf"(?P<elapsed>{CLOCK})(?:<(?P<eta>{CLOCK}|\?))?,?\s*(?P<post>[^\]]*)\]?"
_BAR = re.compile(
    r"(?P<before>.*?)(?P<percent>\d{1,3})%\|[^|]*\|\s*(?P<done>\d+(?:\.\d+)?)(?P<done_scale>[kMGT]?)"
    rf"(?P<unit>[A-Za-z]*)/(?P<total>\d+(?:\.\d+)?)(?P<total_scale>[kMGT]?)[A-Za-z]*\s*\[{_TIMES}",
    re.DOTALL,
)
"""tqdm with a total."""
_OPEN_BAR = re.compile(
    rf"(?P<before>.*?)(?<![\w.])(?P<done>\d+(?:\.\d+)?)(?P<done_scale>[kMGT]?)(?P<unit>[A-Za-z]+)\s\[{_TIMES}",
    re.DOTALL,
)
"""tqdm without a total: 90it [00:30, 3.02it/s]."""

_OF = rf"(?P<done>{WHOLE})\s*(?:/|\sof\s|\sout of\s)\s*(?P<total>{WHOLE})(?![\w/.-]*[\w/])"
_NAMED = re.compile(rf"(?<![A-Za-z0-9_\-.])(?P<word>{_WORDS})(?P<mark>\s?[#\[(:=]{{0,2}}\s*){_OF}", re.IGNORECASE)
_BRACKETED = re.compile(rf"[\[(]\s*{_OF}(?=\s*[\])(])")
_TRAIN_EPOCH = re.compile(r"(?:^|\s)train: (?P<done>\d+) \[")
_BARRED = re.compile(
    rf"(?:^|(?<=[\s:|]))(?P<done>{WHOLE})\s?/\s?(?P<total>{WHOLE})(?=\s+(?:[\[|(]?[=>.#\-━╸█▌]{{2,}}|\[))|"
    rf"(?:^|(?<=[:|]))\s*(?P<done2>{WHOLE})\s?/\s?(?P<total2>{WHOLE})(?=\s+[A-Za-z_]+\s?[=:])"
)
"""In front of a bar, or at the start of the text and in front of name and value."""
_AFTER = re.compile(rf"(?<![\w./-]){_OF}\s+(?P<word>{_WORDS})\b")
_PLAIN_OF = re.compile(rf"(?<![\w./-])(?P<done>{WHOLE})\s(?:of|out of)\s(?P<total>{WHOLE})\b(?![./]\d)", re.IGNORECASE)
_NOT_PROGRESS = re.compile(
    r"(?:gpus?|rank|node|attempt|retry|retries|worker|page|version|part|device|layer|loading|shard|try)\W{0,3}$", re.I
)
_REACH = 32
"""Characters in front of a count that say what it counts."""
_TOTALS = re.compile(
    rf"(?<![a-z0-9])(?:total|max|num(?!.updates))[_ ](?:train[_ ])?"
    rf"(?P<word>steps|epochs|iters|iterations|updates|batches)['\"]?\s?[:=]\s?(?P<total>{WHOLE})(?![\w.]*\w)"
)
_NO_COUNT = re.compile(
    r"(?:^|[^a-z])(?:skipped|nan|number of|num|total|max|warmup|every|per|in|last|save\w*|log\w*)\W?$", re.I
)
_NAMED_ALONE = re.compile(
    rf"(?<![A-Za-z0-9_\-.])(?P<word>{_WORDS})(?:\(train\))?[\s#\[(:='\"]{{0,5}}(?P<done>\d+\.\d+|{WHOLE})"
    r"(?:[eE][+]?\d+)?(?![\w,.]*\d)(?!\s?(?:/\s?\d|of\b|[A-Za-z]+/s|ms\b|s\b|%))",
)
_GLUED = re.compile(r"(?<![\w.])(?:\d+-)?(?P<done>\d+)(?P<word>epoch|batch|iter|step)(?![a-z/])")
"""3epoch, 101-200batch."""
_LEADING = re.compile(r"^\[(?P<done>\d+)\](?=[\s:])")
_PERCENT = re.compile(r"(?:progress|completed?|done)\W{1,3}(?P<before>\d{1,3}(?:\.\d+)?)\s?%|"
                      r"(?<![\d.])(?P<after>\d{1,3}(?:\.\d+)?)\s?%\s(?:done|complete)", re.IGNORECASE)  # fmt: skip
_DIGITS = re.compile(r"\d[\d.,]*")


class Bar(msgspec.Struct, frozen=True):
    """A progress bar. `before`, `post`: the texts in front of it and in its brackets."""

    counter: Counter
    before: str
    post: str
    elapsed_s: float | None
    eta_s: float | None


def bar(text: str) -> Bar | None:
    """The progress bar that a line is, if it is one."""
    if "[" not in text:
        return None
    found = _BAR.match(text) if "%|" in text else _OPEN_BAR.match(text)
    if found is None:
        return None
    parts = found.groupdict()
    unit = parts["unit"] or "it"
    total = number(parts["total"], parts["total_scale"]) if parts.get("total") else None
    done = number(parts["done"], parts["done_scale"])
    before = found["before"].strip(" :\t")
    if re.search(r"[kMG]?i?B/s", found["post"]) or unit in ("B", "iB"):
        counted = BYTE
    else:
        last = _DIGITS.sub("", before).lower().strip(" :#/[]()").rpartition(" ")[2]
        whole_epochs = _UNIT.get(last) == EPOCH and not before[-1:].isdigit() and ":" not in before
        counted = EPOCH if whole_epochs else _UNIT.get(unit.lower(), STEP)
    name = "bar " + _DIGITS.sub("", before).strip().lower()[:40]
    eta = found["eta"]
    return Bar(
        Counter(name, counted, done, total), before, found["post"],
        duration_s(found["elapsed"]), duration_s(eta) if eta and eta != "?" else None,
    )  # fmt: skip


def counters(text: str) -> list[Counter]:
    """The counts of a line that is no bar, each name once. Counts without a total are among them only behind a word
    that counts, and at the start of the line in brackets."""
    text = lower(text)
    found: dict[str, Counter] = {}
    taken: list[tuple[int, int]] = []
    for pattern in _patterns(text):
        for match in pattern.finditer(text):
            if any(match.start() < end and start < match.end() for start, end in taken):
                continue
            parts = match.groupdict()
            done = number(parts["done"] or parts.get("done2") or "0")
            total = number(parts["total"] or parts.get("total2") or "0")
            word = _plain(parts.get("word"))
            before = text[max(0, match.start() - _REACH) : match.start()]
            if done > total or total < (1 if word else 2) or _NOT_PROGRESS.search(before):
                continue
            taken.append(match.span())
            unit = _UNIT.get(word, STEP)
            name = word or "of " + "".join(re.findall(r"[a-z]+", before.lower())[-1:])
            found.setdefault(name, Counter(name, unit, done, total))
    for glued in _GLUED.finditer(text):
        found.setdefault(glued["word"], Counter(glued["word"], _UNIT[glued["word"]], float(glued["done"])))
    if named := _TRAIN_EPOCH.search(text):
        found[EPOCH] = Counter(EPOCH, EPOCH, float(named["done"]))
    for match in _NAMED_ALONE.finditer(text):
        if not _NO_COUNT.search(text, max(0, match.start() - _REACH), match.start()) and not any(
            match.start() < end and start < match.end() for start, end in taken
        ):
            word = _plain(match["word"])
            found.setdefault(word, Counter(word, _UNIT[word], number(match["done"])))
    if not found and (leading := _LEADING.match(text)):
        found["[]"] = Counter("[]", STEP, float(leading["done"]))
    if not found and "%" in text and (percent := _PERCENT.search(text)):
        found[PERCENT] = Counter(PERCENT, PERCENT, number(percent["before"] or percent["after"]), 100.0)
    return list(found.values())


def with_stated_totals(counted: list[Counter], text: str) -> list[Counter]:
    """The counts, with the totals that the same line states by name: `step=3 total_steps=10`."""
    low = lower(text)
    if not any(word in low for word in ("total", "max", "num")):
        return counted
    totals = {_UNIT[match["word"]]: number(match["total"]) for match in _TOTALS.finditer(low)}
    return [
        Counter(each.name, each.unit, each.done, totals[each.unit])
        if each.total is None and each.done <= totals.get(each.unit, -1.0)
        else each
        for each in counted
    ]


def _patterns(text: str) -> list[re.Pattern[str]]:
    """The patterns of counts with a total that the text may match, the surest first."""
    found = [_NAMED, _AFTER] if "/" in text or "of" in text else []
    if "/" in text or "of" in text:
        found += [_BRACKETED, _BARRED] if "/" in text else []
        found += [_PLAIN_OF] if " of " in text else []
    return found


def _plain(word: str | None) -> str:
    return (word or "").lower().replace(" ", "_")
