"""What a job printed: the evidence of one that ended before its pilot could say anything."""

from __future__ import annotations

from pathlib import Path

_TAIL_BYTES = 4096
_LAST_LINES = 5
_LINE_CHARACTERS = 200


def last_lines(folder: Path, job: str) -> list[str]:
    """The last lines that the job of this name printed: its errors, or if there are none its output."""
    for suffix in (".err", ".out"):
        lines = [line.strip() for line in _tail(folder / f"{job}{suffix}").splitlines() if line.strip()]
        if lines:
            return [line[:_LINE_CHARACTERS] for line in lines[-_LAST_LINES:]]
    return []


def _tail(file: Path) -> str:
    try:
        with file.open("rb") as data:
            data.seek(0, 2)
            data.seek(max(0, data.tell() - _TAIL_BYTES))
            return data.read().decode(errors="replace")
    except OSError:  # it never ran, or its node cannot write here
        return ""
