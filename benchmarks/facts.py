"""Where and when something was measured: what every stored record begins with."""

from __future__ import annotations

import os
import subprocess
import time

import msgspec

from benchmarks.paired import ROOT, machine


class Facts(msgspec.Struct, frozen=True):
    """`load`: the load average of the last minute, when it began and when it ended."""

    command: str
    commit: str
    machine: str
    at: str
    load: tuple[float, float]

    def line(self) -> str:
        """As pages show it."""
        before, after = self.load
        return f"`{self.command}`, commit {self.commit}, {self.machine}, {self.at}, load average {before} to {after}"


class Clock:
    """Notes the load when it is made, and again when the facts are asked for."""

    def __init__(self, command: str) -> None:
        self._command = command
        self._load = _load()

    def facts(self) -> Facts:
        """Of what was done since."""
        return Facts(self._command, commit(), machine(), time.strftime("%Y-%m-%d"), (self._load, _load()))


def commit() -> str:
    """The commit that is measured, with a mark when files were changed since."""
    try:
        said = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=10"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return said.stdout.strip()


def _load() -> float:
    return round(os.getloadavg()[0], 1)
