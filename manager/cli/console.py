"""Print all output of the `stoker` command, and define click types for its options. Other modules do not print. With
`--json`, stdout contains only one JSON document."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.live import Live
from rich.text import Text

from stoker.errors import UnitError
from stoker.progress_display import Lines, ProgressBar
from stoker.units import MOST_BYTES, parse_bytes

_STYLES = {"ok": "green", "warn": "yellow", "need": "bold red", "fails": "bold red", "no": "dim"}
_out = Console(highlight=False, soft_wrap=True)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_err = Console(highlight=False, soft_wrap=True, stderr=True)


def is_terminal() -> bool:
    """Return True if stdout is a terminal."""
    return _out.is_terminal


def lines(texts: Iterable[str]) -> None:
    """Print lines.

    Args:
        texts: The lines, without newline characters.
    """
    with exit_silently_on_closed_pipe():
        for text in texts:
            _out.print(_style_first_word(text))


def line(text: str = "") -> None:
    """Print one line.

    Args:
        text: The line, without a newline character.
    """
    lines([text])


def note(text: str) -> None:
    """Print a remark on stderr.

    Args:
        text: The remark.
    """
    with _ignore_closed_terminal():
        _err.print(Text(text, style="dim"))


def error(text: str) -> None:
    """Print an error on stderr.

    Args:
        text: The error.
    """
    first, _, rest = text.partition("\n")
    with _ignore_closed_terminal():
        _err.print(Text(first, style="bold red"))
        if rest:
            _err.print(Text(rest))


@contextlib.contextmanager
def _ignore_closed_terminal() -> Iterator[None]:
    try:
        yield
    except OSError as trouble:
        if trouble.errno != errno.EIO:
            raise


def json(value: Any) -> None:
    """Print one JSON document.

    Args:
        value: A value that msgspec can encode.
    """
    if sys.stdout is None:  # Python sets stdout to None if it was closed before the command began
        return
    with exit_silently_on_closed_pipe():
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=1).decode() + "\n")
        sys.stdout.flush()


def write_bytes(data: bytes) -> None:
    if sys.stdout is None:
        return
    with exit_silently_on_closed_pipe():
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()


class Redrawn:
    """Lines that change. A terminal redraws the lines in place; a pipe receives the lines again.

    Made by `redrawn`.
    """

    def __init__(self, live: Live | None) -> None:
        self._live = live

    def show(self, texts: Sequence[str]) -> None:
        """Replace the displayed lines.

        Args:
            texts: All lines.
        """
        if self._live is None:
            lines([*texts, ""])
        else:
            self._live.update(Text("\n").join(_style_first_word(text) for text in texts), refresh=True)


def format_count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


@contextlib.contextmanager
def redrawn() -> Iterator[Redrawn]:
    """Yield a block of printed lines that can be replaced."""
    if not is_terminal():
        yield Redrawn(None)
        return
    wrapping = Console(highlight=False)  # it wraps long lines, because Live must know how many screen lines it replaces
    with Live(Text(), console=wrapping, auto_refresh=False, vertical_overflow="crop") as live:
        yield Redrawn(live)


def progress_bar(name: str, *, total: float, facts: Callable[[], str], below: Lines) -> ProgressBar:
    return ProgressBar(name, total=total, facts=facts, below=below, console=Console(highlight=False), vanishes=True)


@contextlib.contextmanager
def exit_silently_on_closed_pipe() -> Iterator[None]:
    """End the command silently if the reader of its output has exited, as in `stoker logs | head`. If the disk is full,
    end with an error.
    """
    try:
        yield
    except BrokenPipeError:
        _discard_further_output()
        raise SystemExit(141) from None
    except OSError as trouble:
        if trouble.errno not in _NO_ROOM:
            raise
        _discard_further_output()
        error(f"the output cannot be written: {trouble.strerror}; make room on that disk, or use another disk")
        raise SystemExit(1) from None


def _discard_further_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _style_first_word(text: str) -> Text:
    styled = Text(text)
    word = text.split(maxsplit=1)[0] if text.strip() else ""
    if word in _STYLES and text.startswith(f"  {word}"):
        styled.stylize(_STYLES[word], 2, 2 + len(word))
    elif word in ("session", "call", "pilot", "library", "context", "stoker") and not text.startswith(" "):
        styled.stylize("bold")
    return styled


# ---- types of options


MOST = 10**9


class WholeNumber(click.ParamType[int]):
    """A click type for whole numbers.

    Args:
        least: Minimum number.
        most: Maximum number.
    """

    name = "number"

    def __init__(self, least: int = 1, most: int = MOST) -> None:
        self.least = least
        self.most = most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """As `click.ParamType.convert`."""
        try:
            number = int(value)
        except ValueError:
            number = self.least - 1
        if not self.least <= number <= self.most:
            self.fail(f"{value!s:.40} is not a whole number from {self.least:,} to {self.most:,}", param, ctx)
        return number


class ByteSize(click.ParamType[int]):
    """A click type for a size with a unit, such as `32 MB`. The converted value is in bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """As `click.ParamType.convert`."""
        try:
            size = value if isinstance(value, int) else parse_bytes(value)
        except UnitError as error:
            self.fail(str(error), param, ctx)
        if not 0 < size <= MOST_BYTES:
            self.fail(f"{value!s:.40} is not a valid size; write for example 32 MB", param, ctx)
        return size


class Seconds(click.ParamType[float]):
    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            seconds = float(value)
        except ValueError:
            seconds = math.nan
        if not 0 <= seconds <= MOST:
            self.fail(f"{value!s:.40} is not a number of seconds, 0 or more; write for example 600", param, ctx)
        return seconds
