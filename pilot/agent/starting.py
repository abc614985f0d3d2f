"""From the order to start a library to its context being loaded."""

from __future__ import annotations

import logging
import threading
import time

from stoker.contexts.recipe import Awareness
from stoker.errors import StokerError
from stoker.manager.protocol.calls import Failure, FailureKind
from stoker.manager.protocol.to_library import Load
from stoker.manager.protocol.to_manager import LibraryGone, LibraryNews, LibraryPhase
from stoker.manager.protocol.to_pilot import StartLibrary
from stoker.pilot.agent import ending
from stoker.pilot.agent.agent import Agent
from stoker.pilot.agent.library import Library
from stoker.pilot.cache import Pin
from stoker.pilot.core.library import State
from stoker.pilot.devices import visible
from stoker.pilot.library import frames
from stoker.pilot.library import settings as library_settings
from stoker.pilot.zygote.messages import Fork

log = logging.getLogger("stoker.pilot")

_ENTRY = "stoker.pilot.library.main:serve"


def order(agent: Agent, message: StartLibrary) -> None:
    """Start a library, or say why not."""
    number = message.library
    if number in agent.libraries or number in agent.gone:
        return  # said twice
    reason = f"the pilot is leaving: {agent.leaving}" if agent.leaving else ""
    try:
        if not reason:
            agent.ledger.reserve(number, devices=message.devices, memory_bytes=message.device_memory_bytes)
            folder = agent.scratch.library(number)
    except ValueError as error:
        reason = str(error)
    except OSError as error:
        agent.ledger.release(number)
        reason = f"no folder for it could be made: {error}"
    if reason:
        log.warning("lib-%d refused: %s", number, reason)
        failure = Failure(
            kind=FailureKind.CONTEXT, message=reason, pilot=agent.options.pilot, library=number
        )  # fmt: skip
        agent.link.post(LibraryGone(library=number, failure=None if agent.leaving else failure, loading=True))
        return
    library = Library(message, folder=folder, log=str(agent.log_file(number)))
    agent.libraries[number] = library
    recipe = message.recipe
    if recipe.objects and recipe.awareness is not Awareness.NONE:
        agent.link.post(LibraryNews(library=number, phase=LibraryPhase.FETCHING))
        threading.Thread(target=_fetch, args=(agent, library), name=f"fetch-{number}", daemon=True).start()
    else:
        start(agent, library, {ref.name: ref.source for ref in recipe.objects})


def _fetch(agent: Agent, library: Library) -> None:
    """In a thread of its own: bring the objects into the cache and pin them there."""
    started = time.monotonic()
    pins: list[Pin] = []
    failure = ""
    try:
        for ref in library.state.recipe.objects:
            pins.append(agent.cache.pin(ref))  # noqa: PERF401  # those before a failure must be released
    except (StokerError, OSError) as error:
        failure = str(error)
    agent.later(lambda: _fetched(agent, library, pins, failure, time.monotonic() - started))


def _fetched(agent: Agent, library: Library, pins: list[Pin], failure: str, seconds: float) -> None:
    if library.state.state is not State.FETCHING or failure:
        for pin in pins:
            pin.release()
        if library.state.state is State.FETCHING:
            library.cause = _context_failure(agent, library, failure)
            ending.finish(agent, library)
        return
    library.pins = pins
    library.fetch_s = seconds
    refs = library.state.recipe.objects
    start(agent, library, {ref.name: pin.path for ref, pin in zip(refs, pins, strict=True)})


def start(agent: Agent, library: Library, objects: dict[str, str]) -> None:
    """Have the zygote make its process."""
    number, recipe = library.state.library, library.state.recipe
    library.state.move(State.STARTING)
    library.started_at = time.monotonic()
    agent.link.post(LibraryNews(library=number, phase=LibraryPhase.STARTING))
    devices = agent.devices_of(library)
    cores = tuple(dict.fromkeys(core for device in devices for core in device.cores))
    settings = library_settings.Settings(
        pilot=agent.options.pilot,
        library=number,
        folder=str(library.folder),
        log=library.log,
        objects=str(agent.session.objects),
        search_path=agent.search_path,
    )
    fork = Fork(
        library=number,
        entry=_ENTRY,
        log=library.log,
        folder=str(library.folder),
        environment={**visible(devices), "STOKER_LIBRARY": str(number), "STOKER_PILOT": agent.options.pilot},
        cores=cores,
        threads=max(1, len(cores)),
        fresh=recipe.awareness is not Awareness.FULL,
    )
    theirs = library.connect()
    try:
        zygote, fresh = agent.zygotes.get(() if fork.fresh else recipe.preload)
        if fresh:
            agent.wires.watch(zygote)
        zygote.fork(fork, theirs)
    except OSError as error:
        library.cause = _context_failure(agent, library, f"its process could not be started: {error}")
        ending.finish(agent, library)
        return
    library.zygote = zygote
    library.send_bytes(frames.pack_raw(library_settings.encode(settings)))
    library.send([Load(recipe=recipe, devices=tuple(library.state.devices), objects=objects)])
    agent.wires.watch(library)


def _context_failure(agent: Agent, library: Library, message: str) -> Failure:
    return Failure(
        kind=FailureKind.CONTEXT,
        message=f"{library.state.recipe.name} on {agent.options.pilot}: {message}",
        pilot=agent.options.pilot,
        library=library.state.library,
        log=library.log,
    )
