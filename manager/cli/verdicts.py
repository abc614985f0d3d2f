"""Whose fault a failure is, for `stoker explain`: by what a call, a pilot or a block's job has printed, and by what
a call raised. Logs are read where they lie; where that is another machine, there is no verdict.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from stoker.manager.advice.logs import Fault, classify, locate
from stoker.manager.cli import printed
from stoker.manager.cli.logs import files, is_call
from stoker.manager.protocol.session import SessionFolder
from stoker.manager.protocol.to_client import Story

_RAISED = re.compile(r"raised an exception in your code after [\d.]+ s: (?P<what>.*)", re.DOTALL)
_NO_RESULT = re.compile(r"ended without a result \((?P<kind>\w+)\): (?P<what>.*)", re.DOTALL)
_PLACE = re.compile(r"at (?P<file>.+):(?P<line>\d+) in (?P<name>.+)")
_BLOCK = re.compile(r"b\d+")
_UNFAULTED = frozenset({"cancelled", "dropped", "timeout"})
"""Ends that somebody wanted, or that a limit of the user's brought: no log says more of them."""
_MOST_BYTES = 64 << 20
_SHOWN = 6


def verdict_of(folder: SessionFolder, story: Story) -> Fault | None:
    """Whose fault it is that a call, a pilot or a block failed; None where nothing has failed or no log says why."""
    texts = [line.text for line in story.lines]
    if is_call(story.subject):
        lines = list(_of_call(texts))
    elif _BLOCK.fullmatch(story.subject):
        lines = [
            line for file in files(folder) if file.name.startswith(f"{story.subject}.") for line in _tail(file.path)
        ]
    else:
        own = [file for file in files(folder) if story.subject in (file.name, file.name.rpartition("/")[2])]
        lines = [line for file in own for line in _tail(file.path)] if _is_over(story) else []
    located = locate(lines) if lines else None
    return classify(located) if located is not None else None


def show(fault: Fault) -> list[str]:
    """The lines of `stoker explain`."""
    whose = {"user": "the program", "framework": "what is installed", "infrastructure": "the infrastructure"}
    out = [f"  verdict   {whose[fault.kind.value]} ({fault.component}), {fault.sure:.0%} sure: {fault.means}"]
    return out + [f"            {line.number:>5}: {line.text}" for line in fault.proof[:_SHOWN]]


def _of_call(texts: list[str]) -> Iterator[bytes]:
    """What a call that failed has printed in its last try, and what it raised, as Python shows that."""
    raised = next((hit["what"] for text in reversed(texts) if (hit := _RAISED.fullmatch(text))), "")
    failed = next((hit for text in reversed(texts) if (hit := _NO_RESULT.fullmatch(text))), None)
    if not raised and (failed is None or failed["kind"] in _UNFAULTED):
        return
    for path, start, end in printed.printed(texts)[-1:]:
        yield from _tail(path, start=start, end=end)
    log = printed.library_log(texts)
    if log is not None:
        yield from _tail(log)
    if failed is not None:
        yield from failed["what"].encode(errors="replace").splitlines()
    if raised:
        said, *places = raised.split("\n")
        yield b"Traceback (most recent call last):"
        for place in places:
            hit = _PLACE.fullmatch(place.strip())
            if hit is not None:
                yield f'  File "{hit["file"]}", line {hit["line"]}, in {hit["name"]}'.encode(errors="replace")
        yield said.encode(errors="replace")


def _tail(path: Path, *, start: int = 0, end: int | None = None) -> list[bytes]:
    """The lines of a file, or of its last part; none of one that cannot be read here."""
    try:
        with path.open("rb") as file:
            last = file.seek(0, 2) if end is None else end
            file.seek(max(start, last - _MOST_BYTES))
            return file.read(last - file.tell()).splitlines()
    except OSError:
        return []


def _is_over(story: Story) -> bool:
    """Whether a pilot or a library is gone, as its headline says."""
    return any(word in story.headline for word in ("gone", "lost", "ended", "failed"))
