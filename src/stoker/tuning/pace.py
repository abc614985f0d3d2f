"""Measure where the time of a job is spent, estimate the time left, and limit the time of a bank lookup.

PromptTuner §4.4 bounds the time left by `remaining iterations x longest iteration`. We add the longest evaluation for
each remaining evaluation. The first iteration after a start is ignored, because it includes one-time work. Only the
last 50 iterations count. §4.4.3 limits a lookup to 20 % of the time from submission to deadline. A measured
`ScoringPace` is valid only for the same kind of device and the same `virtual_tokens`.
"""

from __future__ import annotations

import contextlib
import enum
import math
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import msgspec

from stoker.decoding import read_json
from stoker.whole_files import write_whole

_KEPT_MEASUREMENTS = 50


class Part(enum.Enum):
    BANK = "bank"
    """Look up the initial prompt, and add the tuned prompt to the bank."""
    START = "start"
    """Connect to other ranks, create the soft prompt, read a checkpoint."""
    DATA = "data"
    """Select and encode samples."""
    COMPUTE = "compute"
    """Forward and backward passes, and optimizer steps."""
    COMMUNICATION = "communication"
    """Exchange of gradients, including the wait for the slowest rank."""
    EVALUATION = "evaluation"
    CHECKPOINTS = "checkpoints"


class PartClock:
    def __init__(self) -> None:
        self._spent_s = dict.fromkeys(Part, 0.0)

    @contextlib.contextmanager
    def time(self, part: Part) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._spent_s[part] += time.perf_counter() - began

    def add_earlier_seconds(self, spent_s: dict[str, float]) -> None:
        for part in Part:
            self._spent_s[part] += spent_s.get(part.value, 0.0)

    def spent_s(self) -> dict[str, float]:
        return {part.value: seconds for part, seconds in self._spent_s.items()}


def communication_share(spent_s: dict[str, float]) -> float:
    """Return the share of the iterations' time that the exchange of gradients took (0: no iterations)."""
    exchange = spent_s[Part.COMMUNICATION.value]
    both = exchange + spent_s[Part.COMPUTE.value]
    return exchange / both if both > 0 else 0.0


class IterationPace:
    """Seconds per iteration and per evaluation on the job's devices."""

    def __init__(self, *, evaluate_every: int) -> None:
        self._evaluate_every = evaluate_every
        self.iterations_s: deque[float] = deque(maxlen=_KEPT_MEASUREMENTS)
        self.evaluations_s: deque[float] = deque(maxlen=_KEPT_MEASUREMENTS)

    def left_s(self, iterations: int) -> float | None:
        """Return an upper bound on the seconds for `iterations` more iterations; None without measurements."""
        if not self.iterations_s:
            return None
        evaluations = math.ceil(iterations / self._evaluate_every)
        return evaluations * max(self.evaluations_s, default=0.0) + iterations * max(self.iterations_s)


LOOKUP_BUDGET_SHARE = 0.2
"""Share of the time from submission to deadline that a lookup may take."""
_PACE_FILE = "pace.json"


class ScoringPace(msgspec.Struct, frozen=True):
    """Seconds per scored prompt, and seconds of the last lookup, on one device."""

    score_s: float
    lookup_s: float
    virtual_tokens: int = 0


def is_over(lookup_s: float, *, slo_s: float) -> bool:
    """True if a lookup exceeds its budget; False without a deadline.

    Args:
        lookup_s: Seconds of the lookup.
        slo_s: Seconds from submission to deadline; 0: no deadline.
    """
    return 0 < slo_s * LOOKUP_BUDGET_SHARE < lookup_s


def read_paces(folder: Path, *, virtual_tokens: int = 0) -> dict[str, ScoringPace]:
    """Return the measured paces of a bank, by kind of device.

    Args:
        folder: The bank's folder.
        virtual_tokens: Return only paces for this number of virtual tokens.
    """
    known = _read_all_paces(folder)
    return {kind: one for kind, paces in known.items() for one in paces if one.virtual_tokens == virtual_tokens}


def store_pace(folder: Path, kind: str, pace: ScoringPace) -> None:
    """Store the pace of a lookup. If two processes store paces at once, one may be lost."""
    known = _read_all_paces(folder)
    others = [one for one in known.get(kind, []) if one.virtual_tokens != pace.virtual_tokens]
    with contextlib.suppress(OSError):
        write_whole(folder / _PACE_FILE, msgspec.json.encode({**known, kind: [*others, pace]}), mode=0o666)


def _read_all_paces(folder: Path) -> dict[str, list[ScoringPace]]:
    return read_json(folder / _PACE_FILE, dict[str, list[ScoringPace]]) or {}
