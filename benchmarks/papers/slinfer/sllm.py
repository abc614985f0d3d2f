"""ServerlessLLM and its two extensions in SLINFER's evaluation (§IX-A): `sllm`, `sllm+c` and `sllm+c+s`.

An instance serves up to `limit` concurrent requests, on a whole node, or with `+s` on half a node.

1. A request goes to an instance below its limit, on CPUs first, in turn, as in ServerlessLLM's router.
2. If loading instances cannot take all waiting requests, another one is loaded, on the first kind of node with free
   memory, on used nodes before empty ones.
3. Otherwise requests wait; a freed device goes to the model that has waited longest.
4. An instance that is idle for `keep_alive_s` is unloaded.
5. `drops`: drop a request that waits longer than its time to first token (§IX-B).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence

from benchmarks.papers.slinfer.late_drops import LateDrops
from stoker.manager.core.nouns import Call, Context, Device, Library, LibraryState
from stoker.manager.core.seams import Action, Load, Policies, Timer, View
from stoker.manager.policies.base import Quiet
from stoker.manager.policies.keep_alive import IdleTimers
from stoker.manager.policies.provisioning import KeepBlocks
from stoker.manager.policies.where_to_load import suits
from stoker.protocol.ids import LibraryId, RecipeKey

Limits = Mapping[tuple[str, str], int]
"""Limits by name of the context and kind of device."""
_SCALE = "scale-out"


def sllm(
    *, limits: Limits, parts: Mapping[tuple[str, str], int] | None = None, keep_alive_s: float = 1.0,
    drops: bool = True,
) -> Policies:  # fmt: skip
    scale_out = ScaleOut(limits, parts or {})
    dispatch = UpToLimit(scale_out, keep_alive_s=keep_alive_s, drops=drops)
    return Policies(dispatch, WhereFree(scale_out), KeepBlocks())


class ScaleOut:
    def __init__(self, limits: Limits, parts: Mapping[tuple[str, str], int]) -> None:
        self._limits = limits
        self._parts = parts

    def loads(self, view: View) -> list[Load]:
        found: list[Load] = []
        taken: dict[Device, int] = {}
        wants: list[tuple[float, int, int, Context]] = []
        for context in view.waiting_contexts.values():
            coming = (x for x in context.libraries.values() if x.state is LibraryState.LOADING and x.usable)
            self._want(wants, context, sum(self._limit(context, x.devices[0]) for x in coming))
        while wants:
            _, _, covered, context = heapq.heappop(wants)
            device = self._place(view, context, taken)
            if device is None:
                continue
            memory = self._memory(context, device)
            taken[device] = taken.get(device, 0) + memory
            found.append(Load(RecipeKey(context.recipe.key), device.pilot.id, (device.id,), memory))
            self._want(wants, context, covered + self._limit(context, device))
        return found

    @staticmethod
    def _want(wants: list[tuple[float, int, int, Context]], context: Context, covered: int) -> None:
        if context.queue.count > covered:
            call = context.queue.first(covered + 1, looks=1 << 30)[-1]
            heapq.heappush(wants, (call.submitted_at, call.id, covered, context))

    def _place(self, view: View, context: Context, taken: Mapping[Device, int]) -> Device | None:
        kinds = context.recipe.needs.kinds
        open_devices = [
            device
            for device in view.devices()
            if suits(context, device)
            and device.free_bytes - taken.get(device, 0) >= self._memory(context, device)
        ]  # fmt: skip
        return min(
            open_devices,
            key=lambda x: (kinds.index(x.facts.kind), -len(x.pilot.libraries), x.pilot.id, x.id),
            default=None,
        )

    def _limit(self, context: Context, device: Device) -> int:
        return self._limits[context.recipe.name, device.facts.kind]

    def _memory(self, context: Context, device: Device) -> int:
        return device.facts.memory_bytes // self._parts.get((context.recipe.name, device.facts.kind), 1)


class UpToLimit(Quiet):
    """Dispatch to instances below their limit."""

    asks_every_call = True
    honours = frozenset({"priority", "ttft_s", "tpot_s"})

    def __init__(self, scale_out: ScaleOut, *, keep_alive_s: float, drops: bool) -> None:
        self._scale_out = scale_out
        self._keep_alive = IdleTimers(keep_alive_s)
        self._late = LateDrops() if drops else None
        self._new: list[Call] = []

    def window(self, view: View, library: Library) -> int:  # noqa: ARG002
        return library.slots

    def place(self, view: View, call: Call) -> LibraryId | Action | None:
        for library in self.serve_order(view, call.group.context):
            if library.load < library.slots and library.admits(call):
                return library.id
        self._new.append(call)
        return Timer(view.now, _SCALE)

    def pull(self, view: View, library: Library) -> int:  # noqa: ARG002
        return max(0, library.slots - library.load)

    def serve_order(self, view: View, context: Context) -> Iterable[Library]:  # noqa: ARG002
        kinds = context.recipe.needs.kinds
        return sorted(context.index.free.values(), key=lambda x: kinds.index(x.devices[0].facts.kind))

    def dry(self, view: View, library: Library) -> Sequence[Action]:
        return self._keep_alive.idle(view, library)

    def timer(self, view: View, key: str) -> Sequence[Action]:
        if key != _SCALE:
            late = self._late.fired(view, key) if self._late is not None else ()
            return (*late, *self._keep_alive.fired(view, key))
        return tuple(self._watched(view)) + tuple(self._scale_out.loads(view))

    def _watched(self, view: View) -> Iterator[Action]:
        new, self._new = self._new, []
        if self._late is not None:
            for call in new:
                yield from self._late.waits(view, call)


class WhereFree(Quiet):
    """Residency: a freed device loads for the longest waiting request."""

    def __init__(self, scale_out: ScaleOut) -> None:
        self._scale_out = scale_out

    def wanted(self, view: View, context: Context) -> Sequence[Action]:  # noqa: ARG002
        return self._scale_out.loads(view)

    def measured(self, view: View, library: Library) -> int:  # noqa: ARG002
        return library.promised_bytes
