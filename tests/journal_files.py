"""Read the events of journal files for comparisons in tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from stoker.manager.core.events import Event
from stoker.manager.live.records import DamagedPart, DecisionChecksums, SegmentHead, read_records


def read(path: Path) -> Iterator[tuple[float, Event]]:
    """Yield a file's undamaged events, oldest first. Raises SessionError if the file is not a journal."""
    for now, record in read_events_and_checks(path):
        if not isinstance(record, DecisionChecksums):
            yield now, record


def read_events_and_checks(path: Path) -> Iterator[tuple[float, Event | DecisionChecksums]]:
    """Yield the events of a file, and `DecisionChecksums` records with checksums of decisions about earlier events."""
    for _, now, record in read_records(path):
        if not isinstance(record, DamagedPart | SegmentHead):
            yield now, record
