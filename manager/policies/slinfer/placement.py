"""Where an instance fits: computing (§VI) and memory (§VII) of the instances on a device, and the choice of a
device (§VIII-B).

Before the manager loads an instance it checks, from calls held, prompt lengths and mean outputs, the reasons for
which the pilot would refuse: whether the prompt can be read in time (which excludes slow CPUs, §V), and whether
a decode step of every instance on the device fits into a time per output token (case 3 of §VI-C).

An instance that needs more memory (eq. 2) grows beyond it by the `watermark` (25 %), and shrinks only when it is
far too large, because a resize copies the cache (Figure 17). Without room for the watermark the required size is
enough (§VII-D). CPUs come first, then large batches, so that small ones run empty (bin packing). A new instance
goes where it fits with the least to spare.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from stoker.contexts.step_times import StepSeconds, StepTimes
from stoker.manager.core.nouns import Call, CallState, Context, Device, Library, LibraryState
from stoker.manager.core.seams import Action, Load, Resize, Unload, View
from stoker.manager.policies.where_to_load import known_bytes, may_load, suits
from stoker.pilot.core.turns import OVERESTIMATE
from stoker.protocol.ids import RecipeKey

LOOK_AGAIN_S = 0.1  # Seconds granted at a time to a load that takes longer than expected


def prompt_tokens(call: Call) -> int:
    features = call.spec.features
    return max(1, features.input_length) if features is not None else 1


def output_tokens(call: Call) -> int:
    """Return the tokens that a call is expected to write: the mean of its context's ended calls (§VII-A)."""
    features = call.spec.features
    return features.expected_output if features is not None else 0


def staying(device: Device) -> list[Library]:
    return [library for library in device.libraries.values() if library.state is not LibraryState.STOPPING]


class ComputeOutlook:
    """Seconds of steps on devices, from the measurements of contexts (`ContextAdvice.steps`)."""

    def __init__(self) -> None:
        self._seconds: dict[int, tuple[StepTimes, StepSeconds]] = {}
        """By the identity of a table, which contexts of one model share."""

    def cost(self, context: Context, device: Device) -> StepSeconds | None:
        """Return the step times of a context's engine on a device; None if unmeasured."""
        advice = context.advice.get(device.facts.kind)
        times = advice.steps if advice is not None else None
        if times is None or not times.prefill or not times.decode:
            return None
        known = self._seconds.get(id(times))
        if known is None or known[0] is not times:  # numbers of tables that a snapshot brought back are used again
            known = self._seconds[id(times)] = times, StepSeconds(times, factor=OVERESTIMATE / device.facts.speed)
        return known[1]

    def prefill_s(self, context: Context, device: Device, call: Call) -> float:
        cost = self.cost(context, device)
        tokens = prompt_tokens(call)
        return cost.prefill_s(tokens, tokens / 2) if cost is not None else 0.0

    def decode_s(self, library: Library) -> float:
        """Return the seconds of a decode step with the calls held, at least one while it loads."""
        rows = len(library.held) or int(library.state is LibraryState.LOADING)
        cost = self.cost(library.context, library.devices[0]) if rows else None
        if cost is None:
            return 0.0
        tokens = sum(prompt_tokens(call) + output_tokens(call) / 2 for call in library.held.values())
        return cost.decode_s(rows, tokens / rows if library.held else 1.0)[0]

    def is_too_slow(self, device: Device, call: Call, *, left_s: float) -> bool:
        """True if a device cannot read a call's prompt within `left_s`, even alone."""
        return _wants_soon(call) and self.prefill_s(call.group.context, device, call) > left_s

    def is_too_full(self, device: Device, call: Call, *, left_s: float, leaving: frozenset[int]) -> bool:
        """True if a new instance would not serve a call in time next to the others on the device.

        `left_s`: seconds until its first token is due; `leaving`: libraries that end for it.
        """
        context, tpot_s = call.group.context, call.group.options.objective.tpot_s
        cost = self.cost(context, device)
        if cost is None:
            return False
        others_s = [self.decode_s(library) for library in staying(device) if library.id not in leaving]
        if _wants_soon(call) and self.prefill_s(context, device, call) + max(others_s, default=0.0) > left_s:
            return True
        if left_s == math.inf and not any(others_s):  # it was evicted, and no other instance delays it here
            return False
        return 0 < tpot_s < sum(others_s) + cost.decode_s(1, prompt_tokens(call))[0]


def _wants_soon(call: Call) -> bool:
    return call.group.options.objective.first_token_s(prompt_tokens(call)) > 0


def first_token_left_s(view: View, call: Call) -> float:
    """Return the seconds until the first token of a waiting call is due, without its load (§IX-A).

    An evicted call has no limit: it may have had its first token, and must find a place.
    """
    wanted_s = call.group.options.objective.first_token_s(prompt_tokens(call))
    if call.state is not CallState.WAITING:
        return wanted_s
    return math.inf if call.id in view.reports else call.submitted_at + wanted_s - view.now


def first_token_s(call: Call) -> float:
    """Return the time to first token that a call wants; 0 = none."""
    features = call.spec.features
    return call.group.options.objective.first_token_s(features.input_length if features is not None else 0)


def cold_start_s(view: View, call: Call) -> float:
    """Return the longest load of the call's context that is running, or ran after the call arrived; 0 if none."""
    longest_s = 0.0
    for library in call.group.context.libraries.values():
        if library.state is LibraryState.LOADING and library.usable:
            loads_s = view.now - library.started_at + LOOK_AGAIN_S
            longest_s = max(longest_s, loads_s, call.group.context.load_s)
        elif library.state is LibraryState.READY and library.ready_at > call.submitted_at:
            longest_s = max(longest_s, library.ready_at - library.started_at)
    return longest_s


class CacheSizes:
    def __init__(self, *, watermark: float) -> None:
        self.watermark = watermark

    def required(self, context: Context, device: Device, calls: Iterable[Call]) -> int:
        """Return the bytes that these calls need at their peaks (eq. 2, with the weights), at least the declared
        size.
        """
        needs = context.recipe.needs
        tokens = sum(prompt_tokens(call) + output_tokens(call) for call in calls)
        return known_bytes(context, device.facts) + needs.token_bytes * max(0, tokens - needs.cache_tokens)

    def recommended(self, context: Context, device: Device, required: int) -> int:
        """Return `required` with the watermark on the cache, not on the weights."""
        return self._with_watermark(required, _weights(context, device))

    def _with_watermark(self, required: int, weights: int) -> int:
        return required + int(self.watermark * (required - weights))

    def admit(self, library: Library, call: Call) -> int | None:
        """Return the bytes to reserve for one more call: 0 if enough is reserved, None if the device has no room."""
        device = library.devices[0]
        return self.grow(library, self.required(library.context, device, (*library.held.values(), call)))

    def grow(self, library: Library, required: int) -> int | None:
        """Return the bytes to reserve for `required`, as `admit`."""
        device = library.devices[0]
        if required <= library.promised_bytes:
            return 0
        room = library.promised_bytes + min(each.budget_bytes for each in library.devices)
        if required > room or library.state is not LibraryState.READY:
            return None
        return min(room, self.recommended(library.context, device, required))

    def lacks(self, library: Library, call: Call) -> int:
        device = library.devices[0]
        required = self.required(library.context, device, (*library.held.values(), call))
        return required - library.promised_bytes - min(each.budget_bytes for each in library.devices)

    def shrink(self, library: Library) -> tuple[Resize, ...]:
        """Shrink an instance that is far too large (§VII-B), unless a resize is running."""
        if library.resizing or library.state is not LibraryState.READY:
            return ()
        context, device = library.context, library.devices[0]
        weights, needs = _weights(context, device), context.recipe.needs
        least = self._with_watermark(weights + needs.token_bytes * needs.cache_tokens, weights)
        if library.promised_bytes <= self._with_watermark(least, weights):
            return ()  # as small as one without calls, as most are: the common case must be cheap
        recommended = self._with_watermark(self.required(context, device, library.held.values()), weights)
        enough = self._with_watermark(recommended, weights)
        return (Resize(library.id, recommended),) if enough < library.promised_bytes else ()


def _weights(context: Context, device: Device) -> int:
    needs = context.recipe.needs
    return known_bytes(context, device.facts) - needs.token_bytes * needs.cache_tokens


def shares_by_token(context: Context) -> bool:
    needs = context.recipe.needs
    return needs.token_bytes > 0 and needs.devices == 1


def instances(context: Context) -> list[Library]:
    ready = [x for x in context.libraries.values() if x.state is LibraryState.READY and x.usable]
    ready.sort(key=lambda x: (not x.devices[0].facts.on_host, -len(x.held), x.id))
    return ready


def loading(context: Context) -> list[Library]:
    return [x for x in context.libraries.values() if x.state is LibraryState.LOADING and x.usable]


class InstancePlaces:
    """Finds room for new instances. `shares`: instances share a device; `uses_cpus`: CPUs serve as well."""

    def __init__(self, sizes: CacheSizes, compute: ComputeOutlook, *, shares: bool, uses_cpus: bool) -> None:
        self._sizes = sizes
        self._compute = compute
        self._shares = shares
        self._uses_cpus = uses_cpus

    def new_instance(self, view: View, call: Call) -> list[Action]:
        """Load an instance for a call, in place of idle ones where needed; empty if there is no room."""
        best: tuple[tuple[bool, int, int, str], list[Action]] | None = None
        for device, size, idle in self.places(view, call):
            room, gone = device.budget_bytes, list[Library]()
            for library in idle:
                if room >= size:
                    break
                gone.append(library)
                room += library.promised_bytes
            rank = (not device.facts.on_host, len(gone), room - size, f"{device.pilot.id}/{device.id}")
            if best is not None and best[0] <= rank:
                continue
            required = self._sizes.required(call.group.context, device, (call,))
            promised = min(room, self._sizes.recommended(call.group.context, device, required))
            load = Load(RecipeKey(call.group.context.recipe.key), device.pilot.id, (device.id,), promised)
            why = f"{call.group.context.recipe.name} needs the room, and nothing runs here"
            best = rank, [*(Unload(library.id, why) for library in gone), load]
        return best[1] if best is not None else []

    def size(self, device: Device, call: Call) -> int:
        if not self._shares:
            return device.facts.memory_bytes
        return self._sizes.required(call.group.context, device, (call,))

    def places(
        self, view: View, call: Call, *, leaving: frozenset[int] = frozenset(), ends_idle: bool = True
    ) -> Iterator[tuple[Device, int, list[Library]]]:
        """Yield devices where a new instance would serve a call in time, its bytes, and idle instances, least
        recently used first.

        With `ends_idle` the idle ones make room. `leaving`: libraries that end anyway.
        """
        context, left_s = call.group.context, first_token_left_s(view, call)
        for device in view.devices():  # cheap checks first: a waiting call is checked often
            if (device.facts.on_host and not self._uses_cpus) or not suits(context, device, unnamed_spares=True):
                continue
            if self._compute.is_too_slow(device, call, left_s=left_s):
                continue
            here = [library for library in staying(device) if library.id not in leaving]
            if any(library.context is context for library in here):
                continue
            idle = [x for x in here if x.state is LibraryState.READY and not x.load]
            size, room = self.size(device, call), device.budget_bytes
            if room + (sum(library.promised_bytes for library in idle) if ends_idle else 0) < size:
                continue
            gone = leaving.union(library.id for library in idle)
            if self._compute.is_too_full(device, call, left_s=left_s, leaving=gone):
                continue
            if not may_load(view, context, device):
                continue
            idle.sort(key=lambda library: (library.used_at, library.id))
            yield device, size, idle

    def fits_elsewhere(self, view: View, calls: Iterable[Call], *, but: Library) -> bool:
        for call in calls:
            others = [x for x in instances(call.group.context) if x is not but]
            if any(self._sizes.admit(other, call) is not None for other in others):
                continue
            elsewhere = self.places(view, call, leaving=frozenset((but.id,)), ends_idle=False)
            beside = (device for device, _, _ in elsewhere if device not in but.devices)
            if next(beside, None) is None:
                return False
        return True
