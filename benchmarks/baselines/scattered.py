"""Place calls and loads at random, to measure the value of a placement policy.

Equal events lead to equal decisions. A choice among n free libraries takes O(n) time.
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

_CHANCE = Stream(0, "dispatch")


class AnyFree(HottestFirst):
    def place(self, view: View, call: Call) -> LibraryId | Action | Iterable[Action] | None:
        context = call.group.context
        free = len(context.idle)
        if context.queue.count or not free or call.group.options.gang[0] > 1:
            return super().place(view, call)
        chosen = int(_CHANCE.uniform(call.id) * free)
        id, library = next(islice(context.idle.items(), chosen, None))
        in_time = has_time_for_call(view, library, call)
        if in_time and library.load < self.window(view, library) and library.admits(call):
            return id
        return super().place(view, call)


class AnyDevice(LoadWhereWanted):
    def preference(self, context: Context, device: Device) -> tuple[float, ...]:
        whose = f"{context.recipe.key}/{device.pilot.id}/{device.id}"
        return (Stream(0, whose).uniform(context.loads),)


def scattered(provisioning: Provisioning | None = None) -> Policies:
    asked = provisioning or KeepBlocks()
    return Policies(AnyFree(), AnyDevice(provisioning=asked), asked)
