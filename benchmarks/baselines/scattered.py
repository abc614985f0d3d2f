"""Place calls and loads at random, to measure the value of a placement policy.

A choice depends only on the seed and the decision number, so equal events lead to equal decisions. A choice among n
free libraries takes O(n) time.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from stoker.chance import Stream
from stoker.manager.core.deadlines import has_time_for_call
from stoker.manager.core.nouns import Call, Context, Device
from stoker.manager.core.seams import Action, Policies, Provisioning, View
from stoker.manager.policies.dispatch import HottestFirst
from stoker.manager.policies.provisioning import KeepBlocks
from stoker.manager.policies.residency import LoadWhereWanted
from stoker.protocol.ids import LibraryId


class AnyFree(HottestFirst):
    def __init__(self, *, seed: int = 0) -> None:
        super().__init__()
        self._chance = Stream(seed, "dispatch")

    def place(self, view: View, call: Call) -> LibraryId | Action | Iterable[Action] | None:
        context = call.group.context
        free = len(context.idle)
        if context.queue.count or not free or call.group.options.gang[0] > 1:
            return super().place(view, call)
        chosen = int(self._chance.uniform(call.id) * free)
        id, library = next(islice(context.idle.items(), chosen, None))
        in_time = has_time_for_call(view, library, call)
        if in_time and library.load < self.window(view, library) and library.admits(call):
            return id
        return super().place(view, call)


class AnyDevice(LoadWhereWanted):
    def __init__(self, *, provisioning: Provisioning | None = None, seed: int = 0) -> None:
        super().__init__(provisioning=provisioning)
        self.seed = seed

    def preference(self, context: Context, device: Device) -> tuple[float, ...]:
        whose = f"{context.recipe.key}/{device.pilot.id}/{device.id}"
        return (Stream(self.seed, whose).uniform(context.loads),)


def scattered(provisioning: Provisioning | None = None) -> Policies:
    asked = provisioning or KeepBlocks()
    return Policies(AnyFree(), AnyDevice(provisioning=asked), asked)
