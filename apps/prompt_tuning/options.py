"""How jobs are submitted."""

from __future__ import annotations

from pathlib import Path

import msgspec

from stoker.apps.prompt_tuning.board import RUNS

DEVICES = 8
"""The most devices of a job that names no number: beyond it, communication costs more than a device brings."""


class SubmissionOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How jobs are submitted. `bank` empty: each model's own; None: none."""

    site: str = ""
    session: str = ""
    gang: tuple[int, int] = (1, DEVICES)
    late: str = "run"
    bank: str | None = ""
    out: Path = RUNS
    fresh: bool = False
