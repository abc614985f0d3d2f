"""What the learned scorer sees of a failure: facts that no single text is needed for.

They are the fields of words that its first lines speak of, who speaks, what kind of errno, of which family its
exception is, and whose code raised it (`concepts`). The words themselves are left out: with some fifty fault types to
learn from, words tell the types apart, and a type that was never seen has others. Numbers, names of files and of the
user's own functions say nothing about whose fault a failure is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from stoker.manager.advice.logs.concepts import errno_of, families_of, fields_of, speakers_of
from stoker.manager.advice.logs.fault import Located, LogLine
from stoker.manager.advice.logs.rules import ROWS, FaultRule, matching_rules
from stoker.manager.advice.logs.tracebacks import RANK_MARK

_CAUSES = 2
_NEAR_LINES = 3
"""A program writes so few lines of a failure before it raises."""
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_PATH = re.compile(r"(?:/[\w.@+-]+){2,}/?")
_FRAME = re.compile(r'File "([^"]+)", line \d+')
_EXCEPTION = re.compile(r"^(?:[\w.]+\.)?([A-Z]\w*(?:Error|Exception|Warning|Interrupt|Exit))\b")
_COMMON = frozenset({"the", "of", "to", "in", "is", "at", "for", "and", "on", "by", "it", "be", "py", "file", "line"})


def features(located: Located, rules: tuple[FaultRule, ...] = ROWS) -> dict[str, float]:
    """How often each fact appears. `rules` tell which lines are only consequences."""
    found: dict[str, float] = {}
    for fact in _facts(located, rules):
        found[fact] = found.get(fact, 0.0) + 1.0
    return found


def causes(located: Located, rules: tuple[FaultRule, ...] = ROWS) -> list[LogLine]:
    """The bad lines that do not only tell of another rank's end; all, if there are no others."""
    found = []
    for sign in located.signs:
        held = matching_rules(sign.text, rules)
        if not held or not all(rule.secondary for rule in held):
            found.append(sign)
    return found or list(located.signs)


def words(text: str) -> Iterator[str]:
    """The words of a line, in lower case, without paths. Words end where letters end and where a capital begins:
    `ncclSystemError` also says "system"."""
    for word in _WORD.findall(_PATH.sub(" ", text)):
        lower = word.lower()
        if len(lower) > 1 and lower not in _COMMON:
            yield lower


def exception_of(line: str) -> str:
    """The name of the exception's type with which a line begins; empty: none."""
    found = _EXCEPTION.match(line)
    return found[1] if found else ""


def frames_of(lines: Iterable[str]) -> list[str]:
    """Whose code the frames of a traceback are, from the outermost: `user`, `stdlib`, or the name of a package."""
    owners = []
    for path in _paths(lines):
        _, installed, package = path.rpartition("site-packages/")
        if installed:
            owners.append(package.partition("/")[0])
        elif re.search(r"/lib/python3[^/]*/|<frozen|^<", path):
            owners.append("stdlib")
        else:
            owners.append("user")
    return owners


def _facts(located: Located, rules: tuple[FaultRule, ...]) -> Iterator[str]:
    traceback = [_unmarked(line) for line in _own_traceback(located)]
    raised = next((line for line in reversed(traceback) if exception_of(line)), "")
    opening = raised or _unmarked(located.first)
    lines = [opening, *(text for sign in causes(located, rules)[:_CAUSES] if (text := _unmarked(sign)) != opening)]
    for line in lines:
        yield from (field for word in words(line) for field in fields_of(word))
        yield from speakers_of(line)
        yield from errno_of(line)
        if name := exception_of(line):
            yield f"@type:{name}"
            yield from families_of(name)
    yield from (f"{field}, first" for word in words(opening) for field in fields_of(word))
    yield "@traceback" if located.traceback else "@no-traceback"
    if owners := frames_of(traceback):
        yield f"@raised-in:{owners[-1] if owners[-1] in ('user', 'stdlib') else 'package'}"
        yield "@through-user" if "user" in owners else "@not-through-user"
        yield from _place(_paths(traceback)[-1])


def _own_traceback(located: Located) -> tuple[LogLine, ...]:
    """The traceback, if it is of the failure's own beginning and not of a rank that fails later."""
    lines, first = located.traceback, located.first.number
    return lines if lines and lines[0].number - _NEAR_LINES <= first <= lines[-1].number else ()


def _place(path: str) -> Iterator[str]:
    """The fields that the names of an installed module speak of."""
    _, installed, inside = path.rpartition("site-packages/")
    for name in re.split(r"[/._]", inside)[:-1] if installed else ():
        yield from (f"{field}, module" for field in fields_of(name))


def _paths(lines: Iterable[str]) -> list[str]:
    return [found[1] for line in lines if (found := _FRAME.search(line))]


def _unmarked(line: LogLine) -> str:
    return RANK_MARK.sub("", line.text)
