"""The memory station: what a library comes to hold of its devices, and when. Its claims are written here alone.

The manager's ledger is a budget: what each library should come to hold. The pilot's ledger says what each holds. One
plan of the manager may end a library and load another in its place, or shrink one so that another grows
(docs/decisions/050; a shrink takes as long as it takes, SLINFER §VII-C). Orders that free memory are carried out at
once; a library that is to start or to grow has a *claim* here until its memory, and a place for its process, are really
free. Claims are met in the order in which they came, and a later one that fits is not held up by an earlier one that
does not: the budget has room for all of them, so that none waits for ever.

A claim for which nothing that is about to end or to shrink would make room, after `PROSPECT_S`, is refused: another
library uses more than the manager knows of. The manager then loads the context elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable

from stoker.pilot.core.commands import SetTimer
from stoker.pilot.core.state import CoreState, PilotLibrary
from stoker.protocol.ids import DeviceId

PROSPECT_S = 1.0
"""An order that makes room may come so much later than the claim that needs it."""


def why_never(state: CoreState, devices: tuple[DeviceId, ...], memory_bytes: int) -> str:
    """Why a library could not hold this much of these devices even if they were empty; empty if it could."""
    return state.ledger.why_never(devices, memory_bytes)


def is_declared(state: CoreState, library: PilotLibrary) -> bool:
    """True if a library's recipe says what it takes of its devices. Else its reservation is a guess until that was
    measured."""
    needs = library.recipe.needs
    return bool(needs.device_memory_bytes or (needs.memory_bytes and state.devices_of(library)[0].on_host))


def claim(state: CoreState, library: PilotLibrary, memory_bytes: int) -> bool:
    """Hold `memory_bytes` on each of a library's devices, now (True) or when `met` finds room for it."""
    withdraw(state, library)
    if _take(state, library, memory_bytes):
        return True
    state.claims[library.number] = memory_bytes
    wait_on(state, library)
    return False


def wait_on(state: CoreState, library: PilotLibrary) -> None:
    """Ask again in a while whether a library's claim can be met."""
    state.out.append(SetTimer(state.now + PROSPECT_S, f"memory/{library.number}"))


def met(state: CoreState) -> list[tuple[PilotLibrary, int]]:
    """Meet the claims that there is room for now. Returns their libraries, in the order of the claims, and what each
    holds."""
    found = []
    for number, memory_bytes in list(state.claims.items()):
        library = state.libraries[number]
        if _take(state, library, memory_bytes):
            del state.claims[number]
            found.append((library, memory_bytes))
    state.ledger.has_freed = False
    return found


def withdraw(state: CoreState, library: PilotLibrary) -> None:
    """A library claims nothing any more. No-op if it did not."""
    state.claims.pop(library.number, None)


def release(state: CoreState, library: PilotLibrary) -> None:
    """A library is over: it holds nothing, and claims nothing."""
    withdraw(state, library)
    state.ledger.release(library.number)


def budget_bytes(state: CoreState, library: PilotLibrary) -> int:
    """What a library holds or will come to hold on each of its devices."""
    if not library.has_process:
        return library.ordered.device_memory_bytes
    return state.claims.get(library.number, state.ledger.held(library.number))


def has_room(state: CoreState, library: PilotLibrary, memory_bytes: int) -> bool:
    """True if a library could hold this much of each of its devices now."""
    more = memory_bytes - state.ledger.held(library.number)
    return more <= 0 or not state.ledger.why_not(library.devices, more)


def why_hopeless(state: CoreState, library: PilotLibrary) -> str:
    """Why waiting does not meet a library's claim; empty while something that is about to happen may meet it."""
    wanted = state.claims.get(library.number)
    if wanted is None:
        return ""
    more = wanted - state.ledger.held(library.number)
    for device in library.devices:
        if _coming_bytes(state, device) + state.ledger.free(device) < more:
            return state.ledger.why_not((device,), more)
        staying = [other for other in _on(state, device) if not other.told_to_end]
        if not library.has_process and _lacks_place(state, device, staying):
            return f"{device} takes {state.devices[device].processes} process at a time, and has one that stays"
    return ""


def _take(state: CoreState, library: PilotLibrary, memory_bytes: int) -> bool:
    ledger, number = state.ledger, library.number
    if library.has_process:
        if ledger.why_not(library.devices, max(0, memory_bytes - ledger.held(number))):
            return False
        ledger.resize(number, memory_bytes=memory_bytes)
        return True
    if any(_lacks_place(state, device, _on(state, device)) for device in library.devices):
        return False
    if ledger.why_not(library.devices, memory_bytes):
        return False
    ledger.reserve(number, devices=library.devices, memory_bytes=memory_bytes)
    library.has_process = True  # its place is taken
    return True


def _lacks_place(state: CoreState, device: DeviceId, others: Iterable[PilotLibrary]) -> bool:
    """Whether a device has as many processes as it may have."""
    most = state.devices[device].processes
    return 0 < most <= sum(other.has_process for other in others)


def _on(state: CoreState, device: DeviceId) -> list[PilotLibrary]:
    return [library for library in state.libraries.values() if device in library.devices]


def _coming_bytes(state: CoreState, device: DeviceId) -> int:
    """What libraries that are about to end or to shrink will give back of a device."""
    coming = 0
    for library in _on(state, device):
        held = state.ledger.held(library.number)
        if library.told_to_end:
            coming += held
        elif library.resizes:
            coming += max(0, held - library.resizes[-1])
    return coming
