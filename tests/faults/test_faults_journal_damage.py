"""A journal is damaged in its middle, or another version of Stoker comes back from it: each call ends, and once."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import msgspec
import pytest
from faults.world import count_lines, kill, note, until

import stoker
from stoker.manager.live.records import MAGIC, Damage, Decided, SegmentHead, encoded, scan
from stoker.protocol.wire import VERSION

CALLS = 90


@stoker.context
def loaded(log):
    note(log, "loaded")
    return os.getpid()


def stopped(world):
    """The manager, which does nothing more."""
    manager = world.manager()
    kill([manager], signal.SIGSTOP)
    return manager


def work_on(log):
    @stoker.app(context=loaded(log))
    def work(context, number):
        note(log, number)
        time.sleep(0.02)
        return number * number

    return [work(number) for number in range(CALLS)]


def some_are_done(futures, session):
    until(lambda: sum(future.done() for future in futures) >= CALLS // 3, limit_s=60)
    until(lambda: all(each.hot == len(session.status().libraries) for each in session.status().contexts))


def all_end_once(futures, session, log, *, again):
    assert [future.result(60) for future in futures] == [number * number for number in range(CALLS)]
    runs = count_lines(log)
    runs.pop("loaded")
    assert set(runs) == {str(number) for number in range(CALLS)}
    assert sum(count - 1 for count in runs.values()) <= again, "what has ended is not run again"
    status = session.status()
    assert (status.failed, status.cancelled, status.queued, status.running) == (0, 0, 0, 0)
    return [line.text for line in status.notices]


def test_a_damaged_record_costs_what_it_said(session, world, tmp_path):
    log, journal = tmp_path / "log", session.folder / "journal"
    futures = work_on(str(log))
    some_are_done(futures, session)
    manager = stopped(world)
    data = bytearray(journal.read_bytes())
    ends = [end for end, _, _ in scan(journal)]
    for end in ends[len(ends) // 3 :: len(ends) // 3]:
        data[end - 4] ^= 0x10
    journal.write_bytes(data)
    kill([manager])
    notices = all_end_once(futures, session, log, again=CALLS // 3)
    assert [text for text in notices if "damaged" in text]
    assert [path for path in Path(session.folder).glob("journal.damaged-*") if path.read_bytes() == data]


@pytest.mark.parametrize("version", ["0.0.9", f"{stoker.__version__} (protocol {VERSION - 1})"])
def test_a_version_that_decides_otherwise_begins_with_what_is_certain(session, world, tmp_path, version):
    log, journal = tmp_path / "log", session.folder / "journal"
    futures = work_on(str(log))
    some_are_done(futures, session)
    manager = stopped(world)
    other = bytearray(MAGIC)
    for _, now, record in scan(journal):
        assert not isinstance(record, Damage)
        if isinstance(record, SegmentHead):
            record = msgspec.structs.replace(record, stoker=version)
        elif isinstance(record, Decided):
            record = msgspec.structs.replace(record, checks=bytes(byte ^ 1 for byte in record.checks))
        other += b"".join(encoded(now, record))
    journal.write_bytes(other)
    kill([manager])
    notices = all_end_once(futures, session, log, again=CALLS // 3)
    assert [text for text in notices if "decides otherwise" in text and version in text]
    (aside,) = Path(session.folder).glob("journal.aside-*")
    assert aside.read_bytes() == other
