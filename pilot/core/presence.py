"""Handles the pilot's hellos, heartbeats, walltime and lease. The lease limits the wait for an absent manager."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from stoker.pilot.core import events, lifecycle, memory, probes
from stoker.pilot.core.commands import ExitPilot, SendHeartbeat, SendHello
from stoker.pilot.core.state import NEVER, CoreState, Stage
from stoker.protocol import to_manager
from stoker.protocol.blocks import LossReason
from stoker.protocol.ids import CallId, LibraryId, RecipeKey
from stoker.protocol.wire import VERSION
from stoker.units import show_seconds

WELCOME_LIMIT_S = 5.0  # seconds without an answer after which the pilot sends its hello again
FIRST_WELCOME_LIMIT_S = 60.0  # minimum seconds that a pilot waits for its first welcome
MOST_DRAIN_S = 12.0  # seconds before the walltime's end at which a drain starts; if shorter, a fifth of the time left
_KILL_FRACTION = 0.25  # last fraction of the drain, in which the pilot kills libraries
_WALLTIME_TOLERANCE_S = 2.0  # two walltimes count as equal if they differ by at most this many seconds
SLOW_LOAD_S = 4.0  # seconds after which a load counts as slow and its log lines are reported
MAX_HELLO_LOADER_BYTES = 65_536  # a hello includes only recipes whose loader has at most this many bytes


# ---- the manager
def send_hello(state: CoreState, event: events.HelloDue) -> None:
    """Send a hello. It omits changes that unacknowledged frames report, because the pilot resends these frames next."""
    state.hellos += 1
    state.hello_is_due = False
    state.hello_sent_at = state.now
    state.reported_objects = set(event.objects)
    facts, before = state.facts, event.before
    recipes = {library.recipe.key: library.recipe for library in state.libraries.values()}
    hello = to_manager.PilotHello(
        protocol=VERSION, session=facts.session, host=facts.host, pid=facts.pid, devices=facts.devices,
        troubles=facts.troubles, lacks=facts.lacks, block=facts.block, libraries=library_facts(state, before),
        objects=tuple(sorted(event.objects)),
        ends_in_s=0.0 if state.ends_at == NEVER else max(0.001, state.ends_at - state.now), peer=facts.peer,
        cache=facts.cache, acknowledged=event.acknowledged,
        recipes=tuple(recipe for recipe in recipes.values() if len(recipe.loader) <= MAX_HELLO_LOADER_BYTES),
        last_library=state.last_library, faults=dict(state.faults), folder=facts.folder, number=state.hellos,
        node=facts.node, sleeper_bytes=facts.sleeper_bytes,
    )  # fmt: skip
    state.commands.append(SendHello(hello))


def library_facts(state: CoreState, before: events.UnacknowledgedFacts) -> tuple[to_manager.LibraryFacts, ...]:
    """Return the facts of libraries, including ended libraries if the manager has not acknowledged their end."""
    here = [
        to_manager.LibraryFacts(
            library=number, recipe=RecipeKey(library.recipe.key), devices=library.devices,
            ready=library.is_serving and number not in before.ready,
            calls=tuple(dict.fromkeys((*before.left.get(number, ()), *library.held_calls))),
            reserved_bytes=memory.planned_bytes(state, library), memory_bytes=library.resident_bytes,
            device_bytes=library.device_bytes, slots=library.slots, cache=library.cache, sleeps=library.sleeps,
            asleep=library.stage in (Stage.SLEEPING, Stage.ASLEEP) and number not in before.ready,
            awake_bytes=library.awake_bytes, host_bytes=state.host_memory.reserved_bytes(number),
        )
        for number, library in state.libraries.items()
    ]  # fmt: skip
    gone = [
        msgspec.structs.replace(
            facts,
            ready=facts.ready and number not in before.ready,
            calls=tuple(dict.fromkeys((*before.left.get(number, ()), *before.gone[number]))),
        )
        for number, facts in state.ended_libraries.items()
        if number in before.gone
    ]
    return (*here, *gone)


def must_send_hello(state: CoreState) -> bool:
    """Return True if the manager requested a hello, or did not answer the last hello in time."""
    return state.hello_is_due or (state.awaits_welcome and state.hello_sent_at < state.now - WELCOME_LIMIT_S)


def leave_if_manager_absent(state: CoreState, event: events.ManagerAway) -> None:
    """Start the pilot's exit if the manager was away for longer than the lease, or will not return."""
    lease_s = state.lease_s if state.welcomed_at else max(state.lease_s, FIRST_WELCOME_LIMIT_S)
    if event.refuses_key and not state.welcomed_at:
        lifecycle.start_exit(state, "the manager does not accept this pilot's key", within_s=0.0, code=2)
    elif event.away_s > lease_s:
        moved = "; if it has moved, a pilot without shared files cannot find it" if state.facts.is_carried else ""
        lifecycle.start_exit(state, f"the manager did not answer for {lease_s:g} s{moved}", within_s=0.0, code=2)
    elif event.session_over:  # the manager ended before this pilot joined, or during a disconnection
        lifecycle.start_exit(state, f"the session is over: {event.session_over}", within_s=0.0)


def send_heartbeat(state: CoreState, event: events.UsageMeasured) -> None:
    state.heartbeat_at = state.now + state.heartbeat_s
    uses = []
    for number, resident in event.resident_bytes.items():
        if (library := state.libraries.get(number)) is not None:
            library.resident_bytes = resident
            uses.append(to_manager.LibraryUse(number, resident, library.device_bytes, event.cpu_s.get(number, 0.0)))
    state.commands.append(SendHeartbeat(to_manager.Heartbeat(tuple(uses), event.cache_bytes, event.refused_frames)))
    for number, line in event.lines.items():
        library = state.libraries.get(number)
        if library is not None and library.stage is Stage.LOADING and line and line != library.last_line:
            library.last_line = line
            state.tell_manager(to_manager.LibraryUpdate(number, to_manager.LibraryPhase.LOADING, line))


# ---- the time that is left
def record_remaining_walltime(state: CoreState, left_s: float) -> None:
    before = state.ends_at
    if abs(before - (state.now + left_s)) <= _WALLTIME_TOLERANCE_S:
        return
    state.ends_at = state.now + left_s
    state.drain_at = state.ends_at - min(MOST_DRAIN_S, 0.2 * left_s)
    state.write_log(f"the walltime is over in {show_seconds(left_s)}")
    if state.hellos:
        state.tell_manager(to_manager.WalltimeUpdate(max(0.001, left_s)))


def handle_termination_signal(state: CoreState, event: events.SignalReceived) -> None:
    """Drain the pilot at the first signal. End the pilot immediately at the second signal."""
    if event.again:
        state.leave_by = 0.0
    else:
        lifecycle.start_drain(state, event.name, within_s=state.facts.exit_grace_s, loss=LossReason.SIGNALLED)


def handle_tick(state: CoreState, event: events.Tick) -> None:
    if state.now >= state.drain_at:
        within_s = (1 - _KILL_FRACTION) * (state.ends_at - state.drain_at) - (state.now - state.drain_at)
        state.drain_at = NEVER
        left_s = max(0.0, state.ends_at - state.now)
        lifecycle.start_drain(state, f"its walltime is over in {show_seconds(left_s)}", within_s=within_s)
    probes.start_due_probes(state)
    if state.leaving and state.now >= state.leave_by:
        for library in list(state.libraries.values()):
            lifecycle.kill_library(state, library)
    if lifecycle.may_exit_now(state, serves_peers=event.serves_peers):
        state.commands.append(ExitPilot())


def report_pilot_end(state: CoreState, ran: Mapping[LibraryId, tuple[CallId, ...]]) -> None:
    """Report the end of all libraries and calls to the manager, because the pilot exits now."""
    state.has_ended = True
    for number, library in list(state.libraries.items()):
        library.must_end = True
        lifecycle.release_ended_library(state, library, events.ProcessEnded(number, running=ran.get(number, ())))
    if state.says_farewell:
        state.tell_manager(to_manager.PilotLeaving(reason=state.leaving, loss=state.loss))


def next_tick_deadline(state: CoreState) -> float:
    leave_by = state.leave_by if state.now < state.leave_by else NEVER
    return min(leave_by, state.drain_at)


def next_deadline(state: CoreState) -> float:
    return min(state.heartbeat_at, next_tick_deadline(state))
