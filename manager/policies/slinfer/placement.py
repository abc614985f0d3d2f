"""What the engines on a device compute, as far as the manager can tell: enough to choose a device for a new instance.

The pilot weighs each offered call by what its engines have to do at that moment
(`stoker.pilot.core.turns`).
The manager knows less: how many calls a library holds, how long their prompts are and what such calls write in the
mean. Before it loads an instance somewhere, it checks with that what the pilot would refuse later: whether the prompt
can be read in time there (which excludes CPUs that are too slow, SLINFER §V), and whether a decode step of every
instance on the device still fits into a time per output token (case 3 of §VI-C).

How much of a device an instance reserves: its weights, and a cache that follows what it serves (SLINFER §VII).

A request's cache holds its prompt and what it writes: at least the mean of the requests before it (eq. 2). An instance
that needs more than it has grows at once to more than that (`watermark`, 25 %), and one that needs less
shrinks only when it has far too much: a resize copies the cache (Figure 17). Where a device has no room for the
watermark, what is required is enough (§VII-D). What is promised counts at once; the pilot lets an instance grow when
another has really shrunk or gone (`stoker.pilot.core.memory`).

Which instance is offered a call, and where a new one is loaded (SLINFER §V, §VIII-B).

CPUs come first, since GPUs are scarce; of instances on devices of one sort the one with the largest batch, so that
small ones run empty and go (bin packing). A new instance goes where it fits with the least to spare.
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

# ---- compute


LOOK_AGAIN_S = 0.1
"""A load that takes longer than expected is granted this much more at a time."""


def prompt_tokens(call: Call) -> int:
    """Tokens that a call reads."""
    features = call.spec.features
    return max(1, features.input_length) if features is not None else 1


def output_tokens(call: Call) -> int:
    """Tokens that a call is expected to write: the mean of its context's calls that have ended (SLINFER §VII-A)."""
    features = call.spec.features
    return features.expected_output if features is not None else 0


def staying(device: Device) -> list[Library]:
    """The libraries of a device that are not about to end."""
    return [library for library in device.libraries.values() if library.state is not LibraryState.STOPPING]


class ComputeOutlook:
    """What steps take on devices, by the measurements that contexts have (`ContextAdvice.steps`)."""

    def __init__(self) -> None:
        self._seconds: dict[int, tuple[StepTimes, StepSeconds]] = {}
        """By the identity of a table, which contexts of one model share; the table is kept so that it stays its own."""

    def cost(self, context: Context, device: Device) -> StepSeconds | None:
        """What the steps of a context's engine take on a device; None where nobody has measured that."""
        advice = context.advice.get(device.facts.kind)
        times = advice.steps if advice is not None else None
        if times is None or not times.prefill or not times.decode:
            return None
        known = self._seconds.get(id(times))
        if known is None or known[0] is not times:  # numbers of tables that a snapshot brought back are used again
            known = self._seconds[id(times)] = times, StepSeconds(times, factor=OVERESTIMATE / device.facts.speed)
        return known[1]

    def prefill_s(self, context: Context, device: Device, call: Call) -> float:
        """What it takes to read a call's prompt; 0 where nobody knows."""
        cost = self.cost(context, device)
        tokens = prompt_tokens(call)
        return cost.prefill_s(tokens, tokens / 2) if cost is not None else 0.0

    def decode_s(self, library: Library) -> float:
        """A decode step of a library with the calls that it holds; one that is loading will have one at least."""
        rows = len(library.held) or int(library.state is LibraryState.LOADING)
        cost = self.cost(library.context, library.devices[0]) if rows else None
        if cost is None:
            return 0.0
        tokens = sum(prompt_tokens(call) + output_tokens(call) / 2 for call in library.held.values())
        return cost.decode_s(rows, tokens / rows if library.held else 1.0)[0]

    def is_too_slow(self, device: Device, call: Call, *, left_s: float) -> bool:
        """True if a device cannot read a call's prompt within `left_s`, even if it does nothing else."""
        return _wants_soon(call) and self.prefill_s(call.group.context, device, call) > left_s

    def is_too_full(self, device: Device, call: Call, *, left_s: float, leaving: frozenset[int]) -> bool:
        """True if a new instance on a device would not serve a call in time beside the others there, for all that is
        known. `left_s`: seconds until its first token is due; `leaving`: libraries that end for it."""
        context, tpot_s = call.group.context, call.group.options.objective.tpot_s
        cost = self.cost(context, device)
        if cost is None:
            return False
        others_s = [self.decode_s(library) for library in staying(device) if library.id not in leaving]
        if _wants_soon(call) and self.prefill_s(context, device, call) + max(others_s, default=0.0) > left_s:
            return True
        if left_s == math.inf and not any(others_s):  # it was evicted, and waits for no one here
            return False
        return 0 < tpot_s < sum(others_s) + cost.decode_s(1, prompt_tokens(call))[0]


def _wants_soon(call: Call) -> bool:
    return call.group.options.objective.first_token_s(prompt_tokens(call)) > 0


def first_token_left_s(view: View, call: Call) -> float:
    """Seconds until the first token of a waiting call is due; its load is granted on top (§IX-A).

    A call that is to be evicted would have its whole time again. One that was evicted has no limit: it may have had its
    first token, and it must find a place, however late it is and however slow the devices are that are left.
    """
    wanted_s = call.group.options.objective.first_token_s(prompt_tokens(call))
    if call.state is not CallState.WAITING:
        return wanted_s
    return math.inf if call.id in view.reports else call.submitted_at + wanted_s - view.now


def first_token_s(call: Call) -> float:
    """The time to first token that a call wants; 0 = none."""
    features = call.spec.features
    return call.group.options.objective.first_token_s(features.input_length if features is not None else 0)


def cold_start_s(view: View, call: Call) -> float:
    """How long the cold start takes that a waiting call takes part in: the longest load of a library of its context
    that is under way, or was when the call had come. 0 if there is none."""
    longest_s = 0.0
    for library in call.group.context.libraries.values():
        if library.state is LibraryState.LOADING and library.usable:
            loads_s = view.now - library.started_at + LOOK_AGAIN_S
            longest_s = max(longest_s, loads_s, call.group.context.load_s)
        elif library.state is LibraryState.READY and library.ready_at > call.submitted_at:
            longest_s = max(longest_s, library.ready_at - library.started_at)
    return longest_s


# ---- memory


class CacheSizes:
    """Sizes of reservations, with a watermark (0.25: a quarter more than is required)."""

    def __init__(self, *, watermark: float) -> None:
        self.watermark = watermark

    def required(self, context: Context, device: Device, calls: Iterable[Call]) -> int:
        """Bytes without which these calls do not fit at their peaks (eq. 2, with the weights). The least is what the
        recipe declares, a cache of the longest text."""
        needs = context.recipe.needs
        tokens = sum(prompt_tokens(call) + output_tokens(call) for call in calls)
        return known_bytes(context, device.facts) + needs.token_bytes * max(0, tokens - needs.cache_tokens)

    def recommended(self, context: Context, device: Device, required: int) -> int:
        """The same with the watermark: of the cache, not of the weights."""
        return self._with_watermark(required, _weights(context, device))

    def _with_watermark(self, required: int, weights: int) -> int:
        return required + int(self.watermark * (required - weights))

    def admit(self, library: Library, call: Call) -> int | None:
        """What an instance has to reserve for one more call: 0 if what it has will do, None if its device has no
        room."""
        device = library.devices[0]
        return self.grow(library, self.required(library.context, device, (*library.held.values(), call)))

    def grow(self, library: Library, required: int) -> int | None:
        """What an instance has to reserve so that it has what is required, as `admit` says."""
        device = library.devices[0]
        if required <= library.promised_bytes:
            return 0
        room = library.promised_bytes + min(each.budget_bytes for each in library.devices)
        if required > room or library.state is not LibraryState.READY:
            return None
        return min(room, self.recommended(library.context, device, required))

    def lacks(self, library: Library, call: Call) -> int:
        """Bytes that the devices of an instance would have to have free for one more call."""
        device = library.devices[0]
        required = self.required(library.context, device, (*library.held.values(), call))
        return required - library.promised_bytes - min(each.budget_bytes for each in library.devices)

    def shrink(self, library: Library) -> tuple[Resize, ...]:
        """What an instance gives back, if it has far more than it needs (§VII-B): not while a resize is under way."""
        if library.resizing or library.state is not LibraryState.READY:
            return ()
        context, device = library.context, library.devices[0]
        weights, needs = _weights(context, device), context.recipe.needs
        least = self._with_watermark(weights + needs.token_bytes * needs.cache_tokens, weights)
        if library.promised_bytes <= self._with_watermark(least, weights):
            return ()  # it is as small as one without calls: most are, and each is looked at in each round
        recommended = self._with_watermark(self.required(context, device, library.held.values()), weights)
        enough = self._with_watermark(recommended, weights)
        return (Resize(library.id, recommended),) if enough < library.promised_bytes else ()


def _weights(context: Context, device: Device) -> int:
    """Of what a recipe declares that which is no cache."""
    needs = context.recipe.needs
    return known_bytes(context, device.facts) - needs.token_bytes * needs.cache_tokens


# ---- placement


def shares_by_token(context: Context) -> bool:
    """True for a language model that takes one device, whose cache grows with what it serves. Others, and models that
    take several devices (§X), are served as by default."""
    needs = context.recipe.needs
    return needs.token_bytes > 0 and needs.devices == 1


def instances(context: Context) -> list[Library]:
    """The ready instances of a context in the order in which they are offered a call."""
    ready = [x for x in context.libraries.values() if x.state is LibraryState.READY and x.usable]
    ready.sort(key=lambda x: (not x.devices[0].facts.on_host, -len(x.held), x.id))
    return ready


def loading(context: Context) -> list[Library]:
    """The instances of a context that are on their way."""
    return [x for x in context.libraries.values() if x.state is LibraryState.LOADING and x.usable]


class InstancePlaces:
    """Where there is room for a new instance. `shares`: instances of several models share a device; else each has one
    for itself. `uses_cpus`: CPUs serve as well."""

    def __init__(self, sizes: CacheSizes, compute: ComputeOutlook, *, shares: bool, uses_cpus: bool) -> None:
        self._sizes = sizes
        self._compute = compute
        self._shares = shares
        self._uses_cpus = uses_cpus

    def new_instance(self, view: View, call: Call) -> list[Action]:
        """Actions that load an instance for a call: instances that do nothing leave for it. Empty where there is no
        room."""
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
        """Bytes without which an instance for a call is not loaded on a device."""
        if not self._shares:
            return device.facts.memory_bytes
        return self._sizes.required(call.group.context, device, (call,))

    def places(
        self, view: View, call: Call, *, leaving: frozenset[int] = frozenset(), ends_idle: bool = True
    ) -> Iterator[tuple[Device, int, list[Library]]]:
        """Devices where a new instance would serve a call in time, with the bytes that it needs there and the instances
        that do nothing, the one that was used longest ago first. There is room for it, with `ends_idle` once those have
        left. `leaving`: libraries that end anyway."""
        context, left_s = call.group.context, first_token_left_s(view, call)
        for device in view.devices():  # what is cheap to see comes first: a call that waits is looked at often
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
        """True if each of these calls of an instance would find room without it: in another instance, or a new one."""
        for call in calls:
            others = [x for x in instances(call.group.context) if x is not but]
            if any(self._sizes.admit(other, call) is not None for other in others):
                continue
            elsewhere = self.places(view, call, leaving=frozenset((but.id,)), ends_idle=False)
            beside = (device for device, _, _ in elsewhere if device not in but.devices)
            if next(beside, None) is None:
                return False
        return True
