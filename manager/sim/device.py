"""A simulated device: how fast the calls on it run.

A scenario's call times are those of a device that does nothing else than what `slots` says: a context with two slots
runs two calls at once at that speed, so that each of them takes half of what the device can compute. As long as no
more is wanted than there is, each call runs at full speed, also beside calls of other libraries. When more is wanted,
all calls on the device are slowed down alike: each gets its part of the device in proportion to what it wants. That is
processor sharing, which is what time slices between the kernels of several processes come to.

Loads take no part in it: they are limited by links and by the host. Left out: what one library's use of the caches
and of the memory's bandwidth costs another, and computing that gets cheaper by being done together (a context that
does so says it with its slots). A library on several devices computes on the first of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stoker.manager.sim.agenda import Agenda, Entry, cancel

_ALL = 1.0 + 1e-9
"""What a device can compute; a little more is rounding."""


class Work:
    """One call that runs. `seconds`: how long it takes at full speed."""

    __slots__ = ("_act", "_args", "_began_at", "_entry", "_left_s", "_part", "_since", "_slowed", "seconds")

    def __init__(
        self, seconds: float, part: float, now: float, act: Callable[..., None], args: tuple[Any, ...]
    ) -> None:
        self.seconds = seconds
        self._part = part
        self._began_at = self._since = now
        self._left_s = seconds
        self._slowed = False
        self._entry: Entry | None = None
        self._act, self._args = act, args


class Device:
    """One device of a simulated pilot."""

    def __init__(self, agenda: Agenda) -> None:
        self._agenda = agenda
        self._works: dict[Work, None] = {}
        self._wanted = 0.0
        """Of what it can compute; more than all of it where calls wait for each other."""
        self._busy_s = self._busy_since = 0.0

    def begin(self, seconds: float, *, part: float, then: Callable[..., None], args: tuple[Any, ...]) -> Work:
        """Run something that takes so long if it gets the part of the device that it wants. `then` is called when it
        has ended, and says so with `done`."""
        work = Work(seconds, part, self._agenda.now, then, args)
        before = self._wanted
        if not self._works:
            self._busy_since = self._agenda.now
        self._works[work] = None
        self._wanted = before + part
        if self._wanted <= _ALL:
            work._entry = self._agenda.after(seconds, then, *args)
        else:
            self._share(before)
        return work

    def stop(self, work: Work) -> float:
        """It goes no further. Gives back how much of it was done, from 0 to 1."""
        left_s = self._left_s(work, self._wanted)
        if work._entry is not None:
            cancel(work._entry)
        self._leave(work)
        return 1.0 - left_s / work.seconds if work.seconds else 1.0

    def done(self, work: Work) -> float:
        """It has ended. Gives back how long it has run, in seconds by the clock."""
        self._leave(work)
        return self._agenda.now - work._began_at if work._slowed else work.seconds

    def busy_s(self, now: float) -> float:
        """For how long at least one call has run on it, until now. Several at once count once."""
        return self._busy_s + (now - self._busy_since if self._works else 0.0)

    def _leave(self, work: Work) -> None:
        before = self._wanted
        del self._works[work]
        if not self._works:
            self._busy_s += self._agenda.now - self._busy_since
        self._wanted = before - work._part if self._works else 0.0
        if before > _ALL:
            self._share(before)

    def _share(self, before: float) -> None:
        """Everything that runs goes on at the speed that is left for it. `before`: what was wanted until now."""
        slower = max(1.0, self._wanted)
        for work in self._works:
            work._left_s = self._left_s(work, before)
            work._since = self._agenda.now
            work._slowed = True
            if work._entry is not None:
                cancel(work._entry)
            work._entry = self._agenda.after(work._left_s * slower, work._act, *work._args)

    def _left_s(self, work: Work, wanted: float) -> float:
        """What is left of it, in seconds at full speed, if so much has been wanted since it was looked at last."""
        return max(0.0, work._left_s - (self._agenda.now - work._since) / (wanted if wanted > _ALL else 1.0))
