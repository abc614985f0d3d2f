"""What a call printed, or the job of a block: read from its story where that lies, and shown."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from stoker.errors import SessionError
from stoker.manager.cli import console
from stoker.manager.cli.sessions import story_of
from stoker.protocol.session import SessionFolder
from stoker.protocol.to_client import Story
from stoker.units import show_bytes

_PRINTED = re.compile(r"printed (?P<path>/.*?):(?P<start>\d+)-(?P<end>\d*)")
_LIBRARY_LOG = re.compile(r"its library's log is (?P<path>/.*)")
_DROPPED = re.compile(rb"\0{512,}")
"""A log whose middle was dropped has zero bytes there (`stoker.log_files`). No program prints so many."""
_NO_RESULT = "ended without a result"
_NO_CONTEXT = f"{_NO_RESULT} (context)"
_NEVER_SENT = "it was sent to no library"


class LogFile(msgspec.Struct, frozen=True):
    """A log of the session: how people call it, and where it lies."""

    name: str
    path: Path


# ---- a call


def show_call(session: str, call: str) -> None:
    """Print exactly what a call printed; of one whose context could not be loaded, what the loader printed.

    Raises SessionError for a call that is not there, or a log that cannot be read here.
    """
    _, story, over = story_of(session, call)
    if not story.found:
        raise SessionError(f"{story.subject}: {story.headline}")
    texts = [line.text for line in story.lines]
    places = printed(texts)
    for path, start, end in places:
        _show(story.subject, path, start=start, end=end)
    if places:
        return
    log = loaders_log(texts)
    if log is not None:
        console.note(f"{story.subject} did not run: its context could not be loaded; this is {log}, where that failed")
        _show(story.subject, log)
        return
    console.note(nothing_kept(story, over=over))


def nothing_kept(story: Story, *, over: str = "") -> str:
    """What to say of a call of which no output is kept: what it waits for, or where to look. `over`: that its session
    has ended, in words."""
    call, texts, libraries = story.subject, [line.text for line in story.lines], ", ".join(story.runs_in)
    if over and (story.waits_for or libraries):
        kept = f"; what it may have printed: stoker logs {story.runs_in[0]}" if libraries else ""
        return f"{call} had not ended when its session did ({over}){kept}"
    later = f"what it prints can be read when it has ended: stoker logs {call}"
    if story.waits_for:
        where = f" in {libraries}" if libraries else ""
        return f"{call} waits{where}: {story.waits_for}\n{later}"
    if libraries:
        return f"{call} runs in {libraries}; {later}\nuntil then: stoker logs {story.runs_in[0]} -f"
    if _NEVER_SENT in texts:
        why = next((text for text in texts if text.startswith(_NO_RESULT)), "")
        return f"{call} never ran, so it printed nothing{f': it {why}' if why else ''}"
    dead = died(texts)
    look = f"; the library that it ran in died: stoker logs {dead[-1]}" if dead else ""
    return f"{call} printed nothing that was kept apart ({story.headline}){look}"


def printed(texts: list[str]) -> list[tuple[Path, int, int | None]]:
    """Where a call's output lies, from the lines of its story: a file and the first and last byte of it (None: to its
    end), each try."""
    found = (_PRINTED.search(text) for text in texts)
    return [(Path(hit["path"]), int(hit["start"]), int(hit["end"]) if hit["end"] else None) for hit in found if hit]


def died(texts: list[str]) -> list[str]:
    """Libraries that died with a call, from the lines of its story: what it printed last is in their logs."""
    return [library for text in texts if "died" in text for library in re.findall(r"\blib-\d+", text)]


def loaders_log(texts: list[str]) -> Path | None:
    """What the loader of a call's context printed, if that context could not be loaded: the log of its library, from
    the lines of the call's story. Such a library has run no call."""
    found = [hit for text in texts if (hit := _LIBRARY_LOG.fullmatch(text))]
    return Path(found[-1]["path"]) if found and any(text.startswith(_NO_CONTEXT) for text in texts) else None


def _show(subject: str, path: Path, *, start: int = 0, end: int | None = None) -> None:
    try:
        with path.open("rb") as file:
            file.seek(start)
            said = file.read() if end is None else file.read(end - start)
    except OSError as error:
        raise SessionError(f"{subject} printed into {path}, which cannot be read here: {error}") from None
    parts = [part for part in _DROPPED.split(said) if part]
    dropped = len(said) - sum(map(len, parts))
    for part in parts:
        console.raw(part.replace(b"\0", b""))
    if dropped:
        console.note(
            f"{show_bytes(dropped)} of what {subject} printed are gone: the log of its library had grown too long, and"
            " its middle was dropped; print less, or into a file of the call's own"
        )


# ---- a block


def show_block(folder: SessionFolder, block: str, files: Sequence[LogFile]) -> None:
    """Print the output and errors of the job of a block (`files`), or say why there are none.

    Raises SessionError for a block that is not there.
    """
    for file in files:
        if len(files) > 1:
            console.note(f"{file.name}:")
        _show(block, file.path)
    if files:
        return
    story = Story(block, True, "its session cannot be asked", ())
    with contextlib.suppress(SessionError):  # then there is no word of it, but perhaps output
        _, story, _ = story_of(str(folder.path), block)
    if not story.found:
        raise SessionError(f"{block}: {story.headline}; stoker logs lists what there is")
    console.note(nothing_printed(story))


def nothing_printed(story: Story) -> str:
    """Return the message for a block whose job left no output."""
    return (
        f"the job of {story.subject} has printed nothing here ({story.headline}); some batch systems bring its output"
        " when it has ended, and its pilots have logs of their own: stoker logs"
    )
