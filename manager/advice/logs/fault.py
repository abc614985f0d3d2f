"""What was found in a log, and whose fault it is: the values that `locate` and `classify` give."""

from __future__ import annotations

import enum

import msgspec


class FaultKind(enum.Enum):
    """Whose fault a failure is (SchedMate §3.3, after Acme's taxonomy)."""

    INFRASTRUCTURE = "infrastructure"
    """Hardware, network, file systems, nodes, the batch system, other users of a device: the same run may go well
    elsewhere, or later."""
    FRAMEWORK = "framework"
    """The installed software does not fit together or does not fit the machine: another installation cures it."""
    USER = "user"
    """The program, its data, its settings, or what it asked for."""


class LogLine(msgspec.Struct, frozen=True):
    """A line of a log by its number, from 1. Secrets in its text are masked."""

    number: int
    text: str


class Located(msgspec.Struct, frozen=True):
    """The first lines of a log that matter.

    `first`: the line with which the failure begins. `before`, `after`: its context, without it. `signs`: the lines of
    the failure that look bad, each kind of line once, in their order; `first` is among them. `traceback`: the first
    whole traceback of Python, chained ones included; empty: there is none. `lines`: lines of the whole log, or of as
    much of it as was read.
    """

    first: LogLine
    before: tuple[LogLine, ...] = ()
    after: tuple[LogLine, ...] = ()
    signs: tuple[LogLine, ...] = ()
    traceback: tuple[LogLine, ...] = ()
    lines: int = 0

    @property
    def window(self) -> tuple[LogLine, ...]:
        """The first line with its context."""
        return (*self.before, self.first, *self.after)


class Fault(msgspec.Struct, frozen=True):
    """Whose fault a failure is. `component`: what failed, in a word (`gpu`, `network`, `code`). `sure`: from 0 to 1.
    `means`: what happened, in words. `proof`: the lines that show it, at least one; their secrets are masked."""

    kind: FaultKind
    component: str
    sure: float
    means: str
    proof: tuple[LogLine, ...]
