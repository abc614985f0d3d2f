"""Read the events of journal files for comparisons in tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from stoker.manager.core.events import Event
from stoker.manager.live.records import Damage, Decided, SegmentHead, scan


def read(path: Path) -> Iterator[tuple[float, Event]]:
    """Yield a file's undamaged events, oldest first. Raises SessionError if the file is not a journal."""
    for now, record in read_events_and_checks(path):
        if not isinstance(record, Decided):
            yield now, record


def read_events_and_checks(path: Path) -> Iterator[tuple[float, Event | Decided]]:
    """Yield the events of a file, and `Decided` records with checksums of the decisions about earlier events."""
    for _, now, record in scan(path):
        if not isinstance(record, Damage | SegmentHead):
            yield now, record
