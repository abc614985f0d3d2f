"""Enforces limits of libraries (memory, load time, call time, silence), and adjusts reservations to measured memory.

Suspensions of the whole pilot do not count for any limit. A library that far exceeds its declared device memory is
killed only if it prevents other libraries from using their reserved memory.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from stoker.pilot.core import lifecycle, running
from stoker.pilot.core.commands import KillZygote, SendToLibrary, Severity
from stoker.pilot.core.events import DevicesMeasured, Observation
from stoker.pilot.core.running import make_library_failure
from stoker.pilot.core.sleeping import SLEEP_OR_WAKE_LIMIT_S
from stoker.pilot.core.state import CoreState, EndCause, PilotLibrary, Stage
from stoker.protocol.calls import FailureKind
from stoker.protocol.ids import DeviceId
from stoker.protocol.to_manager import CallsReturned, LibraryResized
from stoker.units import show_bytes, show_seconds

# ---- limits
OBSERVATION_INTERVAL_S = 0.25  # seconds between two observations of a library
NO_CALL_BEGUN_LIMIT_S = 30.0  # seconds after which the pilot kills a library that holds calls and runs none
NO_ANSWER_LIMIT_S = 10.0  # seconds without an answer to `GiveBack` after which a library counts as blocked
CLOSED_SOCKET_LIMIT_S = 1.0  # seconds a process may run after its socket closes; if longer, user code closed the socket
SUSPENSION_DELAY_S = 3.0  # seconds of delay after which the loop concludes that the pilot was suspended


def enforce_limits(state: CoreState, library: PilotLibrary, observation: Observation) -> None:
    if library.is_serving:
        _enforce_call_start_limit(state, library, observation)
    if library.is_killed:
        return
    if library.has_limits or library.stopping_calls or library.stuck_calls:
        _enforce_call_time_limits(state, library, observation)
    if library.must_end:
        return
    if library.stage in (Stage.STARTING, Stage.LOADING):
        _enforce_load_time_limit(state, library)
    if library.sleep_or_wake_ordered_at and state.now - library.sleep_or_wake_ordered_at >= SLEEP_OR_WAKE_LIMIT_S:
        moved = f"{library.recipe.name} was {library.stage.value} for {show_seconds(SLEEP_OR_WAKE_LIMIT_S)}"
        what = f"{moved}: its sleep() or wake() does not return"
        lifecycle.fail_library(state, library, FailureKind.CONTEXT, what)
    if observation.over_limit_bytes and not library.must_end:
        declared = memory_limit(state, library)
        _fail_large_library(state, library, "memory", taken=observation.over_limit_bytes, declared=declared)
    if library.give_back_sent_at and state.now - library.give_back_sent_at > NO_ANSWER_LIMIT_S:
        _return_unstarted_calls(state, library, observation)
    closed_s = state.now - library.socket_closed_at if library.socket_closed_at else 0.0
    if closed_s > CLOSED_SOCKET_LIMIT_S and library.number in state.libraries:
        what = f"lib-{library.number} closed its socket to the pilot: user code closes files that it did not open"
        lifecycle.fail_library(state, library, FailureKind.DIED, what)


def extend_limits(state: CoreState, seconds: float) -> None:
    how_long = show_seconds(seconds)
    state.write_log(
        f"the pilot was suspended for {how_long}; this time does not count for the limits of calls and loads"
    )
    state.suspensions.append((state.now - seconds, state.now))
    for library in state.libraries.values():
        for field in ("started_at", "give_back_sent_at", "socket_closed_at", "sleep_or_wake_ordered_at"):
            if since := getattr(library, field):
                setattr(library, field, since + seconds)
        for call, stop in library.stopping_calls.items():
            library.stopping_calls[call] = msgspec.structs.replace(stop, until=stop.until + seconds)


def _run_seconds_without_suspension(state: CoreState, ran_s: float) -> float:
    began = state.now - ran_s
    for start, end in reversed(state.suspensions):
        if end <= began:
            break
        ran_s -= end - max(start, began)
    return ran_s


def memory_limit(state: CoreState, library: PilotLibrary) -> int:
    """Return the host memory limit of a library in bytes, including memory for its sleeping context; 0 = no limit.

    On CPU devices, the limit is at least the reservation of the library.
    """
    needs = library.recipe.needs
    limit = max(library.ordered.memory_bytes, needs.memory_bytes)
    if state.devices_of(library)[0].on_host and (limit or needs.device_memory_bytes):
        a_device = max(needs.device_memory_bytes, state.ledger.reserved_bytes(library.number))
        limit = max(limit, a_device * len(library.devices))
    return limit + state.host_memory.reserved_bytes(library.number) if limit else 0


def _fail_large_library(state: CoreState, library: PilotLibrary, resource: str, *, taken: int, declared: int) -> None:
    what = (
        f"lib-{library.number} ({library.recipe.name}) on {state.facts.pilot} took"
        f" {show_bytes(taken)} of {resource} and declares {show_bytes(declared)}; declare more, or load less"
    )
    lifecycle.fail_library(state, library, FailureKind.MEMORY, what)


def _enforce_load_time_limit(state: CoreState, library: PilotLibrary) -> None:
    limit_s = library.recipe.needs.load_limit_s
    if not limit_s or state.now - library.started_at < limit_s:
        return
    what = (
        f"{library.recipe.name} did not load within {show_seconds(limit_s)} on {state.facts.pilot};"
        " raise load_limit if it may take longer"
    )
    if library.pid:
        lifecycle.fail_library(state, library, FailureKind.CONTEXT, what)
    else:  # no process exists yet, so an import in the zygote hangs
        library.end_cause = EndCause(make_library_failure(state, library, FailureKind.CONTEXT, what), printed=True)
        state.commands.append(KillZygote(library.number))


def _enforce_call_time_limits(state: CoreState, library: PilotLibrary, observation: Observation) -> None:
    for call, since_s in observation.running:
        if call not in library.held_calls or call in library.stopping_calls or call in library.stuck_calls:
            continue
        limit_s = library.held_calls[call]
        if 0 < limit_s < since_s and limit_s < (ran_s := _run_seconds_without_suspension(state, since_s)):
            what = f"the call ran for {ran_s:.1f} s on {state.facts.pilot}; its limit is {limit_s:g} s"
            failure = make_library_failure(state, library, FailureKind.TIMEOUT, what)
            lifecycle.stop_calls(state, library, [call], failure=failure)
    if library.stopping_calls or library.stuck_calls:
        lifecycle.enforce_stop_deadlines(state, library, [call for call, _ in observation.running])


def _enforce_call_start_limit(state: CoreState, library: PilotLibrary, observation: Observation) -> None:
    is_at_work = any(call in library.held_calls for call, _ in observation.running)
    if (
        not library.held_calls
        or library.postponed_orders
        or library.orders_waiting_for_arguments
        or library.unconfirmed_sizes
        or is_at_work
    ):
        library.idle_observations = 0
        return
    library.idle_observations += 1  # count observations, not seconds, because this process may have been suspended
    if library.idle_observations * OBSERVATION_INTERVAL_S >= NO_CALL_BEGUN_LIMIT_S:
        what = (
            f"lib-{library.number} has not begun any of its calls for {show_seconds(NO_CALL_BEGUN_LIMIT_S)}: its"
            " process is stopped, or a thread of an earlier call blocks it"
        )
        lifecycle.fail_library(state, library, FailureKind.DIED, what)


def _return_unstarted_calls(state: CoreState, library: PilotLibrary, observation: Observation) -> None:
    """Return the unstarted calls of an unresponsive library to the manager, so that they run elsewhere."""
    at_work = {call for call, _ in observation.running}
    rest = tuple(running.remove_calls(library, [call for call in library.held_calls if call not in at_work]))
    library.give_back_sent_at = 0.0
    if rest:
        number = library.number
        text = f"lib-{number} has not answered for {NO_ANSWER_LIMIT_S:g} s: {len(rest)} calls run elsewhere"
        state.write_log(text, Severity.WARNING)
        state.commands.append(SendToLibrary(number, running.make_give_back_order(library, calls=rest)))
        library.last_void_give_back = library.give_back_orders
        state.tell_manager(CallsReturned(number, rest))


# ---- device memory
_RESERVATION_FACTOR = 1.1  # a library without declared memory gets 1.1 times its measured memory
_STEP = 0.02  # smallest relative growth of a reservation, to save messages
_WORKSPACES_BYTES = 2_000_000_000  # bytes that NCCL, cuBLAS and cuDNN may use in addition to the declared memory


def apply_device_measurements(state: CoreState, event: DevicesMeasured) -> None:
    for number, sizes in event.used.items():
        library = state.libraries.get(number)
        if library is None or not library.has_process:
            continue
        library.device_bytes = max(sizes.values())
        if library.must_end:
            continue
        if state.devices[library.devices[0]].processes != 1:
            _adjust_reservation(state, library, measured_at=max(event.at[device] for device in sizes))
        over = _find_overused_device(state, library, sizes, event.taken)
        if over is not None:
            declared = library.recipe.needs.device_memory_bytes
            _fail_large_library(state, library, f"memory of {over}", taken=sizes[over], declared=declared)


def _adjust_reservation(state: CoreState, library: PilotLibrary, *, measured_at: float) -> None:
    if library.stage in (Stage.SLEEPING, Stage.WAKING) or (
        library.stage is Stage.ASLEEP and measured_at <= library.asleep_at
    ):
        return  # the measurement is out of date, so adjust the reservation after the next measurement
    number, ledger = library.number, state.ledger
    uses, held = library.device_bytes, ledger.reserved_bytes(number)
    wanted = held
    recipe = library.recipe
    is_guess = bool(recipe.loader) and not recipe.needs.device_memory_bytes and not library.has_measured_size
    if is_guess and library.stage is Stage.READY and measured_at > library.ready_at:
        library.has_measured_size = True
        wanted = min(held, int(uses * _RESERVATION_FACTOR))
    if uses > wanted:
        room = min(ledger.free_bytes(device) for device in library.devices)
        wanted = min(int(uses * (1 + _STEP)), held + room)
        if wanted <= held and not library.exceeds_device_memory:
            library.exceeds_device_memory = True
            state.write_log(f"lib-{number} uses more device memory than the pilot can reserve", Severity.WARNING)
    if wanted != held:
        ledger.resize(number, memory_bytes=wanted)
        state.tell_manager(LibraryResized(number, wanted, measured=True))


def _find_overused_device(
    state: CoreState, library: PilotLibrary, sizes: Mapping[DeviceId, int], taken: Mapping[DeviceId, int]
) -> DeviceId | None:
    declared = library.recipe.needs.device_memory_bytes
    if not declared:
        return None
    for name, size in sizes.items():
        facts = state.devices[name]
        allowed = declared + facts.process_bytes + max(_WORKSPACES_BYTES, declared // 4)
        if size <= allowed or taken[name] < 0:
            continue
        others = [other for other in state.libraries.values() if other is not library and name in other.devices]
        owed = sum(max(0, state.ledger.reserved_bytes(other.number) - other.device_bytes) for other in others)
        if owed > facts.memory_bytes - taken[name]:
            return name
    return None
