"""If the journal loses its last records in a host crash, the session continues and reports the loss."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import msgspec
import pytest
from faults.world import count_lines, kill, note, until

import stoker
from stoker.manager.core.state import JOURNAL_LOST
from stoker.manager.live.records import MAGIC, Damage, Decided, SegmentHead, encoded, scan
from stoker.protocol.wire import VERSION

# ---- lost ends


CALLS = 120


@stoker.context
def loaded(log):
    note(log, "loaded")
    return os.getpid()


def cut_journal(world, journal: Path, *, keep: float) -> None:
    """Kill the manager and keep only this share of its journal."""
    manager = world.manager()
    kill([manager], signal.SIGSTOP)
    os.truncate(journal, int(journal.stat().st_size * keep))
    kill([manager])


@pytest.mark.long
@pytest.mark.parametrize("keep", [0.5, 0.0])
def test_every_call_ends_once_and_contexts_stay_hot(session, world, tmp_path, keep):
    log = str(tmp_path / "log")

    @stoker.app(context=loaded(log))
    def work(context, number):
        note(log, number)
        time.sleep(0.02)
        return number * number

    futures = [work(number) for number in range(CALLS)]
    until(lambda: sum(future.done() for future in futures) >= CALLS // 3, limit_s=60)
    until(lambda: all(each.hot == len(session.status().libraries) for each in session.status().contexts))
    loads = count_lines(tmp_path / "log")["loaded"]
    cut_journal(world, session.folder / "journal", keep=keep)
    assert [future.result(60) for future in futures] == [number * number for number in range(CALLS)]
    assert work(7).result(60) == 49
    runs = count_lines(tmp_path / "log")
    assert runs.pop("loaded") == loads, "the manager uses the libraries again"
    assert set(runs) == {str(number) for number in range(CALLS)}
    again = sum(count - 1 for count in runs.values()) - 1  # subtract one because call 7 was submitted twice
    assert again <= CALLS // 3, "results that the client has are not computed again"
    status = session.status()
    assert (status.failed, status.cancelled, status.queued, status.running) == (0, 0, 0, 0)
    assert JOURNAL_LOST in [line.text for line in status.notices]


# ---- damage


DAMAGE_CALLS = 90


def stopped(world):
    manager = world.manager()
    kill([manager], signal.SIGSTOP)
    return manager


def work_on(log):
    @stoker.app(context=loaded(log))
    def work(context, number):
        note(log, number)
        time.sleep(0.02)
        return number * number

    return [work(number) for number in range(DAMAGE_CALLS)]


def some_are_done(futures, session):
    until(lambda: sum(future.done() for future in futures) >= DAMAGE_CALLS // 3, limit_s=60)
    until(lambda: all(each.hot == len(session.status().libraries) for each in session.status().contexts))


def all_end_once(futures, session, log, *, again):
    assert [future.result(60) for future in futures] == [number * number for number in range(DAMAGE_CALLS)]
    runs = count_lines(log)
    runs.pop("loaded")
    assert set(runs) == {str(number) for number in range(DAMAGE_CALLS)}
    assert sum(count - 1 for count in runs.values()) <= again, "ended calls do not run again"
    status = session.status()
    assert (status.failed, status.cancelled, status.queued, status.running) == (0, 0, 0, 0)
    return [line.text for line in status.notices]


def test_damaged_journal_record_loses_only_its_own_content(session, world, tmp_path):
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
    notices = all_end_once(futures, session, log, again=DAMAGE_CALLS // 3)
    assert [text for text in notices if "damaged" in text]
    assert [path for path in Path(session.folder).glob("journal.damaged-*") if path.read_bytes() == data]


@pytest.mark.parametrize("version", ["0.0.9", f"{stoker.__version__} (protocol {VERSION - 1})"])
def test_version_with_other_decisions_starts_from_certain_facts(session, world, tmp_path, version):
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
    notices = all_end_once(futures, session, log, again=DAMAGE_CALLS // 3)
    assert [text for text in notices if "decides differently" in text and version in text]
    (aside,) = Path(session.folder).glob("journal.aside-*")
    assert aside.read_bytes() == other
