"""What the learned scorer sees of a failure: words, and a few facts about tracebacks.

Words are split where letters end and where a capital begins, so that `ncclSystemError` also says "system". Numbers,
names of files and of the user's own functions say nothing about whose fault a failure is, and are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from stoker.manager.advice.logs.fault import Located, LogLine
from stoker.manager.advice.logs.rules import matching_rules

_SIGNS = 12
_FOLLOWING = 6
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_PATH = re.compile(r"(?:/[\w.@+-]+){2,}/?")
_FRAME = re.compile(r'File "([^"]+)", line \d+')
_EXCEPTION = re.compile(r"^(?:[\w.]+\.)?([A-Z]\w*(?:Error|Exception|Warning|Interrupt|Exit))\b")
_DAEMON = re.compile(
    r"\b(kernel|slurmstepd|slurmd|slurmctld|srun|sbatch|mpirun|prterun|ssh|sshd|systemd|dockerd|containerd|kubelet|condor_\w+)"
    r"(?:\[\d+\])?:"
)
_STAMPED = re.compile(r"^\S*\s*\d{3}\s+\(\d+\.\d+\.\d+\)")
_COMMON = frozenset({"the", "of", "to", "in", "is", "at", "for", "and", "on", "by", "it", "be", "py", "file", "line"})


def features(located: Located) -> dict[str, float]:
    """How often each word and fact appears; of the first lines they count more."""
    found: dict[str, float] = {}
    for weight, text in _texts(located):
        for word in words(text):
            found[word] = found.get(word, 0.0) + weight
    for fact in _facts(located):
        found[fact] = found.get(fact, 0.0) + 2.0
    return found


def causes(located: Located) -> list[LogLine]:
    """The bad lines that do not only tell of another rank's end; all, if there are no others."""
    found = []
    for sign in located.signs:
        rules = matching_rules(sign.text)
        if not rules or not all(rule.secondary for rule in rules):
            found.append(sign)
    return found or list(located.signs)


def words(text: str) -> Iterator[str]:
    """The words of a line, in lower case, without paths."""
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
    for line in lines:
        found = _FRAME.search(line)
        if found is None:
            continue
        path = found[1]
        _, installed, package = path.rpartition("site-packages/")
        if installed:
            owners.append(package.partition("/")[0])
        elif re.search(r"/lib/python3[^/]*/|<frozen|^<", path):
            owners.append("stdlib")
        else:
            owners.append("user")
    return owners


def _texts(located: Located) -> Iterator[tuple[float, str]]:
    yield 2.0, located.first.text
    for at, sign in enumerate(causes(located)[:_SIGNS]):
        yield (2.0 if at < 2 else 0.5), sign.text
    for line in located.after[:_FOLLOWING] if not located.traceback else ():
        yield 0.5, line.text
    for line in located.before[-2:]:
        yield 0.25, line.text


def _facts(located: Located) -> Iterator[str]:
    yield "@traceback" if located.traceback else "@no-traceback"
    owners = frames_of(line.text for line in located.traceback)
    if owners:
        yield f"@raised-in:{owners[-1] if owners[-1] in ('user', 'stdlib') else 'package'}"
    for sign in causes(located)[:3]:
        if name := exception_of(sign.text):
            yield f"@type:{name}"
        if found := _DAEMON.search(sign.text):
            yield f"@daemon:{found[1]}"
    if _STAMPED.search(located.first.text):
        yield "@condor-event"
