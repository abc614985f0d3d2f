"""SchedMate's first two baselines (§4.3), non-preemptive: first come first served, and shortest expected run first.

The queue head waits for enough free libraries, and no call overtakes the head, as in Lucid's published simulator
(`simulation/policy/fifo.py`, `sjf.py`). With `skip`, later calls that fit may start. Calls are sorted by priority, then
`expected_s`. The context is loaded on every device, and a call for n libraries runs on any n free libraries.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from benchmarks.baselines.replicas import InRounds, is_free, send
from stoker.manager.core.nouns import Call, CallState, Context, Library
from stoker.manager.core.seams import Action, Changes, Load, Policies, Provisioning, View
from stoker.manager.policies.provisioning import KeepBlocks
from stoker.manager.policies.residency import WholeDevice
from stoker.protocol.ids import RecipeKey


class EveryDevice(WholeDevice):
    honours = frozenset()

    def on_waiting_calls(self, view: View, context: Context) -> Sequence[Action]:
        """Load the context on each empty device. If no device is empty, fail gangs larger than the site."""
        key = RecipeKey(context.recipe.key)
        loads = [
            Load(key, device.pilot.id, (device.id,), device.facts.memory_bytes)
            for device in view.devices()
            if not device.libraries and self.fits(context, device)
        ]
        return loads or self.hopeless_gangs(view, context)


class OneLine(InRounds):
    honours = frozenset({"priority"})
    period_s = 0.1

    def serve_order(self, view: View, context: Context) -> Sequence[Library]:  # noqa: ARG002
        return ()

    def may_skip_rounds(self, view: View) -> bool:  # noqa: ARG002
        return True


def waiting_among(view: View, changes: Changes) -> list[Call]:
    found = (view.calls.get(id) for id in sorted(changes.calls))
    return [call for call in found if call is not None and call.state is CallState.WAITING]


def start(call: Call) -> Action | None:
    """Start a call on its minimum number of libraries; None if too few are free."""
    count = max(1, call.group.options.gang[0])
    if len(call.group.context.idle) < count:
        return None
    free = (library for library in call.group.context.idle.values() if is_free(library) and library.admits(call))
    chosen = list(islice(free, count))
    return send(call, chosen) if len(chosen) == count else None


_Entry = tuple[int, float, float, int, Call]
"""Sort keys (negative priority, expected run in seconds, arrival time, call number), and the call."""


def known_run_s(call: Call) -> float:
    """Return the expected seconds: the mean of the function's calls, else the advised seconds, else 0."""
    advised = (each.run_s for each in call.group.context.advice.values())
    return call.group.cost.run_s or min((seconds for seconds in advised if seconds), default=0.0)


class InOrder(OneLine):
    def __init__(self, *, expected_s: Callable[[Call], float], skip: bool) -> None:
        self.expected_s, self.skip = expected_s, skip
        self._lines: dict[Context, list[_Entry]] = {}

    def on_round(self, view: View, changes: Changes) -> Iterator[Action]:
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
            if (order := start(call)) is not None:
                heapq.heappop(line)
                yield order
            elif self.skip:
                passed.append(heapq.heappop(line))
            else:
                break
        for entry in passed:
            heapq.heappush(line, entry)


def fifo(*, provisioning: Provisioning | None = None, skip: bool = False) -> Policies:
    return shortest_first(provisioning=provisioning, expected_s=lambda _: 0.0, skip=skip)


def shortest_first(
    *, provisioning: Provisioning | None = None, expected_s: Callable[[Call], float] = known_run_s, skip: bool = False
) -> Policies:  # fmt: skip
    asked = provisioning or KeepBlocks()
    return Policies(InOrder(expected_s=expected_s, skip=skip), EveryDevice(provisioning=asked), asked)
