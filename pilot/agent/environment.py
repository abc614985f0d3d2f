"""Hands on the archive of the environment that this pilot runs in: to its own host's cache, and to pilots that start.

Those have no manager yet to plan for them; they hear at the session's seed who has the archive, if that pilot has said
so.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import suppress

from stoker.contexts.recipe import ObjectRef
from stoker.errors import StokerError
from stoker.pilot.agent.agent import Agent
from stoker.pilot.cache import Bringing
from stoker.pilot.transfer.board import ObjectSource
from stoker.pilot.transfer.meeting import meet
from stoker.pilot.transfer.wire import PeerError

log = logging.getLogger("stoker.pilot")

_SAID_S = 60.0
"""How often a pilot says that it has the archive."""


def hand_on(agent: Agent, archive: str) -> None:
    """Begin, in a thread of its own. `archive` is `NAME=FILE`; empty: the environment did not travel."""
    name, _, path = archive.partition("=")
    if name:
        threading.Thread(target=_hand_on, args=(agent, name, path), name="environment", daemon=True).start()


def _hand_on(agent: Agent, name: str, path: str) -> None:
    try:
        if os.path.exists(path):  # else another pilot of this host has handed it over already
            facts = os.stat(path)
            ref = ObjectRef(name, facts.st_size, path, changed_ns=facts.st_mtime_ns, inode=facts.st_ino)
            bringing = Bringing(agent.cache, ref, key=agent.peers.key)
            bringing.offer([ObjectSource(path=path, origin=True)])
            bringing.run(alone_s=0.0)[0].release()
            os.unlink(path)  # from now on the cache decides how long it stays
    except FileNotFoundError:
        pass
    except (StokerError, OSError) as error:
        log.warning("the environment is not handed on: %s", error)
        return
    while name in agent.cache.sizes():
        seed = agent.peers.seed()
        if seed and agent.peers.address:
            with suppress(PeerError):  # the next time, then
                meet(name, agent.peers.address, wants=False, again_s=_SAID_S, seed=seed, key=agent.peers.key)
        time.sleep(_SAID_S)
