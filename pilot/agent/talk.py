"""What libraries and zygotes say, and what is done about it."""

from __future__ import annotations

import logging
import time
from typing import assert_never

from stoker.manager.protocol.calls import FailureKind
from stoker.manager.protocol.to_agent import (
    Ended,
    Evicted,
    GivenBack,
    Hello,
    Listens,
    Loaded,
    LoadFailed,
    Reports,
    Resized,
    SnapshotMade,
    ToAgent,
)
from stoker.manager.protocol.to_manager import (
    CallEvicted,
    CallsEnded,
    CallsProgress,
    CallsReturned,
    GangMeets,
    LibraryNews,
    LibraryPhase,
    LibraryReady,
    LibraryResized,
)
from stoker.pilot.agent import ending, orders, payloads, snapshots
from stoker.pilot.agent.agent import Agent
from stoker.pilot.agent.failures import failure_of, load_failure, no_process
from stoker.pilot.agent.library import Library
from stoker.pilot.core.library import State
from stoker.pilot.transfer.wire import join_address
from stoker.pilot.zygote.client import Zygote
from stoker.pilot.zygote.messages import Exited, Forked, ForkFailed, Preloaded

log = logging.getLogger("stoker.pilot")


def from_library(agent: Agent, library: Library) -> None:
    """Read what a library has said. Whatever goes wrong with that is the end of this library, never of the agent."""
    said, is_open = library.receive()
    try:
        for message in said:
            library.looks_idle = 0
            _message(agent, library, message)
    except Exception as error:
        log.exception("lib-%d: what it said cannot be handled", library.state.library)
        library.garbled = f"{type(error).__name__}: {error}"
    if library.garbled:
        agent.wires.unwatch(library)
        what = f"lib-{library.state.library} wrote bytes to its socket that are no message: {library.garbled}"
        if not library.told_to_end:
            log.warning("%s", what)
        ending.kill(agent, library, cause=failure_of(agent, library, FailureKind.DIED, what, printed=True))
    elif not is_open:
        # Its process has ended, or is about to: the zygote tells. If it only closed the socket, it is killed.
        agent.wires.unwatch(library)
        library.closed_at = library.closed_at or time.monotonic()


def _message(agent: Agent, library: Library, message: ToAgent) -> None:
    state, number, post = library.state, library.state.library, agent.link.post
    match message:
        case Ended(ends=ends):
            here = set(state.ended([end.call for end in ends]))
            told = ends if len(here) == len(ends) else [end for end in ends if end.call in here]
            told = payloads.hand_in(agent, library, told)
            if told:
                post(CallsEnded(number, told))
        case GivenBack(order=order) if 0 < order <= library.void_order:
            pass  # the calls may have been sent to it again since
        case GivenBack(calls=calls, need_function=need):
            library.asked_back_at = 0.0
            post(CallsReturned(number, tuple(state.returned(calls)), need_function=need))
        case Reports(reports=reports):
            post(CallsProgress(number, reports))
        case Evicted(progress=progress):
            if state.ended([progress.call]):  # it counts as served: the library counts it too
                post(CallEvicted(number, progress))
        case Listens(call=call, port=port):
            post(GangMeets(number, call, join_address(agent.objects.host, port)))
        case Hello(pid=pid):
            library.pid = pid
            library.hello_at = time.monotonic()
            if state.state is State.STARTING:
                state.move(State.LOADING)
                post(LibraryNews(number, LibraryPhase.LOADING))
        case Loaded():
            _loaded(agent, library, message)
        case LoadFailed(failure=failure):
            library.cause = library.cause or failure
        case SnapshotMade():
            snapshots.offered(agent, library, message)
        case Resized(device_memory_bytes=size):
            library.resizes = max(0, library.resizes - 1)
            try:
                if size >= 0:  # else its context refused
                    agent.ledger.resize(number, memory_bytes=size)
            except ValueError as error:
                log.warning("lib-%d: %s", number, error)
            post(LibraryResized(number, agent.ledger.held(number)))
        case _:
            assert_never(message)


def _loaded(agent: Agent, library: Library, message: Loaded) -> None:
    state = library.state
    if state.state is not State.LOADING:
        return
    state.move(State.READY)
    library.resident_bytes, library.ready_at = message.resident_bytes, time.monotonic()
    own = agent.devices_of(library)[0].facts.process_bytes
    if message.device_bytes:  # what torch holds; CUDA has taken more for the process
        library.device_bytes = max(library.device_bytes, message.device_bytes + own)
    ready = LibraryReady(
        library=state.library,
        start_s=library.hello_at - library.started_at,
        load_s=message.load_s,
        resident_bytes=message.resident_bytes,
        peak_bytes=message.peak_bytes,
        device_bytes=library.device_bytes,
        fetch_s=library.fetch_s,
    )
    log.info(
        "lib-%d (%s) ready: %.3f s to start, %.2f s to load",
        state.library,
        state.recipe.name,
        ready.start_s,
        ready.load_s,
    )
    agent.link.post(ready)
    _settle_reservation(agent, library)
    waiting, library.waiting = library.waiting, []
    for order in waiting:
        orders.pass_on(agent, library, order)


def _settle_reservation(agent: Agent, library: Library) -> None:
    """Where nothing was declared the reservation was a guess: hold what was measured, as far as there is room. What
    nobody has measured yet on a GPU stays a guess until its monitor has (see `device_memory`)."""
    needs = library.state.recipe.needs
    devices = agent.devices_of(library)
    on_cpu = not devices[0].cuda
    if needs.device_memory_bytes or (on_cpu and needs.memory_bytes):
        return
    number = library.state.library
    took = library.resident_bytes // len(devices) if on_cpu else library.device_bytes
    if not on_cpu and (not took or devices[0].facts.processes == 1):
        return
    room = min(agent.ledger.free(device.facts.device) for device in devices) + agent.ledger.held(number)
    agent.ledger.resize(number, memory_bytes=min(took, room))


def from_zygote(agent: Agent, zygote: Zygote) -> None:
    """Read what a zygote has said."""
    said = zygote.receive()
    if said is None:
        _zygote_died(agent, zygote)
        return
    for message in said:
        match message:
            case Preloaded(failed=failed, seconds=seconds, threads=threads, asked_for_gpus=asked):
                zygote.ready = True
                for module, why in failed.items():
                    log.warning("%s could not be preloaded, libraries import it themselves: %s", module, why)
                if threads > 1:
                    log.warning("%s started threads when imported: libraries start afresh", ", ".join(zygote.preload))
                if asked:
                    log.info("%s ask for GPUs when imported: on GPUs libraries start afresh", ", ".join(zygote.preload))
                log.info("zygote %d imported %s in %.2f s", zygote.pid, ", ".join(zygote.preload) or "itself", seconds)
            case Forked(library=number, pid=pid):
                library = agent.find(number)
                if library is not None:
                    library.pid = pid
            case ForkFailed(library=number, reason=reason):
                _ended(agent, zygote, number, cause=no_process(reason), ours=True)
            case Exited(library=number, orphans=orphans):
                if orphans:
                    log.warning("lib-%d left %d processes behind; they were killed", number, orphans)
                _ended(agent, zygote, number, exited=(message.signal, message.exit_code, message.peak_bytes))
            case _:
                assert_never(message)


def _ended(
    agent: Agent,
    zygote: Zygote,
    number: int,
    *,
    exited: tuple[int, int, int] | None = None,
    cause: str = "",
    ours: bool = False,
) -> None:
    """A library's process has ended, or could not be made; `ours`: for what this pilot lacks."""
    zygote.libraries.discard(number)
    library = agent.find(number)
    if library is None:
        return
    library.exited = exited
    from_library(agent, library)  # its last words
    if cause:
        library.cause = library.cause or load_failure(agent, library, cause, ours=ours)
    ending.finish(agent, library)


def _zygote_died(agent: Agent, zygote: Zygote) -> None:
    log.warning("zygote %d (%s) died", zygote.pid, ", ".join(zygote.preload) or "plain")
    agent.wires.unwatch(zygote)
    numbers = list(zygote.libraries)
    agent.zygotes.forget(zygote)
    what = f"importing {', '.join(zygote.preload)}" if zygote.preload and not zygote.ready else "serving"
    for number in numbers:
        _ended(
            agent,
            zygote,
            number,
            cause=f"the zygote that it is forked from died while {what}; see {zygote.log}",
        )
