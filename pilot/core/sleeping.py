"""Puts libraries to sleep and wakes them. A sleeping library keeps its weights in host memory and runs no calls
(docs/decisions/063).

An order to sleep first claims host memory. If host memory is short, the pilot ends the sleeping library that was unused
longest. On a CPU device, a sleeping library keeps its measured bytes reserved on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from stoker.pilot.core import lifecycle, memory
from stoker.pilot.core.commands import SendToLibrary, Severity
from stoker.pilot.core.state import HOST, CoreState, PilotLibrary, Stage
from stoker.protocol.calls import FailureKind
from stoker.protocol.ids import LibraryId
from stoker.protocol.to_agent import Slept, Woke
from stoker.protocol.to_library import Sleep, Wake
from stoker.protocol.to_manager import LibraryAsleep, LibraryAwake
from stoker.protocol.to_pilot import SleepLibrary, WakeLibrary
from stoker.units import show_seconds

SLEEP_OR_WAKE_LIMIT_S = 120.0  # maximum seconds for a context to fall asleep or wake


# ---- sleep
def sleep_library(state: CoreState, order: SleepLibrary) -> None:
    library = state.libraries.get(order.library)
    if library is None or library.must_end or library.stage in (Stage.SLEEPING, Stage.WAKING):
        return  # the library's end or the answer to the first order tells the manager the result
    number = library.number
    if library.stage is Stage.ASLEEP:
        state.tell_manager(
            LibraryAsleep(number, state.ledger.reserved_bytes(number), state.host_memory.reserved_bytes(number))
        )
        return
    if why_not := _explain_sleep_refusal(state, library):
        held = memory.planned_bytes(state, library)
        state.tell_manager(LibraryAwake(number, held, refused=f"lib-{number} is not put to sleep: {why_not}"))
        return
    lifecycle.change_stage(library, Stage.SLEEPING)
    library.awake_bytes = state.ledger.reserved_bytes(number)
    library.asleep_bytes = min(order.device_memory_bytes, library.awake_bytes)
    if why_never := state.host_memory.explain_impossible_size((HOST,), order.host_bytes):
        end_sleeper(state, library, why_never)
        return
    state.host_claims[number] = order.host_bytes
    grant_host_memory_claims(state)


def _explain_sleep_refusal(state: CoreState, library: PilotLibrary) -> str:
    if library.stage is not Stage.READY:
        return f"it is {library.stage.value}"
    if not library.sleeps:
        return "its context cannot sleep"
    if library.held_calls:
        return f"it holds {len(library.held_calls)} calls"
    if library.unconfirmed_sizes or library.number in state.claims:
        return "its size is being changed"
    return ""


def grant_host_memory_claims(state: CoreState) -> None:
    """Put libraries to sleep as far as host memory is free. End sleeping libraries if host memory is short."""
    state.host_memory.has_freed = False
    for number, size in list(state.host_claims.items()):
        library = state.libraries[number]
        if state.host_memory.explain_shortage((HOST,), size):
            coming = sum(state.host_memory.reserved_bytes(x.number) for x in state.libraries.values() if x.must_end)
            lacking = size - state.host_memory.free_bytes(HOST) - coming
            _end_longest_unused_sleepers(state, _sleepers_by_age(state), lacking, of=state.host_memory.reserved_bytes)
            continue
        del state.host_claims[number]
        state.host_memory.reserve(number, devices=(HOST,), memory_bytes=size)
        library.sleep_or_wake_ordered_at = state.now
        state.commands.append(SendToLibrary(number, Sleep()))


def record_sleep(state: CoreState, library: PilotLibrary, message: Slept) -> None:
    """Record the memory that a sleeping library keeps, and free the rest of its memory."""
    if library.stage is not Stage.SLEEPING or library.number in state.host_claims:
        return
    lifecycle.change_stage(library, Stage.ASLEEP)
    library.asleep_at, library.sleep_or_wake_ordered_at = state.now, 0.0
    number, devices = library.number, state.devices_of(library)
    on_host = devices[0].on_host
    keeps = message.resident_bytes // len(devices) if on_host else message.device_bytes + devices[0].process_bytes
    state.ledger.resize(number, memory_bytes=min(state.ledger.reserved_bytes(number), keeps))
    takes = 0 if on_host else message.more_bytes
    more = takes - state.host_memory.reserved_bytes(number)
    lacks = "" if more <= 0 else state.host_memory.explain_shortage((HOST,), more)
    if not lacks:
        state.host_memory.resize(number, memory_bytes=takes)
    state.write_log(f"lib-{number} ({library.recipe.name}) sleeps: {show_seconds(message.sleep_s)} to fall asleep")
    state.tell_manager(LibraryAsleep(number, state.ledger.reserved_bytes(number), takes, message.sleep_s))
    if lacks:
        end_sleeper(state, library, f"it takes more host memory than it claimed: {lacks}")
    elif library.wake_bytes >= 0:
        _claim_memory_and_wake(state, library, library.wake_bytes)
    grant_host_memory_claims(state)


# ---- wake
def wake_library(state: CoreState, order: WakeLibrary) -> None:
    library = state.libraries.get(order.library)
    if library is None or library.must_end or library.stage is Stage.WAKING:
        return  # the library's end or the answer to the first order tells the manager the result
    if library.stage is Stage.SLEEPING:
        library.wake_bytes = order.device_memory_bytes
    elif library.stage is Stage.ASLEEP:
        _claim_memory_and_wake(state, library, order.device_memory_bytes)
    elif library.stage is Stage.READY:
        state.tell_manager(LibraryAwake(library.number, memory.planned_bytes(state, library)))


def _claim_memory_and_wake(state: CoreState, library: PilotLibrary, size: int) -> None:
    lifecycle.change_stage(library, Stage.WAKING)
    library.wake_bytes = -1
    size = max(size, state.ledger.reserved_bytes(library.number))
    if why_never := state.ledger.explain_impossible_size(library.devices, size):
        end_unwakeable_library(state, library, why_never)
    elif memory.claim_memory(state, library, size):
        send_wake_order(state, library)


def send_wake_order(state: CoreState, library: PilotLibrary) -> None:
    library.sleep_or_wake_ordered_at = state.now
    state.commands.append(SendToLibrary(library.number, Wake()))


def record_wake(state: CoreState, library: PilotLibrary, message: Woke) -> None:
    number = library.number
    if library.stage is not Stage.WAKING or number in state.claims:
        return
    lifecycle.change_stage(library, Stage.READY)
    library.sleep_or_wake_ordered_at = 0.0
    state.host_memory.release(number)
    state.write_log(f"lib-{number} ({library.recipe.name}) is awake: {show_seconds(message.wake_s)} to wake")
    state.tell_manager(LibraryAwake(number, state.ledger.reserved_bytes(number), message.wake_s))


def end_unwakeable_library(state: CoreState, library: PilotLibrary, why: str) -> None:
    """End a library that cannot wake on this pilot. The manager loads its context elsewhere."""
    what = f"lib-{library.number} ({library.recipe.name}) cannot wake: {why}"
    lifecycle.fail_library(state, library, FailureKind.PILOT, what, printed=False)


# ---- ends
def end_sleepers_for_claim(state: CoreState, library: PilotLibrary) -> bool:
    """End sleeping libraries, the longest unused first, to grant a library's memory claim. Return False if this cannot
    free enough memory.
    """
    ledger = state.ledger
    more = state.claims[library.number] - ledger.reserved_bytes(library.number)
    ended = False
    for device in library.devices:
        here = [x for x in _sleepers_by_age(state) if device in x.devices]
        lacking = more - ledger.free_bytes(device) - memory.device_bytes_being_freed(state, device)
        if lacking > sum(ledger.reserved_bytes(x.number) for x in here):
            return False
        ended |= _end_longest_unused_sleepers(state, here, lacking, of=ledger.reserved_bytes)
    return ended


def end_sleeper(state: CoreState, library: PilotLibrary, why: str) -> None:
    state.write_log(f"lib-{library.number} ({library.recipe.name}) ends instead of sleeping: {why}", Severity.WARNING)
    lifecycle.kill_library(state, library)


def _sleepers_by_age(state: CoreState) -> list[PilotLibrary]:
    here = (x for x in state.libraries.values() if x.stage is Stage.ASLEEP and not x.must_end)
    return sorted(here, key=lambda x: (x.asleep_at, x.number))


def _end_longest_unused_sleepers(
    state: CoreState, sleepers: Iterable[PilotLibrary], lacking: int, *, of: Callable[[LibraryId], int]
) -> bool:
    ended = False
    for library in sleepers:
        if lacking <= 0:
            break
        if held := of(library.number):
            lacking -= held
            ended = True
            end_sleeper(state, library, "its memory is needed")
    return ended
