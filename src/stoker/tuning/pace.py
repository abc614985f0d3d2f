"""The time of a job: where it is spent, how much is left, and the budget of a lookup in the bank.

PromptTuner §4.4 bounds the time left by `remaining iterations x longest iteration` on the job's devices. We add the
remaining evaluations, at their longest time. The first iteration after a start does not count, because it includes
one-time work. Only recent iterations count. For a number of devices without measurements, computation scales with the
batch per device, the exchange does not.

PromptTuner §4.4.3 gives a lookup 20 % of a job's SLO. A job's wait is not subtracted. A pace is used only for jobs with
the same kind of device and `virtual_tokens`.
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

from stoker.decoding import UNREADABLE
from stoker.whole_files import write_whole

_KEPT = 50


class Part(enum.Enum):
    BANK = "bank"
    """Looking up the initial prompt, and adding the tuned prompt to the bank."""
    START = "start"
    """Meeting other ranks, making the soft prompt, reading a checkpoint."""
    DATA = "data"
    """Choosing and encoding samples."""
    COMPUTE = "compute"
    """Forward and backward passes, and optimizer steps."""
    COMMUNICATION = "communication"
    """The exchange of gradients, including the wait for the slowest rank."""
    EVALUATION = "evaluation"
    """Evaluating the soft prompt."""
    CHECKPOINTS = "checkpoints"
    """Making and writing checkpoints."""


class PartClock:
    """Seconds by part of a job."""

    def __init__(self) -> None:
        self._spent_s = dict.fromkeys(Part, 0.0)

    @contextlib.contextmanager
    def time(self, part: Part) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._spent_s[part] += time.perf_counter() - began

    def go_on_from(self, spent_s: dict[str, float]) -> None:
        for part in Part:
            self._spent_s[part] += spent_s.get(part.value, 0.0)

    def spent_s(self) -> dict[str, float]:
        return {part.value: seconds for part, seconds in self._spent_s.items()}


def communication_share(spent_s: dict[str, float]) -> float:
    """Return the exchange's part of the iterations' time; 0 without iterations."""
    exchange = spent_s.get(Part.COMMUNICATION.value, 0.0)
    both = exchange + spent_s.get(Part.COMPUTE.value, 0.0)
    return exchange / both if both > 0 else 0.0


class TimeLeft(msgspec.Struct, frozen=True):
    """Seconds left. `measured`: True for an upper bound, False if scaled from another number of devices."""

    seconds: float
    measured: bool


class IterationPace:
    """Seconds per iteration, by number of devices."""

    def __init__(self, *, batch: int, evaluate_every: int) -> None:
        self._batch = batch
        self._evaluate_every = evaluate_every
        self._evaluations: deque[float] = deque(maxlen=_KEPT)
        self._kept: dict[int, deque[tuple[float, float]]] = {}

    def add(self, seconds: float, *, devices: int, communication_s: float = 0.0) -> None:
        self._kept.setdefault(devices, deque(maxlen=_KEPT)).append((seconds, min(communication_s, seconds)))

    def add_evaluation(self, seconds: float) -> None:
        self._evaluations.append(seconds)

    def longest_s(self, *, devices: int) -> float | None:
        """Return the seconds of the longest recent iteration on this number of devices, or None."""
        kept = self._kept.get(devices)
        return max(seconds for seconds, _ in kept) if kept else None

    def time_left(self, iterations: int, *, devices: int, allocation_s: float = 0.0) -> TimeLeft | None:
        """Return the time of `iterations`, plus `allocation_s` for getting the devices. None before the first
        measurement.
        """
        evaluations = math.ceil(iterations / self._evaluate_every)
        pauses_s = allocation_s + evaluations * max(self._evaluations, default=0.0)
        longest = self.longest_s(devices=devices)
        if longest is not None:
            return TimeLeft(pauses_s + iterations * longest, measured=True)
        if not self._kept:
            return None
        near = min(self._kept, key=lambda known: (abs(math.log(known / devices)), known))
        scale = math.ceil(self._batch / devices) / math.ceil(self._batch / near)
        longest = max((seconds - exchange) * scale + exchange for seconds, exchange in self._kept[near])
        return TimeLeft(pauses_s + iterations * longest, measured=False)


BUDGET = 0.2
"""The share of the time from submission to deadline that a lookup may take."""
_PACE_FILE = "pace.json"


class ScoringPace(msgspec.Struct, frozen=True):
    """Seconds per scored prompt, and of the last lookup, on one device."""

    score_s: float
    lookup_s: float
    virtual_tokens: int = 0


def is_over(lookup_s: float, *, slo_s: float) -> bool:
    """True if a lookup exceeds its budget; False without a deadline.

    Args:
        lookup_s: Seconds of the lookup.
        slo_s: Seconds from submission to deadline; 0: no deadline.
    """
    return 0 < slo_s * BUDGET < lookup_s


def read_paces(folder: Path, *, virtual_tokens: int = 0) -> dict[str, ScoringPace]:
    """Return the measured paces of a bank by kind of device.

    Args:
        folder: The bank's folder.
        virtual_tokens: Return only paces measured with this number.
    """
    known = _read_known(folder)
    return {kind: one for kind, paces in known.items() for one in paces if one.virtual_tokens == virtual_tokens}


def remember(folder: Path, kind: str, pace: ScoringPace) -> None:
    """Store a lookup's pace in the bank. Of two concurrent writes one may be lost."""
    known = _read_known(folder)
    others = [one for one in known.get(kind, []) if one.virtual_tokens != pace.virtual_tokens]
    with contextlib.suppress(OSError):
        write_whole(folder / _PACE_FILE, msgspec.json.encode({**known, kind: [*others, pace]}), mode=0o666)


def _read_known(folder: Path) -> dict[str, list[ScoringPace]]:
    try:
        return msgspec.json.decode((folder / _PACE_FILE).read_bytes(), type=dict[str, list[ScoringPace]])
    except (OSError, *UNREADABLE):
        return {}
