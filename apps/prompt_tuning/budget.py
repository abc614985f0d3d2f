"""What lookups in a bank take, remembered beside it, and which part of a job's time one may take.

PromptTuner §4.4.3 gives a lookup 20 % of a job's SLO, since the slowest tuning from a looked-up prompt is still 1.2
times as fast as from an automatic one: what takes longer than a fifth of the time may cost more than it saves. The
paper measures against the SLO as it was given, and so do we: what a job has waited is not taken from it.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

BUDGET = 0.2
"""Of the time from submission to deadline, how much a lookup may take."""
_FILE = "pace.json"


class Pace(msgspec.Struct, frozen=True):
    """The seconds of a score on one kind of device, and those of the last lookup."""

    score_s: float
    lookup_s: float


def is_over(lookup_s: float, *, slo_s: float) -> bool:
    """Whether a lookup takes more than its part; never for a job without a deadline (`slo_s` 0)."""
    return 0 < slo_s * BUDGET < lookup_s


def read_paces(folder: Path) -> dict[str, Pace]:
    """What lookups in this folder's bank take, by kind of device; empty where nothing is known."""
    try:
        return msgspec.json.decode((folder / _FILE).read_bytes(), type=dict[str, Pace])
    except (OSError, msgspec.MsgspecError):
        return {}


def remember(folder: Path, kind: str, pace: Pace) -> None:
    """Keep what a lookup took on this kind of device. Of two that write at once one is kept: either will do."""
    draft = folder / f".{_FILE}.{os.getpid()}"
    with contextlib.suppress(OSError):
        draft.write_bytes(msgspec.json.encode({**read_paces(folder), kind: pace}))
        os.replace(draft, folder / _FILE)
