"""Arguments and results over 1 MB, on a pilot that sees no file of its session: they travel through the session's seed.

Where the session's folder is seen a large payload is a file in it, and nothing is to be done.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from stoker.contexts.recipe import ObjectRef
from stoker.errors import StokerError
from stoker.pilot.agent.agent import Agent
from stoker.pilot.agent.errors import is_pilots_fault
from stoker.pilot.cache import Bringing, DiskError, Pin
from stoker.pilot.core.commands import BringArguments
from stoker.pilot.core.events import ArgumentsBrought, FetchFailure, HandedIn
from stoker.pilot.transfer.board import ObjectSource
from stoker.pilot.transfer.client import put
from stoker.protocol.calls import CallEnd, Failure, FailureKind
from stoker.protocol.ids import CallId, LibraryId

log = logging.getLogger("stoker.pilot")

_PAUSES_S = (0.5, 2.0, 5.0)
"""How long after a failure it is tried again: the seed may just be started anew."""


def bring(agent: Agent, command: BringArguments) -> None:
    """Have arguments of calls brought here, in a thread."""

    def run() -> None:
        pins: dict[CallId, Pin] = {}
        lacks: dict[CallId, FetchFailure] = {}
        for call, ref in command.wanted:
            try:
                pins[call] = _bring(agent, ref)
            except (StokerError, OSError) as error:
                what = f"its arguments could not be had from the session's seed: {error}"
                lacks[call] = FetchFailure(what, is_pilots_fault=is_pilots_fault(error))
        agent.later(lambda: _brought(agent, command, pins, lacks))

    threading.Thread(target=run, name="payloads-bring", daemon=True).start()


def release(agent: Agent, library: LibraryId, calls: Sequence[CallId]) -> None:
    """These calls have ended: their arguments may go."""
    process = agent.processes.get(library)
    for call in calls if process is not None else ():
        pin = process.arguments.pop(call, None) if process is not None else None
        if pin is not None:
            pin.release()


def hand_in(agent: Agent, library: LibraryId, ends: list[CallEnd]) -> None:
    """Bring large results to the session's seed, in a thread."""

    def run() -> None:
        done = [_hand_in(agent, library, end) for end in ends]
        agent.later(lambda: agent.handle(HandedIn(library, done)))

    threading.Thread(target=run, name="payloads-hand-in", daemon=True).start()


# ---- inside


def _brought(agent: Agent, command: BringArguments, pins: dict[CallId, Pin], lacks: dict[CallId, FetchFailure]) -> None:
    process = agent.processes.get(command.library)
    if process is None:  # it has ended meanwhile
        for pin in pins.values():
            pin.release()
        return
    process.arguments |= pins
    paths = {call: pin.path for call, pin in pins.items()}
    agent.handle(ArgumentsBrought(command.library, command.ticket, paths, lacks))


def _bring(agent: Agent, ref: ObjectRef) -> Pin:
    pauses = iter(_PAUSES_S)
    while True:
        here = agent.cache.find(ref.name)
        if here is not None:
            return here
        bringing = Bringing(agent.cache, ref, key=agent.peers.key)
        bringing.offer([ObjectSource(address=agent.peers.seed(), label="the session's seed", origin=True)])
        try:
            return bringing.run(alone_s=0.0)[0]
        except DiskError:
            raise
        except StokerError:
            pause = next(pauses, None)
            if pause is None:
                raise
            time.sleep(pause)


def _hand_in(agent: Agent, library: LibraryId, end: CallEnd) -> CallEnd:
    ref = end.payload
    if not isinstance(ref, ObjectRef):
        return end
    path, pauses = Path(ref.source), iter(_PAUSES_S)
    while True:
        try:
            with (
                path.open("rb") as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
                memoryview(data) as view,
            ):
                place = put(ref.name, [view], address=agent.peers.seed(), key=agent.peers.key)
            end = msgspec.structs.replace(end, payload=msgspec.structs.replace(ref, source=place))
            break
        except (StokerError, OSError) as error:
            pilot = agent.options.pilot
            what = f"its result of {ref.size_bytes} bytes could not be handed to the session's seed: {error}"
            log.warning("call %d: %s", end.call, what)
            pause = next(pauses, None)
            if pause is None:
                what, where = f"{what} (on {pilot})", str(agent.log_file(library))
                failure = Failure(FailureKind.SERIALIZATION, what, pilot=pilot, library=library, log=where)
                end = CallEnd(end.call, ok=False, run_s=end.run_s, failure=failure)
                break
            time.sleep(pause)
    path.unlink(missing_ok=True)
    return end
