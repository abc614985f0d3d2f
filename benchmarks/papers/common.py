"""What the evaluations of papers share: their options, their results by release, their exit status."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

import stoker
from stoker.errors import StokerError

RELEASE = stoker.__version__
"""What results are kept with: a run is made once a release."""

T = TypeVar("T")


class Named(Protocol):
    """A case: its name says all that decides its result."""

    @property
    def name(self) -> str: ...


class Released(Protocol):
    """A result, with the release that computed it."""

    @property
    def release(self) -> str: ...


C = TypeVar("C", bound=Named)
R = TypeVar("R", bound=Released)


def read_results(path: Path, kind: type[T]) -> T | None:
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} holds no results: {error}; remove it, and all is computed anew") from error


def unknown(cases: Iterable[C], known: Callable[[C], R | None]) -> list[C]:
    return [
        case
        for case in {case.name: case for case in cases}.values()
        if (result := known(case)) is None or result.release != RELEASE
    ]


def number(*, most: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isdecimal() or not 1 <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text}: a number from 1 to {most} is wanted")
        return int(text)

    return read


def exit_status(evaluate: Callable[[], int], *, what: str, kept: Path, missing: str = "", skip: bool = False) -> int:
    """Run an evaluation. Returns what it returns, 1 when it fails, 130 after Ctrl-C. `what`: the evaluation, in words;
    `kept`: where its results are kept. `missing`: the data that is not there, if any: then it is not run, and 2 is
    returned, or 0 with `skip`."""
    if missing:
        sys.stderr.write(f"{missing}: {what} is skipped\n")
        return 0 if skip else 2
    try:
        return evaluate()
    except (StokerError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write(f"\nstopped: the same again goes on with {kept}\n")
        return 130


def say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def progress(what: str) -> Callable[[int, int], None]:
    """What tells of each part that is done: one line that stands still in a terminal, at most ten lines elsewhere."""

    def tell(done: int, total: int) -> None:
        line = f"{what}: {done} of {total}"
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{line}\n" if done == total else f"\r{line}")
        elif done * 10 // total > (done - 1) * 10 // total:
            say(line)
        sys.stderr.flush()

    return tell
