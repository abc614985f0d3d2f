"""ServerlessLLM and its two extensions in SLINFER's evaluation (§IX-A): `sllm`, `sllm+c` and `sllm+c+s`.

An instance serves up to `limit` concurrent requests on a whole node, or on half a node with `+s`.

1. Requests go in turn to instances below their limit, on CPUs first, as in ServerlessLLM's router.
2. If loading instances cannot take all waiting requests, another instance is loaded. The first kind of node with free
memory is used; used nodes come before empty nodes.
3. Otherwise requests wait; a freed device is used for the model that has waited longest.
4. An instance that is idle for `keep_alive_s` is unloaded.
5. A request that waits longer than its objective for the first token is dropped (§IX-B).

`Polling` replaces rules 1, 3 and 5 by rules of the authors' program. Requests are assigned to instances of their model
in turn, including loading instances. If all instances are full, another instance is loaded. A request without a node
retries every `poll_s` seconds instead of queueing, and is dropped when late.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence

from stoker.manager.core.nouns import Call, CallState, Context, Device, Library, LibraryState
from stoker.manager.core.seams import Action, Drop, Load, Policies, Send, Timer, Unload, View
from stoker.manager.policies.base import Quiet
from stoker.manager.policies.keep_alive import IdleTimers
from stoker.manager.policies.provisioning import KeepBlocks
from stoker.manager.policies.slinfer.validation import longest_cold_start_s, ttft_objective_s
from stoker.manager.policies.where_to_load import can_use_device
from stoker.protocol.ids import CallId, LibraryId, RecipeKey

Limits = Mapping[tuple[str, str], int]
"""Maximum requests of an instance, by context name and kind of device."""
_SCALE = "scale-out"
_POLL = "poll/"
_OPEN = (LibraryState.LOADING, LibraryState.READY)


def sllm(
    *, limits: Limits, parts: Mapping[tuple[str, str], int] | None = None, keep_alive_s: float = 1.0,
    cpu_keep_alive_s: float | None = None, poll_s: float = 0.0,
) -> Policies:  # fmt: skip
    """Return the policies. `cpu_keep_alive_s`: for CPU instances; None = `keep_alive_s`. `poll_s`: for `Polling`."""
    scale_out = ScaleOut(limits, parts or {})
    keep_alive = KeepAlive(keep_alive_s, keep_alive_s if cpu_keep_alive_s is None else cpu_keep_alive_s)
    if poll_s:
        return Policies(Polling(scale_out, keep_alive, poll_s=poll_s), KeepReservedMemory(), KeepBlocks())
    return Policies(UpToLimit(scale_out, keep_alive), LoadOnFreedDevice(scale_out), KeepBlocks())


class KeepAlive:
    """Unloads idle instances after a keep-alive by kind of device."""

    def __init__(self, keep_alive_s: float, cpu_keep_alive_s: float) -> None:
        self._timers = IdleTimers(keep_alive_s)
        self._cpu_ends = cpu_keep_alive_s == 0.0
        if cpu_keep_alive_s not in (0.0, keep_alive_s):
            raise ValueError(f"cpu_keep_alive_s = {cpu_keep_alive_s}: it must be 0 or {keep_alive_s}")

    def on_idle_library(self, view: View, library: Library) -> Sequence[Action]:
        if self._cpu_ends and library.devices[0].facts.on_host:
            return (Unload(library.id, "it serves nothing"),)
        return self._timers.handle_idle_library(view, library)

    def handle_timer(self, view: View, key: str) -> Sequence[Action]:
        return self._timers.handle_timer(view, key)


class ScaleOut:
    def __init__(self, limits: Limits, parts: Mapping[tuple[str, str], int]) -> None:
        self._limits = limits
        self._parts = parts

    def loads(self, view: View) -> list[Load]:
        found: list[Load] = []
        taken: dict[Device, int] = {}
        wants: list[tuple[float, int, int, Context]] = []
        for context in view.waiting_contexts.values():
            coming = (x for x in context.libraries.values() if x.state is LibraryState.LOADING and x.is_usable)
            self._want(wants, context, sum(self.limit(context, x.devices[0]) for x in coming))
        while wants:
            _, _, covered, context = heapq.heappop(wants)
            device = self.place(view, context, taken)
            if device is None:
                continue
            found.append(self.load(context, device))
            taken[device] = taken.get(device, 0) + self._memory(context, device)
            self._want(wants, context, covered + self.limit(context, device))
        return found

    @staticmethod
    def _want(wants: list[tuple[float, int, int, Context]], context: Context, covered: int) -> None:
        if context.queue.count > covered:
            call = context.queue.first_calls(covered + 1, max_examined=1 << 30)[-1]
            heapq.heappush(wants, (call.submitted_at, call.id, covered, context))

    def load(self, context: Context, device: Device) -> Load:
        memory = self._memory(context, device)
        return Load(RecipeKey(context.recipe.key), device.pilot.id, (device.id,), memory)

    def place(self, view: View, context: Context, taken: Mapping[Device, int]) -> Device | None:
        kinds = context.recipe.needs.kinds
        open_devices = [
            device
            for device in view.devices()
            if can_use_device(context, device)
            and device.free_bytes - taken.get(device, 0) >= self._memory(context, device)
        ]  # fmt: skip
        return min(
            open_devices,
            key=lambda x: (kinds.index(x.facts.kind), -len(x.pilot.libraries), x.pilot.id, x.id),
            default=None,
        )

    def limit(self, context: Context, device: Device) -> int:
        return self._limits[context.recipe.name, device.facts.kind]

    def _memory(self, context: Context, device: Device) -> int:
        return device.facts.memory_bytes // self._parts.get((context.recipe.name, device.facts.kind), 1)


_LATE = "late-drops"
_ROUNDING_S = 1e-6
"""Tolerance in seconds, because a clock may count in microseconds."""


class LateDrops:
    """Drop a waiting call if its queueing delay exceeds its objective for the first token (§IX-B).

    A call that waits for a load gets a grace period equal to the cold start (§IX-A). A policy calls `waits` for each
    waiting call, which returns a timer. At this timer, `handle_timer` returns the drops.
    """

    def __init__(self) -> None:
        self._due: list[tuple[float, CallId]] = []
        """Heap of the times at which calls are checked. Calls that no longer wait are skipped."""
        self._timer_at = float("inf")

    def waits(self, view: View, call: Call) -> tuple[Timer, ...]:
        wanted_s = ttft_objective_s(call)
        if not wanted_s:
            return ()
        heapq.heappush(self._due, (call.submitted_at + wanted_s, call.id))
        return self._set_timer(view.now)

    def handle_timer(self, view: View, key: str) -> tuple[Drop | Timer, ...]:
        """Return the drops and the next timer, or nothing if the timer belongs to another policy."""
        if key != _LATE:
            return ()
        self._timer_at = float("inf")
        drops: list[Drop] = []
        while self._due and self._due[0][0] <= view.now + _ROUNDING_S:
            _, id = heapq.heappop(self._due)
            call = view.calls.get(id)
            if call is None or call.state is not CallState.WAITING:
                continue
            waited_s, wanted_s = view.now - call.submitted_at, ttft_objective_s(call)
            grace_s = longest_cold_start_s(view, call)
            late_at = call.submitted_at + wanted_s + grace_s
            if late_at <= view.now + _ROUNDING_S:
                grace = f", and {grace_s:.3g} s for a load" if grace_s else ""
                wanted = f"its first token, which was wanted within {wanted_s:.3g} s{grace}"
                drops.append(Drop(id, f"it has waited {waited_s:.3g} s for {wanted}"))
            else:
                heapq.heappush(self._due, (late_at, id))
        return (*drops, *self._set_timer(view.now))

    def _set_timer(self, now: float) -> tuple[Timer, ...]:
        if not self._due or self._due[0][0] >= self._timer_at:
            return ()
        self._timer_at = max(self._due[0][0], now)
        return (Timer(self._timer_at, _LATE),)


class UpToLimit(Quiet):
    """Dispatch to instances below their limit."""

    asks_every_call = True
    honours = frozenset({"priority", "ttft_s", "tpot_s"})

    def __init__(self, scale_out: ScaleOut, keep_alive: KeepAlive) -> None:
        self._scale_out = scale_out
        self._keep_alive = keep_alive
        self._late = LateDrops()
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

    def on_out_of_calls(self, view: View, library: Library) -> Sequence[Action]:
        return self._keep_alive.on_idle_library(view, library)

    def on_timer(self, view: View, key: str) -> Sequence[Action]:
        if key != _SCALE:
            return (*self._late.handle_timer(view, key), *self._keep_alive.handle_timer(view, key))
        new, self._new = self._new, []
        return (*(timer for call in new for timer in self._late.waits(view, call)), *self._scale_out.loads(view))


class Polling(Quiet):
    """Dispatch as in the authors' program: no queue, and a retry every `poll_s` seconds."""

    asks_every_call = True
    honours = UpToLimit.honours

    def __init__(self, scale_out: ScaleOut, keep_alive: KeepAlive, *, poll_s: float) -> None:
        self._scale_out = scale_out
        self._keep_alive = keep_alive
        self._poll_s = poll_s
        self._bound: dict[LibraryId, dict[int, Call]] = {}
        """Requests that wait for each loading instance."""
        self._turn: dict[Context, int] = {}
        """Index of the instance that each model tries first."""

    def window(self, view: View, library: Library) -> int:  # noqa: ARG002
        return library.slots

    def pull(self, view: View, library: Library) -> Iterator[Action]:
        for call in self._bound.pop(library.id, {}).values():
            if call.id in view.calls:
                yield Send(call.id, library.id)
        if not library.load and library.devices[0].facts.on_host:
            yield from self.on_out_of_calls(view, library)

    def on_out_of_calls(self, view: View, library: Library) -> Sequence[Action]:
        return self._keep_alive.on_idle_library(view, library)

    def on_timer(self, view: View, key: str) -> Iterable[Action]:
        if not key.startswith(_POLL):
            return self._keep_alive.handle_timer(view, key)
        call = view.calls.get(int(key.removeprefix(_POLL)))
        if call is None or call.state is not CallState.WAITING:
            return ()
        late_s = view.now - call.submitted_at - ttft_objective_s(call)
        if late_s > 0:
            return (Drop(call.id, f"its first token is {late_s:.3g} s late, and no instance has room"),)
        return self.place(view, call)

    def place(self, view: View, call: Call) -> Iterator[Action]:
        context = call.group.context
        library = self._next(context)
        if library is None:
            device = self._scale_out.place(view, context, {})
            if device is None:
                yield Timer(view.now + self._poll_s, f"{_POLL}{call.id}")
                return
            known = set(context.libraries)
            yield self._scale_out.load(context, device)
            [new] = context.libraries.keys() - known
            library = context.libraries[new]
            self._turn[context] = len(known) + 1
        if library.state is LibraryState.READY:
            yield Send(call.id, library.id)
        else:
            self._bound.setdefault(library.id, {})[call.id] = call

    def _next(self, context: Context) -> Library | None:
        own = [x for x in context.libraries.values() if x.is_usable and x.state in _OPEN]
        first = self._turn.get(context, 0)
        for offset in range(len(own)):
            place = (first + offset) % len(own)
            library = own[place]
            count = library.load + len(self._bound.get(library.id, ()))
            if count < self._scale_out.limit(context, library.devices[0]):
                self._turn[context] = place + 1
                return library
        return None


class KeepReservedMemory(Quiet):
    """Residency in which an instance keeps the memory reserved for its load."""

    def on_waiting_calls(self, view: View, context: Context) -> Sequence[Action]:  # noqa: ARG002
        return ()

    def reservation_after_load(self, view: View, library: Library) -> int:  # noqa: ARG002
        return library.promised_bytes


class LoadOnFreedDevice(KeepReservedMemory):
    """Residency that uses a freed device for the request that has waited longest."""

    def __init__(self, scale_out: ScaleOut) -> None:
        self._scale_out = scale_out

    def on_waiting_calls(self, view: View, context: Context) -> Sequence[Action]:  # noqa: ARG002
        return self._scale_out.loads(view)
