"""`stoker logs`: the files that a session writes, and what one call printed."""

from __future__ import annotations

import difflib
import re
import time
from collections.abc import Iterator
from pathlib import Path

import click

from stoker.errors import SessionError
from stoker.manager.cli import choosing, console, printed, runs
from stoker.manager.cli.printed import LogFile
from stoker.manager.cli.sessions import takes_session
from stoker.protocol.ids import parse_call
from stoker.protocol.session import SessionFolder
from stoker.units import show_bytes

_FOLLOW_EVERY_S = 0.2
_BLOCK = re.compile(r"b\d+")


@click.command(short_help="Print the log of a call, block, pilot, library or manager.")
@click.argument("what", default="")
@click.option("-f", "--follow", is_flag=True, help="Go on printing as it grows, until Ctrl-C.")
@takes_session(default=choosing.SHOWN_BY_DEFAULT)
def logs(*, what: str, follow: bool, session: str) -> None:
    """Print a log: of a call (c-12: exactly what it printed), a block (b3: what its job printed), a pilot, a library
    (lib-3), the manager, or a detached run (by its name).

    Without WHAT: which logs there are.
    """
    if not session and (run := runs.named_run(what)):
        _print_file(run.log, follow=follow)
        return
    folder = choosing.session_to_show(session)
    if not what:
        if follow:
            raise click.UsageError("--follow needs a log to follow: stoker logs manager -f")
        _list(folder)
    elif is_call(what):
        if follow:
            raise click.UsageError(
                f"--follow cannot follow a call: follow the library that runs it (stoker explain {what} names it),"
                " as in: stoker logs lib-3 -f"
            )
        printed.show_call(session, what)
    elif _BLOCK.fullmatch(what) and not follow:
        printed.show_block(folder, what, [file for file in files(folder) if file.name.partition(".")[0] == what])
    else:
        _print_file(find(folder, what).path, follow=follow)


def is_call(what: str) -> bool:
    """Whether this is how a call is written: `c-12`, `c-1.12`, `12`."""
    try:
        parse_call(what)
    except ValueError:
        return False
    return True


def files(folder: SessionFolder) -> list[LogFile]:
    """Every log that is there: the manager's, the clients', of what helps the manager, of each pilot its own and its
    libraries', and what the batch jobs of blocks have printed (`b3.out`, `b3.err`)."""
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


def find(folder: SessionFolder, what: str) -> LogFile:
    """The log that is meant: by its name, or by a unique part of it. Raises SessionError with the nearest name."""
    there = files(folder)
    exact = [file for file in there if what in (file.name, file.name.rpartition("/")[2], file.name.partition(".")[0])]
    matches = exact or [file for file in there if file.name.startswith(what)]
    if len(matches) == 1:
        return matches[0]
    names = [file.name for file in there]
    if matches:
        raise SessionError(f"{what} could be {', '.join(file.name for file in matches)}; write one of them")
    close = difflib.get_close_matches(what, names, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(names) or 'none'}"
    raise SessionError(f"no log of {what} in session folder {folder.path}; {hint}")


def _list(folder: SessionFolder) -> None:
    there = files(folder)
    if not there:
        console.line(f"session folder {folder.path} has no logs yet")
        return
    width = max(len(file.name) for file in there)
    console.line(f"logs of the session in {folder.path}")
    console.lines(f"  {file.name:<{width}}  {show_bytes(file.path.stat().st_size):>8}  {file.path}" for file in there)
    console.note("print one: stoker logs manager; what a call printed: stoker logs c-0")


def _print_file(path: Path, *, follow: bool) -> None:
    try:
        for data in _grow(path, follow=follow):
            console.raw(data)
    except OSError as error:
        raise SessionError(f"{path} cannot be read: {error}") from None


def _grow(path: Path, *, follow: bool) -> Iterator[bytes]:
    with path.open("rb") as file:
        while True:
            while data := file.read(1 << 20):
                yield data.replace(b"\0", b"")  # the middle of a long log is dropped
            if not follow:
                return
            time.sleep(_FOLLOW_EVERY_S)
            if path.stat().st_size < file.tell():  # it has begun anew, with its last lines
                file.close()
                yield from _grow(path, follow=follow)
                return
