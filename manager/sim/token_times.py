"""What a program sees of a call to an engine: when its tokens come, and how that compares with what it wants.

A token is due as SLINFER has it (§VI-A, eq. 1): the first when the call has come and its time to first token is over,
each further one a time per output token later. A call has met its objective if none of its tokens was late. So tokens
that come early are a reserve for later ones, as they are for somebody who reads; `worst_gap_s` tells how long the
longest pause between two tokens was.

A call that runs again, because its library was lost, hands on only what its program does not have: the tokens of the
second run count from there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import msgspec

_ROUNDING_S = 2e-6
"""The agenda rounds to microseconds: a token that is so late is not late."""


class TokenTimes(msgspec.Struct):
    """The tokens of one call. Seconds of the simulation's clock.

    `prompt`: tokens that go in; `output`: those that come out, which the simulated engine alone knows beforehand.
    `due_at`: when the first is due, infinity if nobody waits for it; `tpot_s`: how much later each further one is, 0 if
    nobody waits for those.
    `grace_s`: the load of a library that the call had to wait for; the whole call may be so much later (§IX-A).
    """

    came_at: float
    prompt: int
    output: int
    due_at: float = math.inf
    tpot_s: float = 0.0
    grace_s: float = 0.0
    seen: int = 0
    """Tokens that its program has."""
    first_at: float = 0.0
    last_at: float = 0.0
    worst_gap_s: float = 0.0
    late_s: float = -math.inf
    """How late its latest token was against `due_at` and `tpot_s`; below zero: early."""

    @property
    def ttft_s(self) -> float:
        """Its time to first token."""
        return self.first_at - self.came_at

    @property
    def mean_tpot_s(self) -> float:
        """The mean time of its tokens after the first; 0 where there is none."""
        return (self.last_at - self.first_at) / (self.seen - 1) if self.seen > 1 else 0.0

    @property
    def has_objective(self) -> bool:
        """True if somebody waits for its tokens."""
        return self.due_at < math.inf

    @property
    def is_met(self) -> bool:
        """True if it has all of its tokens, and none came late (but for `grace_s`)."""
        return self.seen >= self.output and self.late_s <= self.grace_s + _ROUNDING_S

    def add(self, ends: Sequence[float], *, made: int) -> None:
        """A run of the call, which had made so many tokens, has made one more at each of these times."""
        new = ends[max(0, self.seen - made) :]
        if not new:
            return
        if self.seen:
            self.worst_gap_s = max(self.worst_gap_s, new[0] - self.last_at)
        else:
            self.first_at = new[0]
        if len(new) > 1:
            self.worst_gap_s = max(self.worst_gap_s, max(after - before for before, after in pairwise(new)))
        if self.due_at < math.inf and (self.tpot_s or not self.seen):
            due_at, tpot_s = self.due_at + self.seen * self.tpot_s, self.tpot_s
            due = new if tpot_s else new[:1]
            self.late_s = max(self.late_s, max(at - number * tpot_s for number, at in enumerate(due)) - due_at)
        self.seen += len(new)
        self.last_at = new[-1]
