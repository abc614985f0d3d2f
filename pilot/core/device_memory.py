"""The memory of GPUs: what each library uses of it as measured, and what is reserved for it.

A library has what it declares and what CUDA takes for its process; where it declares nothing, what was measured once it
was loaded. What a library uses beyond its reservation, other libraries can no longer get: the reservation grows by that
within what is free, here and, through `LibraryResized`, in the manager's. A library is ended for its memory only
if it takes far more than it declares *and* others can no longer get what was reserved for them: workspaces of NCCL and
cuBLAS, which no user declares, harm nobody on a device with room.
"""

from __future__ import annotations

from collections.abc import Mapping

from stoker.pilot.core import limits
from stoker.pilot.core.commands import Severity
from stoker.pilot.core.events import DevicesMeasured
from stoker.pilot.core.stages import Stage
from stoker.pilot.core.state import CoreState, PilotLibrary
from stoker.protocol.ids import DeviceId
from stoker.protocol.to_manager import LibraryResized

_MARGIN = 1.1
"""For a library that declares nothing, what was measured is reserved, and a tenth more."""
_STEP = 0.02
"""A reservation grows in steps of at least this part of it: the manager need not hear of each megabyte."""
_WORKSPACES_BYTES = 2_000_000_000
"""What NCCL, cuBLAS and cuDNN may take beyond what a user declares before that counts as too much."""


def measured(state: CoreState, event: DevicesMeasured) -> None:
    """Settle what is reserved for each library, by what the drivers have measured."""
    for number, sizes in event.used.items():
        library = state.libraries.get(number)
        if library is None or not library.has_process:
            continue
        library.device_bytes = max(sizes.values())
        if library.told_to_end:
            continue
        if state.devices[library.devices[0]].processes != 1:
            _settle(state, library, at=max(event.at[device] for device in sizes))
        over = _harms(state, library, sizes, event.taken)
        if over is not None:
            declared = library.recipe.needs.device_memory_bytes
            limits.too_large(state, library, f"memory of {over}", taken=sizes[over], declared=declared)


def _settle(state: CoreState, library: PilotLibrary, *, at: float) -> None:
    """Reserve what a library uses: less where the reservation was a guess, more where it has grown."""
    number, ledger = library.number, state.ledger
    uses, held = library.device_bytes, ledger.held(number)
    wanted = held
    recipe = library.recipe
    is_guess = bool(recipe.loader) and not recipe.needs.device_memory_bytes and not library.is_settled
    if is_guess and library.stage is Stage.READY and at > library.ready_at:
        library.is_settled = True
        wanted = min(held, int(uses * _MARGIN))
    if uses > wanted:
        room = min(ledger.free(device) for device in library.devices)
        wanted = min(int(uses * (1 + _STEP)), held + room)
        if wanted <= held and not library.is_over:
            library.is_over = True
            text = f"lib-{number} uses more of its device than is left to be reserved for it"
            state.log(text, Severity.WARNING)
    if wanted != held:
        ledger.resize(number, memory_bytes=wanted)
        state.tell(LibraryResized(number, wanted, measured=True))


def _harms(
    state: CoreState, library: PilotLibrary, sizes: Mapping[DeviceId, int], taken: Mapping[DeviceId, int]
) -> DeviceId | None:
    """The device on which a library takes far more than it declares from others; None if there is none."""
    declared = library.recipe.needs.device_memory_bytes
    if not declared:
        return None
    for name, size in sizes.items():
        facts = state.devices[name]
        allowed = declared + facts.process_bytes + max(_WORKSPACES_BYTES, declared // 4)
        if size <= allowed or taken[name] < 0:
            continue
        others = [other for other in state.libraries.values() if other is not library and name in other.devices]
        owed = sum(max(0, state.ledger.held(other.number) - other.device_bytes) for other in others)
        if owed > facts.memory_bytes - taken[name]:
            return name
    return None
