"""From the order to start a library to its context being loaded."""

from __future__ import annotations

import logging
import shutil
import time

from stoker.contexts.recipe import Awareness, Recipe
from stoker.manager.protocol.calls import Failure, FailureKind
from stoker.manager.protocol.to_library import Load
from stoker.manager.protocol.to_manager import LibraryGone, LibraryNews, LibraryPhase
from stoker.manager.protocol.to_pilot import StartLibrary
from stoker.pilot.agent import ending, objects, snapshots, standing
from stoker.pilot.agent.agent import Agent
from stoker.pilot.agent.failures import is_ours, lacks_processes, load_failure, no_process
from stoker.pilot.agent.library import Library
from stoker.pilot.cache import Pin, disk
from stoker.pilot.core.library import State
from stoker.pilot.devices import visible
from stoker.pilot.library import frames
from stoker.pilot.library import settings as library_settings
from stoker.pilot.zygote.messages import Fork
from stoker.units import show_bytes

log = logging.getLogger("stoker.pilot")

_ENTRY = "stoker.pilot.library.main:serve"


def order(agent: Agent, message: StartLibrary) -> None:
    """Start a library, or say why not."""
    number = message.library
    agent.last_library = max(agent.last_library, number)
    if number in agent.libraries or number in agent.gone:
        return  # said twice
    kind, reason = FailureKind.CONTEXT, f"the pilot is leaving: {agent.leaving}" if agent.leaving else ""
    if not reason and (reason := _lacks_disk(agent, message)):
        kind = FailureKind.PILOT
        agent.link.post(LibraryNews(library=number, phase=LibraryPhase.FETCHING))  # this context alone does not fit
    try:
        if not reason:
            agent.ledger.reserve(number, devices=message.devices, memory_bytes=message.device_memory_bytes)
            folder = agent.scratch.library(number)
    except ValueError as error:
        reason = str(error)
    except OSError as error:
        agent.ledger.release(number)
        standing.cannot_make(agent, error)
        kind = FailureKind.PILOT
        reason = (
            f"{agent.options.pilot} can make no folder for a library: {error}; make room there, or give [pilot] scratch"
            " another disk"
        )
    if reason:
        log.warning("lib-%d refused: %s", number, reason)
        failure = Failure(kind=kind, message=reason, pilot=agent.options.pilot, library=number)
        agent.link.post(LibraryGone(library=number, failure=None if agent.leaving else failure, loading=True))
        return
    library = Library(message, folder=folder, log=str(agent.log_file(number)))
    agent.libraries[number] = library
    recipe = message.recipe
    from_sources = recipe.awareness is Awareness.NONE and not agent.objects.carried
    if (recipe.objects and not from_sources) or message.snapshots:
        agent.link.post(LibraryNews(library=number, phase=LibraryPhase.FETCHING))
    if recipe.objects and not from_sources and (reason := _exceeds_cache(agent, recipe)):
        _fetched(agent, library, {}, objects.Lack(reason, ours=True))
    elif recipe.objects and not from_sources:
        objects.bring(agent, recipe.objects, lambda pins, lack: _fetched(agent, library, pins, lack))
    elif changed := [ref for ref in recipe.objects if disk.was_changed(ref)]:
        reason = f"{changed[0].source} was written to since the recipe was made from it; make the recipe again"
        _fetched(agent, library, {}, objects.Lack(reason, ours=False))
    else:
        _have_snapshots(agent, library, {ref.name: ref.source for ref in recipe.objects})


def _lacks_disk(agent: Agent, message: StartLibrary) -> str:
    """Why a context's need of disk is not met here; empty if it is, or it has none."""
    needed = message.recipe.needs.disk_bytes
    free = shutil.disk_usage(agent.scratch.path).free if needed else 0
    if free >= needed:
        return ""
    return (
        f"{agent.options.pilot} has {show_bytes(free)} free on its scratch disk, and {message.recipe.name} wants "
        f"{show_bytes(needed)} (@context(disk=...)); make room there, or give [pilot] scratch another disk"
    )


def _exceeds_cache(agent: Agent, recipe: Recipe) -> str:
    """Why the objects of a context can never be here together; empty if they can."""
    sizes = {ref.name: ref.size_bytes for ref in recipe.objects}
    size, bound = sum(sizes.values()), agent.cache.bound_bytes
    if size <= bound or len(sizes) == 1:  # of a single one the cache says which it is
        return ""
    return (
        f"its files ({show_bytes(size)}) are larger than the whole cache ({show_bytes(bound)}); give pilots more with"
        " [pilot] cache_size (--cache-size)"
    )


def _fetched(agent: Agent, library: Library, pins: dict[str, Pin], lack: objects.Lack | None) -> None:
    """Its objects are here, or will not come."""
    if lack is not None and library.state.state is State.FETCHING:
        library.cause = load_failure(agent, library, lack.reason, ours=lack.ours)
        if lack.in_use:
            library.cache_lacks_bytes = agent.cache.lacks_bytes(library.state.recipe.objects)
        ending.finish(agent, library)
    elif _takes(library, pins):
        _have_snapshots(agent, library, {name: pin.path for name, pin in pins.items()})


def _have_snapshots(agent: Agent, library: Library, paths: dict[str, str]) -> None:
    """Forms of its context that load faster, as far as they are worth the wait; then it starts."""

    def brought(pins: dict[str, Pin]) -> None:
        if _takes(library, pins):
            library.fetch_s = time.monotonic() - library.ordered_at if library.pins else 0.0
            start(agent, library, {**paths, **{form: pin.path for form, pin in pins.items()}})

    snapshots.bring(agent, library.order, brought)


def _takes(library: Library, pins: dict[str, Pin]) -> bool:
    """Keep what has come for a library as long as it lives; False, and nothing is kept, if it does no more."""
    if library.state.state is not State.FETCHING:
        for pin in pins.values():
            pin.release()
        return False
    library.pins += pins.values()
    return True


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
        host=agent.objects.host,
        gang_key=agent.objects.gang_key,
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
        ours = is_ours(error) or lacks_processes(error)
        what = no_process(error) if lacks_processes(error) else f"its process could not be started: {error}"
        library.cause = load_failure(agent, library, what, ours=ours)
        ending.finish(agent, library)
        return
    library.zygote = zygote
    library.send_bytes(frames.pack_raw(library_settings.encode(settings)))
    library.send([Load(recipe=recipe, devices=tuple(library.state.devices), objects=objects)])
    agent.wires.watch(library)
