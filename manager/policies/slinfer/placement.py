"""Place instances on devices by memory (§VII), compute (§VI) and batch size (§VIII-B); find room for the calls of a
preempted instance (§VIII-A).

An instance that needs more memory (eq. 2) also gets the `watermark` (25 %), or only the required size if the watermark
does not fit (§VII-D). An instance shrinks only if it is far too large, because a resize copies the cache (Figure 17).
CPUs come first, then large batches, so that small batches end. A new instance is loaded on the pilot where it leaves
the least memory (bin-packing, §V), on the least busy device. Unlike in the paper, an instance that makes room may
sleep, and a sleeper wakes before an instance is loaded. Only the pilot knows how many tokens a request has generated
(O_r of eq. 2), so its refusal states the required bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from stoker.contexts.inference.adapter import TokenCache
from stoker.manager.core.nouns import Call, Context, Device, Library, LibraryState
from stoker.manager.core.seams import Action, Resize, Unload, View, Wake
from stoker.manager.policies.keep_alive import remaining_library_quota
from stoker.manager.policies.sleeping import (
    extra_bytes_to_wake,
    is_asleep,
    is_idle,
    may_sleep,
    plan_stops_and_sleeps,
    wakeable_libraries,
)
from stoker.manager.policies.slinfer import validation
from stoker.manager.policies.slinfer.validation import (
    ComputeOutlook,
    Shadow,
    list_unstopped_libraries,
    seconds_until_prompt_due,
)
from stoker.manager.policies.where_to_load import can_use_device, make_load, may_load, required_bytes_if_known
from stoker.pilot.core.memory import token_cache

_CUT_S = 3.0  # Seconds after which libraries of a disconnected pilot no longer count towards a limit


class CacheSizes:
    """Computes sizes of instances in bytes. A method that returns a reservation returns 0 if the present reservation is
    enough, and None if the needed size does not fit.
    """

    def __init__(self, *, watermark: float) -> None:
        self.watermark = watermark

    def required_bytes_of_calls(self, context: Context, device: Device, calls: Iterable[Call]) -> int:
        """Return the bytes that these calls need at their peaks (eq. 2), including weights."""
        cache = find_token_cache(context, device)
        return cache.weights_bytes + cache.token_bytes * _peak_tokens(calls)

    def bytes_for_load(self, context: Context, device: Device, calls: Iterable[Call]) -> int:
        return max(required_bytes_if_known(context, device.facts), self.required_bytes_of_calls(context, device, calls))

    def recommended_bytes(self, context: Context, device: Device, required: int) -> int:
        """Return the larger of `required` and the size with a small cache, plus the watermark."""
        cache = find_token_cache(context, device)
        least = cache.weights_bytes + cache.token_bytes * cache.tokens
        return self._with_watermark(max(least, required), cache.weights_bytes)

    def _with_watermark(self, required: int, weights: int) -> int:
        return required + int(self.watermark * (required - weights))

    def admit(self, library: Library, call: Call) -> int | None:
        cache = find_token_cache(library.context, library.devices[0])
        if cache.is_fixed:
            return 0 if _peak_tokens((*library.held.values(), call)) <= cache.tokens else None
        return self.bytes_to_grow(library, self.bytes_with_another_call(library, call))

    def bytes_with_another_call(self, library: Library, call: Call) -> int:
        return self.required_bytes_of_calls(library.context, library.devices[0], (*library.held.values(), call))

    def bytes_to_grow(self, library: Library, required: int) -> int | None:
        device = library.devices[0]
        if required <= library.promised_bytes:
            return 0
        room = library.promised_bytes + min(each.budget_bytes for each in library.devices)
        if required > room or library.state is not LibraryState.READY:
            return None
        return min(room, self.recommended_bytes(library.context, device, required))

    def added_bytes_for_calls(
        self, context: Context, device: Device, calls: Iterable[Call], promised: int
    ) -> int | None:
        """Return the additional bytes that an instance of `promised` bytes (0 = a new instance) needs for calls."""
        cache, calls = find_token_cache(context, device), tuple(calls)
        if not promised:
            return self.bytes_for_load(context, device, calls)
        if cache.is_fixed:
            return 0 if _peak_tokens(calls) <= cache.tokens else None
        return max(0, self.required_bytes_of_calls(context, device, calls) - promised)

    def bytes_to_reserve_after_stops(self, library: Library, required: int, leaving: Iterable[Library]) -> int:
        if required <= library.promised_bytes:
            return 0
        room = library.promised_bytes + library.devices[0].budget_bytes + sum(x.promised_bytes for x in leaving)
        return min(room, self.recommended_bytes(library.context, library.devices[0], required))

    def reported_peak_bytes(self, library: Library) -> int:
        """Return the bytes that an instance's calls require by its engine's last report (eq. 2); 0 if unknown."""
        if library.batch is None or not library.batch.peak_tokens or not library.held:
            return 0
        cache = find_token_cache(library.context, library.devices[0])
        return 0 if cache.is_fixed else cache.weights_bytes + cache.token_bytes * library.batch.peak_tokens

    def shrink_if_far_too_large(self, library: Library) -> tuple[Resize, ...]:
        """Shrink an instance that is far too large (§VII-B), unless a resize is in progress."""
        if library.unanswered_resizes or library.state is not LibraryState.READY:
            return ()
        context, device = library.context, library.devices[0]
        cache = find_token_cache(context, device)
        if cache.is_fixed:
            return ()
        weights = cache.weights_bytes
        least = self._with_watermark(weights + cache.token_bytes * cache.tokens, weights)
        if library.promised_bytes <= self._with_watermark(least, weights):
            return ()  # not too large even without calls; return early, because this case is common
        required = max(
            self.required_bytes_of_calls(context, device, library.held.values()), self.reported_peak_bytes(library)
        )
        recommended = self.recommended_bytes(context, device, required)
        enough = self._with_watermark(recommended, weights)
        return (Resize(library.id, recommended),) if enough < library.promised_bytes else ()


def _peak_tokens(calls: Iterable[Call]) -> int:
    return sum(validation.count_prompt_tokens(call) + validation.expected_output_tokens(call) for call in calls)


def find_token_cache(context: Context, device: Device) -> TokenCache:
    """Return the memory of a context: reported by its last load, or declared, or a third of the device if unknown."""
    facts, advice = device.facts, context.advice.get(device.facts.kind)
    reported, measured = (advice.cache, advice.resident_bytes) if advice is not None else (None, 0)
    found = token_cache(context.recipe.needs, facts, reported, measured_bytes=measured)
    return found or TokenCache(required_bytes_if_known(context, facts) or facts.memory_bytes // 3)


def has_known_token_memory(context: Context) -> bool:
    """Return True for a model on one device whose memory per cached token was declared, or reported by a load."""
    needs = context.recipe.needs
    if needs.devices != 1:
        return False
    if needs.token_bytes and (needs.device_memory_bytes or needs.memory_bytes):
        return True
    return any(advice.cache is not None for advice in context.advice.values())


def list_ready_instances(context: Context, *, largest_first: bool = True) -> list[Library]:
    """Return ready libraries: CPUs first (§V), then by batch size (§VIII-B)."""
    ready = [x for x in context.libraries.values() if x.is_serving]
    sign = -1 if largest_first else 1
    ready.sort(key=lambda x: (not x.devices[0].facts.on_host, sign * len(x.held), x.id))
    return ready


def list_loading_instances(context: Context) -> list[Library]:
    return [x for x in context.libraries.values() if x.state is LibraryState.LOADING and x.is_usable]


def _evictable_libraries(libraries: Iterable[Library]) -> list[Library]:
    """Return idle libraries, and sleepers that no call waits for, least recently used first."""
    found = [x for x in libraries if is_idle(x) or (is_asleep(x) and not x.context.queue.count)]
    return sorted(found, key=lambda library: (library.used_at, library.id))


def _choose_libraries_to_unload(leavable: Iterable[Library], device: Device, size: int) -> tuple[int, list[Library]]:
    """Choose libraries to stop so that `size` bytes are free on a device. Return the free bytes, and the libraries."""
    room, gone = device.budget_bytes, list[Library]()
    for library in leavable:
        if room >= size:
            break
        gone.append(library)
        room += library.promised_bytes
    return room, gone


def _stop_or_sleep(
    gone: Sequence[Library], device: Device, *, size: int, room: int, of: Context
) -> tuple[list[Action], int]:
    """Return actions that stop libraries or let them sleep to free `size` bytes for a context, and the free bytes."""
    why = f"{of.recipe.name} needs the memory, and this library runs no call"
    if not any(map(may_sleep, gone)):
        return [Unload(library.id, why) for library in gone], room
    plan, rooms = plan_stops_and_sleeps({device: size}, gone, why=why, sleeps=True)
    return plan, rooms[device]


def _would_load_delay_calls(context: Context, device: Device) -> bool:
    """Return True if a load on a CPU would delay tokens of running calls. The paper's CPUs hold all models (§IX-A)."""
    if not device.facts.on_host:
        return False
    ready = (x for x in context.libraries.values() if x.ready_at and x.devices[0].facts.kind == device.facts.kind)
    load_s = max((x.ready_at - x.started_at for x in ready), default=0.0)
    held = (call for library in list_unstopped_libraries(device) for call in library.held.values())
    return any(0 < call.group.options.objective.tpot_s < load_s for call in held)


_Rank = tuple[bool, int, int, float, int, int, str]


class InstancePlacement:
    """Chooses devices for new instances. `shares`: instances may share a device. `uses_cpus`: use CPUs too."""

    def __init__(self, sizes: CacheSizes, compute: ComputeOutlook, *, shares: bool, uses_cpus: bool) -> None:
        self._sizes = sizes
        self._compute = compute
        self._shares = shares
        self._uses_cpus = uses_cpus

    def start_instance_for_call(self, view: View, call: Call) -> list[Action]:
        """Wake or load an instance for a call, and stop idle instances; empty if none can serve the call in time."""
        if wakes := self._wake(view, call):
            return wakes
        found: list[tuple[_Rank, Device, int, int, list[Library]]] = []
        for device, size, idle in self.find_places(view, call):
            room, gone = _choose_libraries_to_unload(idle, device, size)
            rank = self._rank(view, device, left_bytes=room - size, unloads=len(gone))
            found.append((rank, device, size, room, gone))
        found.sort(key=lambda each: each[0])
        for _, device, size, room, gone in found:
            if self._compute.is_in_time(view, device, call, Shadow()):
                context = call.group.context
                ends, room = _stop_or_sleep(gone, device, size=size, room=room, of=context)
                promised = self._bytes_to_reserve_for_load(context, device, size, room)
                return [*ends, make_load(context, (device,), promised)]
        return []

    def _wake(self, view: View, call: Call) -> list[Action]:
        """Wake the last used sleeping library that serves a call in time. Stop other idle libraries to free memory."""
        context, soon_s = call.group.context, seconds_until_prompt_due(view, call)
        for sleeper in wakeable_libraries(view, context):
            [device], needed = sleeper.devices, extra_bytes_to_wake(sleeper)
            if not self._may_use(context, device):
                continue
            if self._compute.is_prefill_too_slow(device, call, left_s=soon_s):
                continue
            others = [x for x in list_unstopped_libraries(device) if x is not sleeper]
            room, gone = _choose_libraries_to_unload(_evictable_libraries(others), device, needed)
            if room >= needed and self._compute.is_in_time(view, device, call, Shadow()):
                ends, _ = _stop_or_sleep(gone, device, size=needed, room=room, of=context)
                return [*ends, Wake(sleeper.id)]
        return []

    def start_minimum_instance(self, view: View, context: Context) -> list[Action]:
        if len(list_ready_instances(context)) >= context.limits.least:
            return []
        for sleeper in wakeable_libraries(view, context):
            if sleeper.devices[0].budget_bytes >= extra_bytes_to_wake(sleeper):
                return [Wake(sleeper.id)]
        taken = {device for library in context.libraries.values() for device in library.devices}
        fitting: list[tuple[_Rank, Device, int]] = []
        for device in view.devices():
            if not self._may_use(context, device) or device in taken:
                continue
            size = self._sizes.bytes_for_load(context, device, ()) if self._shares else device.facts.memory_bytes
            room = device.budget_bytes - size
            if room >= 0 and may_load(view, context, device):
                rank = self._rank(view, device, left_bytes=room)
                fitting.append((rank, device, self._bytes_to_reserve_for_load(context, device, size, size + room)))
        if not fitting:
            return []
        _, device, promised = min(fitting, key=lambda each: each[0])
        return [make_load(context, (device,), promised)]

    def _may_use(self, context: Context, device: Device) -> bool:
        is_allowed = self._uses_cpus or not device.facts.on_host
        return is_allowed and can_use_device(context, device, allows_spare_cores=True)

    def _rank(self, view: View, device: Device, *, left_bytes: int, unloads: int = 0) -> _Rank:
        """Return a sort key: CPUs first (§V), fewest unloads, then the fullest pilot, then its least busy device."""
        elsewhere = sum(other.budget_bytes for other in device.pilot.devices.values() if other is not device)
        busy_s, here = self._compute.cycle_s(device, now=view.now), len(list_unstopped_libraries(device))
        name = f"{device.pilot.id}/{device.id}"
        return not device.facts.on_host, unloads, left_bytes + elsewhere, busy_s, here, left_bytes, name

    def _bytes_to_reserve_for_load(self, context: Context, device: Device, size: int, room: int) -> int:
        """Return the bytes to promise to a load of at least `size` bytes; all free bytes if its cache is unknown."""
        if not find_token_cache(context, device).token_bytes:
            return room
        return min(room, self._sizes.recommended_bytes(context, device, size))

    def find_places(
        self, view: View, call: Call, *, shadow: Shadow | None = None, may_stop_idle: bool = True
    ) -> Iterator[tuple[Device, int, list[Library]]]:
        """Yield devices with memory and speed for a new instance, the bytes of the instance, and idle instances.

        `may_stop_idle`: the idle instances may stop or sleep to free memory. `shadow`: assumed stops and moves.
        """
        context, shadow, soon_s = call.group.context, shadow or Shadow(), seconds_until_prompt_due(view, call)
        quota = remaining_library_quota(view, context, cut_s=_CUT_S)
        if quota is not None and quota <= 0:
            return
        for device in view.devices():  # fast checks first, because a waiting call is checked often
            if not self._may_use(context, device):
                continue
            if self._compute.is_prefill_too_slow(device, call, left_s=soon_s):
                continue
            here = [library for library in list_unstopped_libraries(device) if library.id not in shadow.leaving]
            if any(library.context is context for library in here):
                continue
            idle = _evictable_libraries(here)
            size = self._sizes.bytes_for_load(context, device, (call,)) if self._shares else device.facts.memory_bytes
            room = shadow.room_bytes(device, except_for=context)
            if room + (sum(library.promised_bytes for library in idle) if may_stop_idle else 0) < size:
                continue
            if not shadow.leaving and self._compute.would_exceed_tpot(device, call, now=view.now):
                continue
            if not _would_load_delay_calls(context, device) and may_load(view, context, device):
                yield device, size, idle

    def try_to_join(self, view: View, call: Call, device: Device, library: Library | None, shadow: Shadow) -> bool:
        """Move a call to an instance (None: a new one) in the assumed future `shadow`. Return False if the call does
        not fit there, or would be late.
        """
        context, soon_s = call.group.context, seconds_until_prompt_due(view, call)
        held, promised = (library.held.values(), library.promised_bytes) if library is not None else ((), 0)
        calls = (*held, *shadow.moved_calls(device, context), call)
        grows = self._sizes.added_bytes_for_calls(context, device, calls, promised)
        if grows is None:
            return False
        is_full = library is not None and context.loads and len(calls) > library.slots  # `slots` is known after a load
        if is_full or grows > shadow.room_bytes(device, except_for=context):
            return False
        if self._compute.is_prefill_too_slow(device, call, left_s=soon_s):
            return False
        if not self._compute.is_in_time(view, device, call, shadow):
            return False
        shadow.move(call, device, validation.make_unread_prompt(call, view.now + soon_s), added_bytes=grows)
        return True

    def try_to_move(self, view: View, calls: Collection[Call], shadow: Shadow, *, away_from: Sequence[Device]) -> bool:
        """Move calls to other devices in the assumed future `shadow`. Return False if one would not fit or be late."""
        # Most running calls have no time left to start again, so check this before any device.
        if any(seconds_until_prompt_due(view, call) < 0 for call in calls):
            return False
        return all(self._try_to_move_call(view, call, shadow, away_from) for call in calls)

    def _try_to_move_call(self, view: View, call: Call, shadow: Shadow, away_from: Sequence[Device]) -> bool:
        context = call.group.context
        there = [(x.devices[0], x) for x in list_ready_instances(context) if x.id not in shadow.leaving]
        loaded = {device for device, _ in there}
        new = [(device, None) for device in shadow.devices(context) if device not in loaded]
        for device, library in (*there, *new):
            if device not in away_from and self.try_to_join(view, call, device, library, shadow):
                return True
        for device, size, _ in self.find_places(view, call, shadow=shadow, may_stop_idle=False):
            known = device in away_from or device in shadow.devices(context)
            if not known and self._compute.is_in_time(view, device, call, shadow):
                shadow.move(
                    call,
                    device,
                    validation.make_unread_prompt(call, view.now + seconds_until_prompt_due(view, call)),
                    added_bytes=size,
                )
                return True
        return False

    def can_serve_with_waiting_calls(self, view: View, library: Library, calls: Sequence[Call], more: Call) -> bool:
        device, shadow = library.devices[0], Shadow()
        for call in calls:
            shadow.move(
                call,
                device,
                validation.make_unread_prompt(call, view.now + seconds_until_prompt_due(view, call)),
                added_bytes=0,
            )
        return self.try_to_join(view, more, device, library, shadow)

    def find_call_to_evict(self, view: View, library: Library) -> Call | None:
        """Return the call with the longest headroom that another device can take from an instance (§VII-D)."""
        for call in self._compute.calls_by_longest_headroom(view, library):
            if self.try_to_move(view, (call,), Shadow(), away_from=library.devices):
                return call
        return None

    def choose_neighbours_to_stop(
        self, view: View, library: Library, *, lacks_bytes: int, over_s: float
    ) -> tuple[Library, ...]:
        """Return neighbours to stop so that a library can accept a call (§VIII-A); empty if this is impossible.

        The smallest batches stop first, up to the size of the library's batch. Their calls must stay in time elsewhere.
        """
        device, most = library.devices[0], len(library.held) + 1
        ready = (x for x in list_unstopped_libraries(device) if x is not library and x.is_serving)
        neighbours = [x for x in ready if len(x.held) <= most and (has_known_token_memory(x.context) or not x.held)]
        found, shadow = list[Library](), Shadow()
        for victim in sorted(neighbours, key=lambda x: (len(x.held), -x.promised_bytes, x.id)):
            if lacks_bytes <= 0 and over_s <= 0:
                break
            decode_s = self._compute.decode_s(victim)
            if lacks_bytes <= 0 and not decode_s:
                continue
            trial = shadow.copy_without_library(victim.id)
            if self.try_to_move(view, victim.held.values(), trial, away_from=library.devices):
                found.append(victim)
                shadow = trial
                lacks_bytes -= victim.promised_bytes
                over_s -= decode_s
        return tuple(found) if lacks_bytes <= 0 and over_s <= 0 else ()
