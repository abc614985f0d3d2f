"""Heartbeats, and which of them tell something new.

A pilot is alive with each heartbeat; most say nothing else. The shell journals a heartbeat only if it tells something
new: the core then takes it as any event. No other heartbeat reaches the core, so a replay decides as the manager did.
Memory counts as new when it has moved by a sixteenth, so that a page more or less changes nothing.
"""

from __future__ import annotations

from stoker.manager.core import accounting, libraries
from stoker.manager.core.events import FromPilot
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Pilot
from stoker.manager.core.state import State
from stoker.protocol.to_manager import Heartbeat

_PART = 16
"""A memory measurement counts as new if it differs from the last one by a 16th of it,"""
_LEAST_BYTES = 16 << 20
"""and by at least this much."""
RECORD_S = 5.0
"""Costs of runs are recorded no more often than this."""


def is_heartbeat(event: FromPilot) -> bool:
    """True if a frame is one heartbeat that is not numbered: losing it loses no other frame."""
    return not event.sequence and len(event.messages) == 1 and type(event.messages[0]) is Heartbeat


def must_be_recorded(state: State, event: FromPilot, now: float) -> bool:
    """True if a heartbeat (see `is_heartbeat`) changes what the core knows, or runs are to be recorded with it."""
    pilot, message = state.pilots.get(event.pilot), event.messages[0]
    if pilot is None or type(message) is not Heartbeat:
        return False
    if state.unrecorded and now - state.recorded_at >= RECORD_S:
        return True
    if message.refused_frames != pilot.refused_frames or _moved(pilot.cache_bytes, message.cache_bytes):
        return True
    for use in message.libraries:
        library = pilot.libraries.get(use.library)
        if library is not None and (
            _moved(library.memory_bytes, use.memory_bytes) or _moved(library.device_bytes, use.device_bytes)
        ):
            return True
    return False


def _moved(before: int, after: int) -> bool:
    return before != after and abs(after - before) >= max(_LEAST_BYTES, before // _PART)


def take(manager: Manager, pilot: Pilot, message: Heartbeat) -> None:
    """A heartbeat that tells something new: what a pilot has measured."""
    pilot.cache_bytes = message.cache_bytes
    pilot.refused_frames = message.refused_frames
    for use in message.libraries:
        library = pilot.libraries.get(use.library)
        if library is not None:
            libraries.uses(library, memory_bytes=use.memory_bytes, device_bytes=use.device_bytes, now=manager.state.now)
    accounting.record_runs(manager)
