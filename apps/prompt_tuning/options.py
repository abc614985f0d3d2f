"""How jobs are submitted."""

from __future__ import annotations

from pathlib import Path

import msgspec

from stoker.apps.prompt_tuning.board import RUNS

DEVICES = 8
"""A job whose user does not say runs on at most so many devices: communication eats what more would bring."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How jobs are submitted. `bank` empty: each model's own; None: none."""

    site: str = ""
    session: str = ""
    gang: tuple[int, int] = (1, DEVICES)
    late: str = "run"
    bank: str | None = ""
    out: Path = RUNS
    fresh: bool = False
