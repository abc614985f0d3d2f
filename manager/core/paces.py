"""How long a context's work takes on one replica, two, or more: what schedulers of gangs predict with.

A call says how much work it is (`work_of`), and what was measured is seconds for a unit of it, by the size of the gang
that did it. PromptTuner (§4.4) predicts a job's time as its iterations at most times the most that one takes; a single
odd iteration would make every job look hopeless for ever, so the most is here the mean and twice the mean deviation,
over the last measurements.

How much of its work a call does is learned as well. Its items are a bound (iterations at most), and one that has
reached its target ends before; those that began by looking for a good start (`Features.shared_s`) sooner than others,
and whatever else a `Features.kind` tells apart. The paper predicts with the bound. When asked, `left` takes the most
that any of the last calls of its kind did instead.

A size that was never measured is told from the nearest one that was, by Amdahl's law with a small serial part: prompt
tuning scales almost linearly (§2.2), but a promise should not count on the last few percent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from stoker.protocol.calls import Features

_NEW_WEIGHT = 0.2
"""The mean follows the last measurements with at least this weight."""
_SERIAL = 0.05
"""What of a unit's time no second replica takes away, until it is measured."""
_REMEMBERED, _FEW, _KINDS = 64, 8, 64
"""So many calls of a kind are remembered by what they did; before the second number of them has ended nothing is known.
Of more kinds the one that came first is forgotten."""
_Kind = tuple[str, bool]
"""What a call says of itself, and whether it does something before its first item."""
_CAUTION = 2.0
"""So many mean deviations above the mean is called a bound."""
LEAST_S = 0.001
"""A measurement below this is counted as this. What passes before a gang's first item is an estimate, and may be longer
than the whole run; a pace of zero would say that a call takes no time at all."""
MEET_S = 2.0
"""What a gang of several may take until its ranks have met (§5.1: at most 2 s)."""


class Paces:
    """Seconds for a unit of work by gang size, each with its mean deviation. `meet_s`: what meeting takes in seconds,
    for gangs of several."""

    __slots__ = ("_ends", "_known", "meet_s", "parts")

    def __init__(self) -> None:
        self._known: dict[int, tuple[float, float, int]] = {}
        """By size: mean, mean absolute deviation, measurements."""
        self._ends: dict[_Kind, list[float]] = {}
        """Which part of its items each of the last calls of a kind did."""
        self.parts: dict[_Kind, float] = {}
        """The largest of these, of kinds of which enough have ended."""
        self.meet_s = MEET_S

    def tell(self, seconds: Mapping[int, float], *, meet_s: float = MEET_S) -> None:
        """What is known beforehand (a profile): seconds for a unit by size. Measurements move it like any other."""
        self._known.update({size: (max(pace, LEAST_S / 1000), 0.0, 1) for size, pace in seconds.items()})
        self.meet_s = meet_s

    def learn(self, size: int, *, work: float, seconds: float) -> None:
        """So much work took a gang of this size so long, meeting not counted."""
        if work <= 0 or seconds < 0:
            return
        pace = max(seconds, LEAST_S) / work
        mean, deviation, count = self._known.get(size, (pace, 0.0, 0))
        weight = max(_NEW_WEIGHT, 1 / (count + 1))
        deviation += weight * (abs(pace - mean) - deviation)
        mean += weight * (pace - mean)
        self._known[size] = (mean, deviation, count + 1)

    def end(self, features: Features | None, done: float) -> None:
        """A call has ended well after `done` of its items."""
        if features is not None and features.items:
            kind = _kind(features)
            ends = self._ends.setdefault(kind, [])
            ends.append(min(1.0, done / features.items))
            del ends[:-_REMEMBERED]
            if len(ends) >= _FEW:
                self.parts[kind] = max(ends)
            if len(self._ends) > _KINDS:
                oldest = next(iter(self._ends))
                del self._ends[oldest]
                self.parts.pop(oldest, None)

    def share_left(self, features: Features | None, done: float = 0.0, *, learn: bool = True) -> float:
        """The part of its items that a call has still to do at most, when it has done this part. `learn`: at most as
        the last of its kind that did as much; all of them while too few have ended."""
        most = 1.0
        if learn and features is not None and (kind := _kind(features)) in self.parts:
            most = max((part for part in self._ends[kind] if part >= done), default=1.0)
        return max(0.0, most - done)

    def mean_s(self, size: int, work: float) -> float | None:
        """Seconds that `work` units take on `size` replicas, with their meeting; None while nothing was measured."""
        return self._predict(size, work, caution=0.0)

    def bound_s(self, size: int, work: float) -> float | None:
        """The most that it should take."""
        return self._predict(size, work, caution=_CAUTION)

    @property
    def measured(self) -> Mapping[int, tuple[float, float, int]]:
        """By size: seconds for a unit, their mean absolute deviation, and how often that was measured."""
        return self._known

    def _predict(self, size: int, work: float, *, caution: float) -> float | None:
        if not self._known:
            return None
        if size not in self._known:
            nearest = min(self._known, key=lambda known: (abs(math.log(known / size)), known))
            scale = _share(size) / _share(nearest)
        else:
            nearest, scale = size, 1.0
        mean, deviation, _ = self._known[nearest]
        return work * scale * (mean + caution * deviation) + (self.meet_s if size > 1 else 0.0)


def _kind(features: Features) -> _Kind:
    return features.kind, features.fixed_s + features.shared_s > 0


def work_of(features: Features | None) -> float:
    """A call's work in units: tokens where it says how many an item has, else items."""
    return float(features.items * max(1, features.input_length)) if features is not None else 1.0


def _share(size: int) -> float:
    """The time of `size` replicas for a unit, as a part of one replica's time (Amdahl)."""
    return _SERIAL + (1 - _SERIAL) / size
