"""`stoker logs`: show a session's log files, and the output of a call or a block's job."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import msgspec

from stoker.config_errors import suggest_similar_name
from stoker.errors import SessionError
from stoker.manager.cli import console, runs, session_choice
from stoker.manager.cli.session_choice import add_session_argument, find_story_of_subject
from stoker.protocol.ids import parse_call_id
from stoker.protocol.session import SessionFolder
from stoker.protocol.to_client import Story
from stoker.units import show_bytes

# ---- output of a call


_PRINTED = re.compile(r"printed (?P<path>/.*?):(?P<start>\d+)-(?P<end>\d*)")
_LIBRARY_LOG = re.compile(r"its library's log is (?P<path>/.*)")
_DROPPED_BYTES = re.compile(rb"\0{512,}")
"""Zero bytes that replace the dropped middle of a long log (`stoker.log_files`)."""
_NO_RESULT = "ended without a result"
_NO_CONTEXT = f"{_NO_RESULT} (context)"
_NEVER_SENT = "the call was not sent to a library"


class LogFile(msgspec.Struct, frozen=True):
    name: str
    path: Path


def print_call_output(session: str, call: str) -> None:
    """Print the output of a call, or of its failed loader. Raises SessionError."""
    _, story, over = find_story_of_subject(session, call)
    if not story.found:
        raise SessionError(f"{story.subject}: {story.headline}")
    texts = [line.text for line in story.lines]
    places = find_outputs(texts)
    for path, start, end in places:
        _print_part(story.subject, path, start=start, end=end)
    if not places and (log := find_log_of_failed_loader(texts)) is not None:
        why = "its context could not be loaded"
        console.note(f"{story.subject} did not run: {why}; this is the log of the failed load, {log}")
        _print_part(story.subject, log)
    elif not places:
        console.note(explain_missing_output(story, over=over))


def explain_missing_output(story: Story, *, over: str = "") -> str:
    """Return why a call has no output. `over`: why the session has ended."""
    call, texts, libraries = story.subject, [line.text for line in story.lines], ", ".join(story.runs_in)
    if over and (story.waits_for or libraries):
        kept = f"; its output, if any: stoker logs {story.runs_in[0]}" if libraries else ""
        return f"{call} had not ended when its session ended ({over}){kept}"
    later = f"read the output after the call ends: stoker logs {call}"
    if story.waits_for:
        where = f" in {libraries}" if libraries else ""
        return f"{call} waits{where}: {story.waits_for}\n{later}"
    if libraries:
        return f"{call} runs in {libraries}; {later}\nuntil then: stoker logs {story.runs_in[0]} -f"
    if _NEVER_SENT in texts:
        why = next((text for text in texts if text.startswith(_NO_RESULT)), "")
        return f"{call} never ran, so it printed nothing{f': it {why}' if why else ''}"
    dead = find_dead_libraries(texts)
    look = f"; its library died: stoker logs {dead[-1]}" if dead else ""
    return f"{call} has no output of its own ({story.headline}){look}; its history: stoker explain {call}"


def find_outputs(texts: list[str]) -> list[tuple[Path, int, int | None]]:
    """Return where each execution of a call printed: file, first byte, and end (None: the end of the file)."""
    found = (_PRINTED.search(text) for text in texts)
    return [(Path(hit["path"]), int(hit["start"]), int(hit["end"]) if hit["end"] else None) for hit in found if hit]


def find_dead_libraries(texts: list[str]) -> list[str]:
    """Return the libraries that died during a call. Their logs contain the call's last output."""
    return [library for text in texts if "died" in text for library in re.findall(r"\blib-\d+", text)]


def find_log_of_failed_loader(texts: list[str]) -> Path | None:
    found = [hit for text in texts if (hit := _LIBRARY_LOG.fullmatch(text))]
    return Path(found[-1]["path"]) if found and any(text.startswith(_NO_CONTEXT) for text in texts) else None


def _print_part(subject: str, path: Path, *, start: int = 0, end: int | None = None) -> None:
    try:
        with path.open("rb") as file:
            file.seek(start)
            said = file.read() if end is None else file.read(end - start)
    except OSError as error:
        raise SessionError(f"{subject} printed to {path}, which cannot be read here: {error}") from None
    parts = _DROPPED_BYTES.split(said)
    for part in filter(None, parts):
        console.write_bytes(part.replace(b"\0", b""))
    if dropped := len(said) - sum(map(len, parts)):
        why = "the log of its library grew too long, and its middle was dropped"
        hint = "print less, or write the output to a file in the call"
        console.note(f"{show_bytes(dropped)} of the output of {subject} are lost: {why}; {hint}")


# ---- a block


def print_block_output(folder: SessionFolder, block: str, files: Sequence[LogFile]) -> None:
    """Print the output of a block's job, or a note. Raises SessionError."""
    for file in files:
        if len(files) > 1:
            console.note(f"{file.name}:")
        _print_part(block, file.path)
    if files:
        return
    story = Story(block, True, "the session does not answer", ())
    with contextlib.suppress(SessionError):  # the note below is useful even if the manager does not answer
        _, story, _ = find_story_of_subject(str(folder.path), block)
    if not story.found:
        raise SessionError(f"{block}: {story.headline}; `stoker logs` lists the logs")
    hint = "some batch systems copy the output after the job ends; for the logs of its pilots: stoker logs"
    console.note(f"the job of {story.subject} has no output here yet ({story.headline}); {hint}")


BLOCK_ID = re.compile(r"b\d+")
_FOLLOW_EVERY_S = 0.2


@click.command(short_help="Print the log of a call, block, pilot, library or manager.")
@click.argument("what", default="")
@click.option("-f", "--follow", is_flag=True, help="Follow the log until Ctrl-C.")
@add_session_argument(default=session_choice.SHOWN_BY_DEFAULT)
def logs(*, what: str, follow: bool, session: str) -> None:
    """Print the log of a call (c-12: only the call's output), a block (b3: the output of its job), a pilot, a library
    (lib-3), the manager, or a detached run.

    Without WHAT: list the logs.
    """
    if not session and (run := runs.find_detached_run(what)):
        _print_file(run.log, follow=follow)
        return
    folder = session_choice.session_to_show(session)
    if follow and not what:
        raise click.UsageError("--follow needs a log to follow: stoker logs manager -f")
    if follow and is_call_id(what):
        library = f"follow the library that runs it (stoker explain {what} names it): stoker logs lib-3 -f"
        raise click.UsageError(f"--follow cannot follow a call; {library}")
    if not what:
        there = list_log_files(folder)
        width = max((len(file.name) for file in there), default=0)
        head = f"logs of the session in {folder.path}" if there else f"session folder {folder.path} has no logs yet"
        sizes = [show_bytes(each.path.stat().st_size) for each in there]
        rows = [f"  {each.name:<{width}}  {size:>8}  {each.path}" for each, size in zip(there, sizes, strict=True)]
        console.lines([head, *rows])
        if there:
            console.note("print one: stoker logs manager; a call's output: stoker logs c-0")
    elif is_call_id(what):
        print_call_output(session, what)
    elif BLOCK_ID.fullmatch(what) and not follow:
        print_block_output(
            folder, what, [file for file in list_log_files(folder) if file.name.partition(".")[0] == what]
        )
    else:
        _print_file(find_log_file(folder, what).path, follow=follow)


def is_call_id(what: str) -> bool:
    try:
        parse_call_id(what)
    except ValueError:
        return False
    return True


def list_log_files(folder: SessionFolder) -> list[LogFile]:
    own = [LogFile("manager", folder.manager_log)]
    own += [LogFile(name, folder.path / f"{name}.log") for name in ("client", "factory", "seed")]
    found = [file for file in own if file.path.exists()]
    outputs = sorted([*folder.submit.glob("stoker-*.out"), *folder.submit.glob("stoker-*.err")])
    found += [LogFile(output.name.rpartition("-")[2], output) for output in outputs if output.stat().st_size]
    for pilot in sorted((folder.path / "pilots").glob("*")):
        found += [
            LogFile(pilot.name if log.stem == "pilot" else f"{pilot.name}/{log.stem}", log)
            for log in sorted(pilot.glob("*.log"), key=lambda log: (log.stem != "pilot", len(log.stem), log.stem))
        ]
    return found


def find_log_file(folder: SessionFolder, what: str) -> LogFile:
    """Return the log file whose name begins with `what`. Raises SessionError unless exactly one file matches."""
    there = list_log_files(folder)
    exact = [file for file in there if what in (file.name, file.name.rpartition("/")[2], file.name.partition(".")[0])]
    matches = exact or [file for file in there if file.name.startswith(what)]
    if len(matches) == 1:
        return matches[0]
    names = [file.name for file in there]
    if matches:
        raise SessionError(f"{what} matches {', '.join(file.name for file in matches)}; write one of these names")
    hint = suggest_similar_name(what, names, cutoff=0.5, otherwise=f"there are {', '.join(names) or 'none'}")
    raise SessionError(f"no log of {what} in session folder {folder.path}; {hint}")


def _print_file(path: Path, *, follow: bool) -> None:
    try:
        for data in _read_growing(path, follow=follow):
            console.write_bytes(data)
    except OSError as error:
        raise SessionError(f"{path} cannot be read: {error}") from None


def _read_growing(path: Path, *, follow: bool) -> Iterator[bytes]:
    with path.open("rb") as file:
        while True:
            while data := file.read(1 << 20):
                yield data.replace(b"\0", b"")  # skip the zero bytes in place of the dropped middle of a long log
            if not follow:
                return
            time.sleep(_FOLLOW_EVERY_S)
            if path.stat().st_size < file.tell():  # the log was cut to its last lines, so read it from the start
                file.close()
                yield from _read_growing(path, follow=follow)
                return
