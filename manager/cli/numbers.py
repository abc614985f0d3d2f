"""Types of the command line's options: numbers that what reads them can work with."""

from __future__ import annotations

import math
from typing import Any

import click

from stoker.errors import UnitError
from stoker.largest import MOST_BYTES
from stoker.units import parse_bytes

MOST = 10**9


class WholeNumber(click.ParamType[int]):
    """A whole number from `least` to `most`."""

    name = "number"

    def __init__(self, least: int = 1, most: int = MOST) -> None:
        self.least = least
        self.most = most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number. Fail for text that is not a number, and for a number out of range."""
        try:
            number = int(value)
        except ValueError:
            number = self.least - 1
        if not self.least <= number <= self.most:
            self.fail(f"{value!s:.40} is not a whole number from {self.least:,} to {self.most:,}", param, ctx)
        return number


class ByteSize(click.ParamType[int]):
    """A size with its unit, `32 MB`, in bytes; more than none."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The bytes. Fails for a number without a unit, and for no bytes at all."""
        try:
            size = value if isinstance(value, int) else parse_bytes(value)
        except UnitError as error:
            self.fail(str(error), param, ctx)
        if not 0 < size <= MOST_BYTES:
            self.fail(f"{value!s:.40} is not a size that can be: write 32 MB, say", param, ctx)
        return size


class Seconds(click.ParamType[float]):
    """A number of seconds, 0 or more."""

    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number. Fails for what is none, for one below zero and for one without end."""
        try:
            seconds = float(value)
        except ValueError:
            seconds = math.nan
        if not 0 <= seconds <= MOST:
            self.fail(f"{value!s:.40} is not a number of seconds, 0 or more, as in 600", param, ctx)
        return seconds
