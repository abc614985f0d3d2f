"""What lookups in a bank take, remembered beside it, and which part of a job's time one may take.

PromptTuner §4.4.3 gives a lookup 20 % of a job's SLO, since the slowest tuning from a looked-up prompt is still 1.2
times as fast as from an automatic one: what takes longer than a fifth of the time may cost more than it saves. The
paper measures against the SLO as it was given, and so do we: what a job has waited is not taken from it.

What a score takes depends on the device and on how many tokens the job has a prompt repeated or cut to. A pace counts
for jobs with as many `virtual_tokens` as it was measured with, and for no other: to measure anew takes a few scores of
a lookup's hundreds, and to guess from another number is wrong either way, as the samples' share of a score is not
known. Without virtual tokens each prompt has its own length: 0 is a number like any other.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from stoker.decoding import UNREADABLE
from stoker.whole_files import write_whole

BUDGET = 0.2
"""Of the time from submission to deadline, how much a lookup may take."""
_FILE = "pace.json"


class ScoringPace(msgspec.Struct, frozen=True):
    """The seconds of a score on one device of a kind, and those of the last lookup, for jobs with so many virtual
    tokens. A gang shares them: it takes as many times less as it has devices."""

    score_s: float
    lookup_s: float
    virtual_tokens: int = 0


def is_over(lookup_s: float, *, slo_s: float) -> bool:
    """Whether a lookup takes more than its part; never for a job without a deadline (`slo_s` 0)."""
    return 0 < slo_s * BUDGET < lookup_s


def read_paces(folder: Path, *, virtual_tokens: int = 0) -> dict[str, ScoringPace]:
    """What lookups in this folder's bank take a job with so many virtual tokens, by kind of device; empty where nothing
    is known."""
    known = _read(folder)
    return {kind: one for kind, paces in known.items() for one in paces if one.virtual_tokens == virtual_tokens}


def remember(folder: Path, kind: str, pace: ScoringPace) -> None:
    """Keep what a lookup took on this kind of device, in place of what one with as many virtual tokens did. Of two that
    write at once one is kept: either will do."""
    known = _read(folder)
    others = [one for one in known.get(kind, []) if one.virtual_tokens != pace.virtual_tokens]
    with contextlib.suppress(OSError):
        write_whole(folder / _FILE, msgspec.json.encode({**known, kind: [*others, pace]}), mode=0o666)


def _read(folder: Path) -> dict[str, list[ScoringPace]]:
    """By kind of device, one for each number of virtual tokens. A file from before these were kept is as none."""
    try:
        return msgspec.json.decode((folder / _FILE).read_bytes(), type=dict[str, list[ScoringPace]])
    except (OSError, *UNREADABLE):
        return {}
