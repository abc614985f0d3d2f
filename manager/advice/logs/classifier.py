"""The learned part of the classifier: logistic regression over facts of a failure, from `scorer.json`.

`python -m benchmarks.schedmate train` makes the file, with NumPy, from the training part of the labelled corpus. Here
it is only applied, in plain Python: a login node needs no NumPy.

Say whose fault a located failure is (SchedMate §3.3, failure classification, without a language model).

Two judges, in this order. The table of rules (`rules`) knows texts that libraries, kernels and batch systems print:
its surest row that holds decides, the first lines count most, and what is only a consequence of another failure
counts last. Where no row holds, a scorer learned from a labelled corpus weighs what the failure speaks of. A plain
exception of Python that the user's code raised is the user's unless a row says otherwise: a retry elsewhere would
only fail again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from math import exp, log, sqrt

import msgspec

from stoker.manager.advice.logs.failures import ROWS, Fault, FaultKind, FaultRule, Located, LogLine, matching_rules
from stoker.manager.advice.logs.features import exception_of, features, frames_of
from stoker.manager.advice.logs.reading import RANK_MARK

# ---- the learned scorer


class KindScorer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`weights`: of each kind, by fact; `bias`: of each kind; `made_of`: what it was trained on, in words."""

    made_of: str
    weights: dict[FaultKind, dict[str, float]]
    bias: dict[FaultKind, float]

    def chances(self, found: Mapping[str, float]) -> dict[FaultKind, float]:
        """How likely each kind is; they sum to one. A failure without any known fact gets what is usual."""
        known = {fact for weights in self.weights.values() for fact in weights}
        values = scaled({fact: count for fact, count in found.items() if fact in known})
        scores = {
            kind: self.bias[kind] + sum(value * self.weights[kind].get(fact, 0.0) for fact, value in values.items())
            for kind in self.bias
        }
        highest = max(scores.values())
        parts = {kind: exp(score - highest) for kind, score in scores.items()}
        total = sum(parts.values())
        return {kind: part / total for kind, part in parts.items()}


def scaled(found: Mapping[str, float]) -> dict[str, float]:
    """The facts with their weights, of length one together; a fact that appears often counts little more."""
    values = {fact: 1.0 + log(1.0 + count) for fact, count in found.items()}
    length = sqrt(sum(value * value for value in values.values()))
    return {fact: value / length for fact, value in values.items()} if length else {}


@cache
def shipped_scorer() -> KindScorer:
    """The scorer that comes with Stoker."""
    data = files("stoker.manager.advice.logs").joinpath("scorer.json").read_bytes()
    return msgspec.json.decode(data, type=KindScorer)


# ---- verdicts


INFRASTRUCTURE_LEAST = 0.5
"""Without a row of the table a failure is the infrastructure's if the scorer is at least so sure of it."""
RAISED_LEAST = 0.7
"""The same for an exception that came up through the user's code: in doubt it is the user's."""
GUESSED = "by its words, which no rule knows"
"""How the meaning of a failure begins that the scorer alone has judged."""
_PLAIN = frozenset({
    "ArithmeticError", "AssertionError", "AttributeError", "EOFError", "FileNotFoundError", "FileExistsError",
    "FloatingPointError", "ImportError", "IndentationError", "IndexError", "IsADirectoryError", "JSONDecodeError",
    "KeyError", "LookupError", "MemoryError", "ModuleNotFoundError", "NameError", "NotADirectoryError",
    "NotImplementedError", "OverflowError", "PermissionError", "RecursionError", "StopIteration", "SyntaxError",
    "SystemExit", "TabError", "TypeError", "UnboundLocalError", "UnicodeDecodeError", "UnicodeEncodeError",
    "UnicodeError", "ValueError", "ZeroDivisionError", "KeyboardInterrupt",
})  # fmt: skip
"""Exceptions of Python itself that programs raise by mistake. OSError and RuntimeError have many causes."""
_PLAIN_CHANCE = 0.8
_EVIDENCE_SIGNS = 40
_EVIDENCE_AFTER = 40
_FADING = 0.97
"""What a row's certainty loses with each further line of evidence."""
_SECONDARY_PART = 0.5
_MOST_PROOF = 8


def classify(located: Located, *, rules: tuple[FaultRule, ...] = ROWS, scorer: KindScorer | None = None) -> Fault:
    """Whose fault a failure is. `scorer`: another one than the one that comes with Stoker."""
    by_rule = _surest_row(located, rules)
    if by_rule is not None:
        sure, rule, line = by_rule
        return Fault(rule.kind, rule.component, round(sure, 3), rule.means, _proof(located, line))
    chances = dict((scorer or shipped_scorer()).chances(features(located, rules)))
    if _is_plain(located):
        rest = (1 - _PLAIN_CHANCE) / max(1e-9, 1 - chances[FaultKind.USER])
        chances = {kind: chance * rest for kind, chance in chances.items()} | {
            FaultKind.USER: max(_PLAIN_CHANCE, chances[FaultKind.USER])
        }
    kind = _kind(chances, raised_by_user=_raised_by_user(located))
    text = located.first.text if not located.traceback else _last_exception(located)
    means = f"it raised {text[:200]}" if _is_plain(located) else f"{GUESSED}: {text[:200]}"
    return Fault(kind, _component(located, kind), round(chances[kind], 3), means, _proof(located, located.first))


def _kind(chances: dict[FaultKind, float], *, raised_by_user: bool) -> FaultKind:
    if chances[FaultKind.INFRASTRUCTURE] >= (RAISED_LEAST if raised_by_user else INFRASTRUCTURE_LEAST):
        return FaultKind.INFRASTRUCTURE
    return max((FaultKind.USER, FaultKind.FRAMEWORK), key=lambda kind: chances[kind])


def _surest_row(located: Located, rules: tuple[FaultRule, ...]) -> tuple[float, FaultRule, LogLine] | None:
    """The row that holds with the greatest certainty, and the line that has it. Rows of what follows from another
    failure count only if the failure begins with such a line: no cause was found then."""
    context = "\n".join(line.text for line in (*located.window, *located.signs, *located.traceback))
    best: tuple[float, FaultRule, LogLine] | None = None
    fading = 1.0
    opening = matching_rules(_opening(located), rules)
    without_cause = bool(opening) and all(rule.secondary for rule in opening)
    for line in _evidence(located):
        for rule in matching_rules(line.text, rules):
            if rule.secondary and not without_cause:
                continue
            sure = rule.sure * fading * (_SECONDARY_PART if rule.secondary else 1.0)
            if (best is None or sure > best[0]) and rule.holds_in(context):
                best = (sure, rule, line)
        fading *= _FADING
    return best


def _opening(located: Located) -> str:
    """What the failure says first: its first line, or the exception of the traceback that begins there."""
    if located.traceback and located.traceback[0].number == located.first.number:
        return _last_exception(located) or located.first.text
    return located.first.text


def _evidence(located: Located) -> Iterator[LogLine]:
    """The lines that are looked up, each once, those that matter most first."""
    seen: set[int] = set()
    exceptions = [line for line in located.traceback if exception_of(_bare(line.text))]
    signs = located.signs[:_EVIDENCE_SIGNS]
    following = located.after[:_EVIDENCE_AFTER]
    for line in (located.first, *signs[:1], *exceptions, *signs[1:], *following):
        if line.number not in seen:
            seen.add(line.number)
            yield line


def _bare(text: str) -> str:
    """A line of a traceback without a rank's mark."""
    return RANK_MARK.sub("", text)


def _last_exception(located: Located) -> str:
    return next((_bare(line.text) for line in reversed(located.traceback) if exception_of(_bare(line.text))), "")


def _raised_by_user(located: Located) -> bool:
    """True if a traceback goes through the user's own code."""
    return "user" in frames_of(line.text for line in located.traceback)


def _is_plain(located: Located) -> bool:
    """True for an exception of Python itself that the user's own code, or what it called, raised."""
    return exception_of(_last_exception(located)) in _PLAIN and _raised_by_user(located)


def _component(located: Located, kind: FaultKind) -> str:
    """A word for what failed where no row names it."""
    if kind is not FaultKind.INFRASTRUCTURE:
        return "code" if kind is FaultKind.USER else "versions"
    text = " ".join(line.text for line in located.signs[:_MOST_PROOF]).lower()
    words = {
        "gpu": ("gpu", "cuda", "nvrm", "device"),
        "network": ("connect", "network", "socket", "host", "port", "ssh", "nccl", "timeout"),
        "filesystem": ("file", "disk", "mount", "storage", "server", "transport"),
        "scheduler": ("slurm", "condor", "job", "step"),
    }
    counts = {component: sum(text.count(word) for word in them) for component, them in words.items()}
    component = max(counts, key=lambda each: counts[each])
    return component if counts[component] else "node"


def _proof(located: Located, line: LogLine) -> tuple[LogLine, ...]:
    """The line that decided, the first one, and the exceptions; by number, each once."""
    exceptions = [each for each in located.traceback if exception_of(_bare(each.text))][:3]
    chosen = {each.number: each for each in (*located.signs[:2], *exceptions, located.first, line)}
    return tuple(chosen[number] for number in sorted(chosen)[:_MOST_PROOF])
