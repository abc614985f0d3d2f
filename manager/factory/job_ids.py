"""The id of a new job in what `sbatch`, `qsub` or `bsub` printed, between the lines that a site adds (pure).

Sites wrap these commands: a line about the budget before the id, a banner after it. A sentence of the batch system that
names the id counts wherever it is. A line that is an id and nothing else counts if it is the only one. In every other
case the answer is empty, and the job is found by its name.
"""

from __future__ import annotations

import re

from stoker.site import ProviderKind

_SENTENCES = {
    ProviderKind.SLURM: re.compile(r"\bSubmitted batch job (\d+)"),
    ProviderKind.GRID_ENGINE: re.compile(r"\bYour job(?:-array)? (\d+)\S* \("),
    ProviderKind.LSF: re.compile(r"\bJob <(\d+)> is submitted to\b", re.IGNORECASE),
}
_LINES = {
    ProviderKind.SLURM: re.compile(r"(\d+)(?:;\S+)?"),  # sbatch --parsable, with the cluster's name
    ProviderKind.PBS: re.compile(r"(\d+(?:\[\])?(?:\.[A-Za-z][\w.-]*)?)"),
    ProviderKind.GRID_ENGINE: re.compile(r"(\d+)(?:\.\d+-\d+:\d+)?"),  # -terse; an array names its tasks
}
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def in_sentence(kind: ProviderKind, text: str) -> str:
    """The id in the batch system's own sentence; empty if there is none, or if sentences name different ids."""
    found = set(_SENTENCES[kind].findall(text)) if kind in _SENTENCES else set()
    return str(found.pop()) if len(found) == 1 else ""


def on_own_line(kind: ProviderKind, text: str) -> str:
    """The id on a line of its own; empty if no line looks like an id, or if several do."""
    pattern = _LINES.get(kind)
    lines = [_COLOURS.sub("", line).strip() for line in text.splitlines()]
    found = {match[1] for line in lines if pattern is not None and (match := pattern.fullmatch(line))}
    return str(found.pop()) if len(found) == 1 else ""
