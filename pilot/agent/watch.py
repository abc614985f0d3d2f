"""Limits of libraries: of memory, loading time, a call's time, and silence. Looked at every quarter of a second."""

from __future__ import annotations

import logging
import time

from stoker.manager.protocol.calls import FailureKind
from stoker.manager.protocol.to_manager import CallsReturned
from stoker.pilot.agent import device_memory, ending, orders
from stoker.pilot.agent.agent import Agent
from stoker.pilot.agent.failures import failure_of
from stoker.pilot.agent.library import Library
from stoker.pilot.agent.usage import over_limit
from stoker.pilot.core.library import State
from stoker.units import show_bytes, show_seconds

log = logging.getLogger("stoker.pilot")

EVERY_S = 0.25
UNBEGUN_S = 30.0
"""A library that has begun none of its calls for so long, and runs none, lets no thread of it run: it is stopped, or a
thread that an earlier call left behind keeps the interpreter to itself."""
DEAF_S = 10.0
"""A library that has not answered an order to give calls back for so long does not let another thread of it run."""


def look(agent: Agent) -> None:
    """Look at every library once."""
    for library in list(agent.libraries.values()):
        if library.state.state in (State.READY, State.DRAINING):
            _unbegun(agent, library)
        if library.told_to_end:
            continue
        if library.state.state in (State.STARTING, State.LOADING):
            _loading(agent, library)
        if library.pid and not library.told_to_end:
            _memory(agent, library)
        if library.has_limits or library.cancelling:
            _calls(agent, library)
        if library.asked_back_at and time.monotonic() - library.asked_back_at > DEAF_S:
            _give_back_for(agent, library)
        if library.closed_at and time.monotonic() - library.closed_at > 1.0:
            what = f"lib-{library.state.library} closed its socket to the pilot: its code closes what is not its own"
            ending.kill(agent, library, cause=failure_of(agent, library, FailureKind.DIED, what, printed=True))


def look_at_devices(agent: Agent) -> None:
    """What each library uses of its GPUs, what it is promised of them, and whether it takes what others need."""

    def too_large(library: Library, what: str, taken: int, declared: int) -> None:
        _too_large(agent, library, what, taken=taken, declared=declared)

    device_memory.look(agent, too_large=too_large)


def memory_limit(agent: Agent, library: Library) -> int:
    """Bytes of host memory that a library may take; 0 = any. On CPU devices their memory is host memory."""
    limit = max(library.order.memory_bytes, library.state.recipe.needs.memory_bytes)
    devices = agent.devices_of(library)
    if not devices[0].cuda:
        limit = max(limit, library.state.recipe.needs.device_memory_bytes * len(devices))
    return limit


def _memory(agent: Agent, library: Library) -> None:
    limit = memory_limit(agent, library)
    if not limit:
        return
    taken = over_limit(library.pid, limit)
    if taken:
        _too_large(agent, library, "memory", taken=taken, declared=limit)


def _too_large(agent: Agent, library: Library, what: str, *, taken: int, declared: int) -> None:
    ending.kill(
        agent,
        library,
        cause=failure_of(
            agent,
            library,
            FailureKind.MEMORY,
            f"lib-{library.state.library} ({library.state.recipe.name}) on {agent.options.pilot} took"
            f" {show_bytes(taken)} of {what} and declares {show_bytes(declared)}; declare more, or load less",
            printed=True,
        ),
    )


def _loading(agent: Agent, library: Library) -> None:
    limit_s = library.state.recipe.needs.load_limit_s
    if not limit_s or time.monotonic() - library.started_at < limit_s:
        return
    what = (
        f"{library.state.recipe.name} did not load within {show_seconds(limit_s)} on {agent.options.pilot};"
        " raise load_limit if it may take longer"
    )
    cause = failure_of(agent, library, FailureKind.CONTEXT, what, printed=True)
    if not library.pid and library.zygote is not None:  # stuck in an import, before there is a process
        library.cause = cause
        library.zygote.stop()
        return
    ending.kill(agent, library, cause=cause)


def _calls(agent: Agent, library: Library) -> None:
    for call, started_ns in library.running():
        limit_s = library.state.held.get(call, 0.0)  # type: ignore[call-overload]
        ran_s = (time.monotonic_ns() - started_ns) / 1e9
        cancelled = time.monotonic() >= library.cancelling.get(call, float("inf"))
        if not cancelled and not (0 < limit_s < ran_s):
            continue
        if (call, started_ns) not in library.running():  # it was being written, or has just ended
            continue
        if cancelled:
            what = f"a call that ran on lib-{library.state.library} was cancelled, and its library ended with it"
            cause = failure_of(agent, library, FailureKind.CANCELLED, what, printed=True)
            ending.kill(agent, library, cause=cause)
        else:
            orders.time_out(agent, library, call, limit_s=limit_s, ran_s=ran_s)
        return
    library.cancelling = {call: at for call, at in library.cancelling.items() if call in library.state.held}


def _unbegun(agent: Agent, library: Library) -> None:
    """End a library that begins none of the calls that it was sent: they run elsewhere."""
    if not library.state.held or library.waiting or library.resizes or library.running():
        library.looks_idle = 0
        return
    library.looks_idle += 1  # counted, since this process may have been stopped as well
    if library.looks_idle * EVERY_S >= UNBEGUN_S:
        what = (
            f"lib-{library.state.library} has begun none of its calls for {show_seconds(UNBEGUN_S)}: its process is"
            " stopped, or an earlier call has left a thread there that lets no other run"
        )
        ending.kill(agent, library, cause=failure_of(agent, library, FailureKind.DIED, what, printed=True))


def _give_back_for(agent: Agent, library: Library) -> None:
    """Give back what a library that does not answer holds and does not run: its code keeps the interpreter to itself.

    Calls that have ended there, but whose ends it could not send yet, are given back too and run once more elsewhere;
    what it says of them later is not heard.
    """
    running = {call for call, _ in library.running()}
    rest = tuple(library.state.returned([call for call in library.state.held if call not in running]))
    library.asked_back_at = 0.0
    if rest:
        number = library.state.library
        log.warning("lib-%d has not answered for %g s: %d calls run elsewhere", number, DEAF_S, len(rest))
        agent.wires.tell(library, library.give_back(calls=rest))
        library.answer_for_it()
        agent.link.post(CallsReturned(number, rest))
