"""Where the time of a job goes, and how much of it is left.

PromptTuner §4.4 bounds what is left by `remaining iterations x longest iteration` on the devices that the job has. An
iteration is data, computation and exchange; evaluations are counted by their own number and longest time. The first
iteration after a start is left out, as it pays for what happens once; and the longest is taken over the last ones, so
that one hiccup does not darken the forecast for the rest of the run.

For a number of devices that was never measured the same parts are scaled: computation with the largest share of the
batch that a device gets, while exchange stays. It is a forecast and no bound: a device is not so much faster with a
small batch, and the exchange grows. `measured` says which of the two it is.
"""

from __future__ import annotations

import contextlib
import enum
import math
import time
from collections import deque
from collections.abc import Iterator

import msgspec

_KEPT = 50


class Part(enum.Enum):
    """What a job spends its time with."""

    BANK = "bank"
    """Looking up the initial prompt in the bank, and putting the tuned one into it."""
    START = "start"
    """Meeting the other ranks, making the soft prompt, reading a checkpoint."""
    DATA = "data"
    """Choosing and encoding samples."""
    COMPUTE = "compute"
    """Forward and backward passes, and the optimizer's steps."""
    COMMUNICATION = "communication"
    """The exchange of gradients, with the wait for the slowest rank."""
    EVALUATION = "evaluation"
    """Measuring the soft prompt while tuning, and in the end."""
    CHECKPOINTS = "checkpoints"
    """Making and writing them."""


class PartClock:
    """Seconds by part."""

    def __init__(self) -> None:
        self._spent_s = dict.fromkeys(Part, 0.0)

    @contextlib.contextmanager
    def time(self, part: Part) -> Iterator[None]:
        """Count the block's time to this part."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._spent_s[part] += time.perf_counter() - began

    def go_on_from(self, spent_s: dict[str, float]) -> None:
        """Add what earlier runs of the same job have spent."""
        for part in Part:
            self._spent_s[part] += spent_s.get(part.value, 0.0)

    def spent_s(self) -> dict[str, float]:
        """Seconds so far, by the part's name."""
        return {part.value: seconds for part, seconds in self._spent_s.items()}


def communication_share(spent_s: dict[str, float]) -> float:
    """The exchange's share of the time of iterations (computation and exchange); 0 before there is any."""
    exchange = spent_s.get(Part.COMMUNICATION.value, 0.0)
    both = exchange + spent_s.get(Part.COMPUTE.value, 0.0)
    return exchange / both if both > 0 else 0.0


class TimeLeft(msgspec.Struct, frozen=True):
    """Seconds that are left. `measured`: it is a bound from iterations on that many devices, else it is scaled."""

    seconds: float
    measured: bool


class IterationPace:
    """Seconds an iteration, by number of devices."""

    def __init__(self, *, batch: int, evaluate_every: int) -> None:
        self._batch = batch
        self._evaluate_every = evaluate_every
        self._evaluations: deque[float] = deque(maxlen=_KEPT)
        self._kept: dict[int, deque[tuple[float, float]]] = {}

    def add(self, seconds: float, *, devices: int, communication_s: float = 0.0) -> None:
        """Note an iteration."""
        self._kept.setdefault(devices, deque(maxlen=_KEPT)).append((seconds, min(communication_s, seconds)))

    def add_evaluation(self, seconds: float) -> None:
        """Note an evaluation."""
        self._evaluations.append(seconds)

    def longest_s(self, *, devices: int) -> float | None:
        """The longest of the last iterations on that many devices; None if none was measured."""
        kept = self._kept.get(devices)
        return max(seconds for seconds, _ in kept) if kept else None

    def time_left(self, iterations: int, *, devices: int, allocation_s: float = 0.0) -> TimeLeft | None:
        """How long `iterations` take on `devices` devices, after `allocation_s` to get them. None before any iteration
        was measured."""
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
