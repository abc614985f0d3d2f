"""Device memory: claims, reservations, and memory that recipes declare (docs/decisions/050, SLINFER §VII-C).

The manager's ledger contains planned memory. The pilot's ledger contains the memory that each library actually uses. A
library that starts or grows has a *claim* until the device has enough free memory and accepts another process. A claim
that fits does not wait for an earlier claim that does not fit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from stoker.contexts.inference.adapter import TokenCache
from stoker.contexts.recipe import Needs
from stoker.pilot.core.commands import SendToLibrary, SetTimer, Severity
from stoker.pilot.core.state import SLEEP_STAGES, CoreState, PilotLibrary, Stage
from stoker.protocol.ids import DeviceId, LibraryId
from stoker.protocol.to_agent import Resized
from stoker.protocol.to_library import Resize
from stoker.protocol.to_manager import DeviceFacts, LibraryResized

# ---- claims
CLAIM_CHECK_INTERVAL_S = 1.0  # seconds that a claim waits for an order that frees memory


def has_declared_device_memory(state: CoreState, library: PilotLibrary) -> bool:
    needs = library.recipe.needs
    return bool(needs.device_memory_bytes or (needs.memory_bytes and state.devices_of(library)[0].on_host))


def claim_memory(state: CoreState, library: PilotLibrary, memory_bytes: int) -> bool:
    """Reserve memory on a library's devices and return True. If too little memory is free, add a claim and return
    False.
    """
    state.claims.pop(library.number, None)
    if _reserve_if_free(state, library, memory_bytes):
        return True
    state.claims[library.number] = memory_bytes
    schedule_memory_claim_check(state, library)
    return False


def schedule_memory_claim_check(state: CoreState, library: PilotLibrary) -> None:
    state.commands.append(SetTimer(state.now + CLAIM_CHECK_INTERVAL_S, f"memory/{library.number}"))


def reserve_claimed_memory(state: CoreState) -> list[tuple[PilotLibrary, int]]:
    state.ledger.has_freed = False
    claims = [(state.libraries[number], memory_bytes) for number, memory_bytes in state.claims.items()]
    granted = [(library, size) for library, size in claims if _reserve_if_free(state, library, size)]
    for library, _ in granted:
        del state.claims[library.number]
    return granted


def release_memory(state: CoreState, library: PilotLibrary) -> None:
    state.claims.pop(library.number, None)
    state.ledger.release(library.number)
    state.host_claims.pop(library.number, None)
    state.host_memory.release(library.number)


def planned_bytes(state: CoreState, library: PilotLibrary) -> int:
    """Return the bytes that a library holds, or will hold, on each of its devices."""
    if not library.has_process:
        return library.ordered.device_memory_bytes
    return state.claims.get(library.number, state.ledger.reserved_bytes(library.number))


def can_grow_to(state: CoreState, library: PilotLibrary, memory_bytes: int, *, ending: Collection[LibraryId]) -> bool:
    """Return True if a library can grow to `memory_bytes` as soon as the libraries `ending` have ended."""
    more = memory_bytes - state.ledger.reserved_bytes(library.number)
    if more <= 0:
        return True
    if not ending:
        return not state.ledger.explain_shortage(library.devices, more)
    here = [{other.number for other in _libraries_on(state, device)} for device in library.devices]
    if any(state.claims.keys() & numbers for numbers in here):
        return False
    coming = (sum(map(state.ledger.reserved_bytes, numbers.intersection(ending))) for numbers in here)
    return all(
        more <= state.ledger.free_bytes(device) + size for device, size in zip(library.devices, coming, strict=True)
    )


def explain_hopeless_claim(state: CoreState, library: PilotLibrary) -> str:
    """Return why waiting cannot satisfy a library's memory claim; empty if waiting may help."""
    wanted = state.claims.get(library.number)
    if wanted is None:
        return ""
    more = wanted - state.ledger.reserved_bytes(library.number)
    for device in library.devices:
        if device_bytes_being_freed(state, device) + state.ledger.free_bytes(device) < more:
            return state.ledger.explain_shortage((device,), more)
        staying = [other for other in _libraries_on(state, device) if not other.must_end]
        if not library.has_process and _is_process_limit_reached(state, device, staying):
            return f"{device} accepts {state.devices[device].processes} process at a time, and another process uses it"
    return ""


def _reserve_if_free(state: CoreState, library: PilotLibrary, memory_bytes: int) -> bool:
    ledger, number = state.ledger, library.number
    if ledger.explain_shortage(library.devices, max(0, memory_bytes - ledger.reserved_bytes(number))):
        return False
    if library.has_process:
        ledger.resize(number, memory_bytes=memory_bytes)
        return True
    if any(_is_process_limit_reached(state, device, _libraries_on(state, device)) for device in library.devices):
        return False
    ledger.reserve(number, devices=library.devices, memory_bytes=memory_bytes)
    library.has_process = True  # from now on, the library counts as a process on its devices
    return True


def _is_process_limit_reached(state: CoreState, device: DeviceId, others: Iterable[PilotLibrary]) -> bool:
    return 0 < state.devices[device].processes <= sum(other.has_process for other in others)


def _libraries_on(state: CoreState, device: DeviceId) -> list[PilotLibrary]:
    return [library for library in state.libraries.values() if device in library.devices]


def device_bytes_being_freed(state: CoreState, device: DeviceId) -> int:
    coming = 0
    for library in _libraries_on(state, device):
        held = state.ledger.reserved_bytes(library.number)
        if library.must_end:
            coming += held
        elif library.unconfirmed_sizes:
            coming += max(0, held - library.unconfirmed_sizes[-1])
        elif library.stage is Stage.SLEEPING:
            coming += max(0, held - library.asleep_bytes)
    return coming


# ---- size changes
def resize_library(state: CoreState, number: LibraryId, size: int) -> None:
    """Resize a library to `size` bytes on each device. Drop the library's earlier claim for more memory."""
    library = state.libraries.get(number)
    if library is None:
        return
    why_not = state.ledger.explain_impossible_size(library.devices, size)
    if not library.has_process:
        why_not = "it has not begun to load"
    elif library.stage in SLEEP_STAGES:
        why_not = f"it is {library.stage.value}"
    if why_not:
        refuse_resize(state, library, why_not, ordered_bytes=size)
    elif size <= state.ledger.reserved_bytes(number):
        state.claims.pop(number, None)
        send_resize_order(state, library, size)
    elif claim_memory(state, library, size):
        send_resize_order(state, library, size)


def send_resize_order(state: CoreState, library: PilotLibrary, size: int) -> None:
    library.unconfirmed_sizes.append(size)
    library.has_measured_size = True
    state.commands.append(SendToLibrary(library.number, Resize(device_memory_bytes=size)))


def refuse_resize(state: CoreState, library: PilotLibrary, why: str, *, ordered_bytes: int) -> None:
    state.claims.pop(library.number, None)
    state.write_log(f"lib-{library.number} is not resized: {why}", Severity.WARNING)
    report_unchanged_size(state, library, ordered_bytes=ordered_bytes)


def report_unchanged_size(state: CoreState, library: PilotLibrary, *, ordered_bytes: int) -> None:
    state.tell_manager(LibraryResized(library.number, planned_bytes(state, library), ordered_bytes=ordered_bytes))


def record_library_resize(state: CoreState, library: PilotLibrary, message: Resized) -> None:
    """Record the size that a library reports. A negative size means that its context refused the change.

    Memory for later orders stays reserved, because the library may shrink and grow again without a claim.
    """
    size = message.device_memory_bytes
    ordered = library.unconfirmed_sizes.pop(0) if library.unconfirmed_sizes else size
    try:
        if size >= 0:
            state.ledger.resize(library.number, memory_bytes=max([size, *library.unconfirmed_sizes]))
    except ValueError as error:
        state.write_log(f"lib-{library.number}: {error}", Severity.WARNING)
    state.tell_manager(
        LibraryResized(library.number, state.ledger.reserved_bytes(library.number), ordered_bytes=ordered)
    )


# ---- declared memory
def declared_bytes(needs: Needs, facts: DeviceFacts) -> int:
    """Return the bytes that a recipe declares for a device; 0 without a declaration."""
    memory, device_memory = needs.memory_bytes, needs.device_memory_bytes
    if facts.on_host:
        return max(memory, device_memory)
    if not device_memory or device_memory > facts.memory_bytes:
        return device_memory
    if is_limited_to_one_process(facts):
        return facts.memory_bytes
    return min(device_memory + facts.process_bytes, facts.memory_bytes)


def token_cache(
    needs: Needs, facts: DeviceFacts, reported: TokenCache | None, *, measured_bytes: int
) -> TokenCache | None:
    """Return the sizes of a context's weights and token cache, as the library reports or the recipe declares them.

    Declared memory includes the cache. `measured_bytes`: memory of a loaded library without a cache; 0 = unknown.
    """
    declared = declared_bytes(needs, facts)
    if reported is None:
        if not needs.token_bytes or not declared:
            return None
        return TokenCache(declared - needs.token_bytes * needs.cache_tokens, needs.token_bytes, needs.cache_tokens)
    if reported.is_fixed:
        return reported
    if not declared:
        return msgspec.structs.replace(reported, weights_bytes=max(reported.weights_bytes, measured_bytes))
    return msgspec.structs.replace(reported, tokens=max(0, declared - reported.weights_bytes) // reported.token_bytes)


def is_limited_to_one_process(facts: DeviceFacts) -> bool:
    """Return True if a second process on the device would fail (compute mode EXCLUSIVE_PROCESS)."""
    return facts.processes == 1


def replace_guessed_reservation(state: CoreState, library: PilotLibrary) -> None:
    """Replace a library's guessed reservation by its measured bytes, as far as memory is free."""
    if has_declared_device_memory(state, library):
        return
    number, devices = library.number, state.devices_of(library)
    on_host = devices[0].on_host
    took = library.resident_bytes // len(devices) if on_host else library.device_bytes
    if not took or (not on_host and devices[0].processes == 1):
        return
    room = min(state.ledger.free_bytes(device.device) for device in devices) + state.ledger.reserved_bytes(number)
    state.ledger.resize(number, memory_bytes=min(took, room))
