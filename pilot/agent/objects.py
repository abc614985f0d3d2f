"""Objects of the cache that are kept for libraries."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from stoker.contexts.recipe import ObjectRef
from stoker.pilot.agent.agent import Agent
from stoker.pilot.agent.errors import is_pilots_fault
from stoker.pilot.cache import Pin
from stoker.pilot.core.events import FetchFailure, Pinned
from stoker.protocol.ids import LibraryId


def pin(agent: Agent, library: LibraryId, refs: Sequence[ObjectRef]) -> None:
    """Keep those of these objects for a library that are in the cache."""
    arrived = agent.fetches.arrived
    if all(ref.name in arrived for ref in refs):
        _pinned(agent, library, {ref.name: arrived[ref.name].again() for ref in refs})
        return

    def find() -> None:
        found: dict[str, Pin] = {}
        try:
            for ref in refs:
                here = agent.cache.find(ref.name)
                if here is not None:
                    found[ref.name] = here
        except OSError as error:
            why = f"the object cache {agent.cache.folder} can't be used: {error}"
            lack = FetchFailure(why, is_pilots_fault=is_pilots_fault(error))
            agent.later(lambda: _failed(agent, library, lack))
            return
        agent.later(lambda: _pinned(agent, library, found))

    threading.Thread(target=find, name="objects-find", daemon=True).start()


def _failed(agent: Agent, library: LibraryId, lack: FetchFailure) -> None:
    agent.check_standing()
    agent.handle(Pinned(library, {}, lack))


def _pinned(agent: Agent, library: LibraryId, found: dict[str, Pin]) -> None:
    process = agent.processes.get(library)
    if process is None:  # it has ended meanwhile
        for one in found.values():
            one.release()
        return
    process.pins += found.values()
    agent.handle(Pinned(library, {name: one.path for name, one in found.items()}))
