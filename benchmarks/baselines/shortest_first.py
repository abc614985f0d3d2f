"""SchedMate's first two baselines (§4.3), non-preemptive: first come first served, and shortest expected run first.

The queue head waits for enough free libraries, and no call overtakes the head, as in Lucid's published simulator
(`simulation/policy/fifo.py`, `sjf.py`). With `skip`, later calls that fit may start.

Calls are sorted by priority, then `expected_s`: by default the mean of earlier calls of the function, else advice on
the context. A call of unknown length counts as short.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from benchmarks.baselines.one_line import PERIOD_S, EveryDevice, OneLine, start, waiting_among
from stoker.manager.core.nouns import Call, CallState, Context
from stoker.manager.core.seams import Action, Changes, Policies, Provisioning, View
from stoker.manager.policies.provisioning import KeepBlocks

_Entry = tuple[int, float, float, int, Call]
"""Negative priority, expected run in seconds, arrival time, call number, call."""


def known_run_s(call: Call) -> float:
    """Return mean seconds of calls of the function, else the advised seconds, else 0."""
    advised = (each.run_s for each in call.group.context.advice.values())
    return call.group.cost.run_s or min((seconds for seconds in advised if seconds), default=0.0)


class InOrder(OneLine):
    """Dispatch in order of priority, `expected_s`, arrival."""

    def __init__(self, *, expected_s: Callable[[Call], float], skip: bool = False, period_s: float = PERIOD_S) -> None:
        super().__init__(period_s=period_s)
        self.expected_s = expected_s
        self.skip = skip
        self._lines: dict[Context, list[_Entry]] = {}

    def round(self, view: View, changes: Changes) -> Iterator[Action]:
        for call in waiting_among(view, changes):
            priority, expected_s = call.group.options.priority, self.expected_s(call)
            entry = -priority, expected_s, call.submitted_at, call.id, call
            heapq.heappush(self._lines.setdefault(call.group.context, []), entry)
        for context, line in self._lines.items():
            yield from self._begin(context, line)

    def _begin(self, context: Context, line: list[_Entry]) -> Iterator[Action]:
        passed: list[_Entry] = []
        while line and context.idle:
            call = line[0][-1]
            if call.state is not CallState.WAITING:
                heapq.heappop(line)
                continue
            order = start(call)
            if order is not None:
                heapq.heappop(line)
                yield order
            elif self.skip:
                passed.append(heapq.heappop(line))
            else:
                break
        for entry in passed:
            heapq.heappush(line, entry)


def fifo(*, provisioning: Provisioning | None = None, skip: bool = False, period_s: float = PERIOD_S) -> Policies:
    return shortest_first(provisioning=provisioning, expected_s=lambda _: 0.0, skip=skip, period_s=period_s)


def shortest_first(
    *, provisioning: Provisioning | None = None, expected_s: Callable[[Call], float] = known_run_s, skip: bool = False,
    period_s: float = PERIOD_S,
) -> Policies:  # fmt: skip
    asked = provisioning or KeepBlocks()
    dispatch = InOrder(expected_s=expected_s, skip=skip, period_s=period_s)
    return Policies(dispatch, EveryDevice(provisioning=asked), asked)
