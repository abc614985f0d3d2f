"""Shared parts of policies with one queue per context and the context loaded on every device.

Rounds plan calls after changes, at most ten times a second. A call for n libraries runs on any n free libraries.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from benchmarks.baselines.replicas import InRounds, is_free, send
from stoker.manager.core.nouns import Call, CallState, Context, Library
from stoker.manager.core.seams import Action, Changes, Load, View
from stoker.manager.policies.residency import WholeDevice
from stoker.protocol.ids import RecipeKey

PERIOD_S = 0.1


class EveryDevice(WholeDevice):
    honours = frozenset()

    def wanted(self, view: View, context: Context) -> Sequence[Action]:
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

    def __init__(self, *, period_s: float = PERIOD_S) -> None:
        super().__init__(period_s=period_s)

    def serve_order(self, view: View, context: Context) -> Sequence[Library]:  # noqa: ARG002
        return ()

    def rests(self, view: View) -> bool:  # noqa: ARG002
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
