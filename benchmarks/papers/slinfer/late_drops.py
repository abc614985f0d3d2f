"""Drop a waiting call if its queueing delay exceeds its objective for the first token (SLINFER §IX-B).

A call that waits for a load gets a grace period equal to the cold start (§IX-A). A policy calls `waits` for each
waiting call, which returns a timer; `fired` returns the drops.
"""

from __future__ import annotations

import heapq

from stoker.manager.core.nouns import Call, CallState
from stoker.manager.core.seams import Drop, Timer, View
from stoker.manager.policies.slinfer.validation import cold_start_s, first_token_s
from stoker.protocol.ids import CallId

_KEY = "late-drops"
_ROUNDING_S = 1e-6
"""Tolerance in seconds, because a clock may count in microseconds."""


class LateDrops:
    def __init__(self) -> None:
        self._due: list[tuple[float, CallId]] = []
        """Heap of the check times of calls. Calls that left are skipped."""
        self._timer_at = float("inf")

    def waits(self, view: View, call: Call) -> tuple[Timer, ...]:
        wanted_s = first_token_s(call)
        if not wanted_s:
            return ()
        heapq.heappush(self._due, (call.submitted_at + wanted_s, call.id))
        return self._set_timer(view.now)

    def fired(self, view: View, key: str) -> tuple[Drop | Timer, ...]:
        """Return the drops and the next timer; nothing for the timer of another policy."""
        if key != _KEY:
            return ()
        self._timer_at = float("inf")
        drops: list[Drop] = []
        while self._due and self._due[0][0] <= view.now + _ROUNDING_S:
            _, id = heapq.heappop(self._due)
            call = view.calls.get(id)
            if call is None or call.state is not CallState.WAITING:
                continue
            waited_s, wanted_s = view.now - call.submitted_at, first_token_s(call)
            grace_s = cold_start_s(view, call)
            late_at = call.submitted_at + wanted_s + grace_s
            if late_at <= view.now + _ROUNDING_S:
                drops.append(Drop(id, _why(waited_s, wanted_s, grace_s)))
            else:
                heapq.heappush(self._due, (late_at, id))
        return (*drops, *self._set_timer(view.now))

    def _set_timer(self, now: float) -> tuple[Timer, ...]:
        if not self._due or self._due[0][0] >= self._timer_at:
            return ()
        self._timer_at = max(self._due[0][0], now)
        return (Timer(self._timer_at, _KEY),)


def _why(waited_s: float, wanted_s: float, grace_s: float) -> str:
    grace = f", and {grace_s:.3g} s for a load" if grace_s else ""
    return f"it has waited {waited_s:.3g} s for its first token, which was wanted within {wanted_s:.3g} s{grace}"
