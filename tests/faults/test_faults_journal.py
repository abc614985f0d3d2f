"""If the journal loses records in a host crash, the session continues and reports the loss."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from faults.world import count_lines, kill, note, until

import stoker
from stoker.manager.core.state import JOURNAL_LOST
from stoker.manager.live.records import MAGIC, DamagedPart, DecisionChecksums, SegmentHead, encode_record, read_records
from stoker.protocol.wire import VERSION

CALLS = 90


@stoker.context
def loaded(log):
    note(log, "loaded")
    return os.getpid()


class Work:
    """A session with `CALLS` calls, a third of which have ended."""

    def __init__(self, session, world, folder: Path) -> None:
        self.session, self.world, self.log = session, world, folder / "log"
        self.journal = session.folder / "journal"
        log = str(self.log)

        @stoker.app(context=loaded(log))
        def work(context, number):
            note(log, number)
            time.sleep(0.02)
            return number * number

        self.futures = [work(number) for number in range(CALLS)]
        until(lambda: sum(future.done() for future in self.futures) >= CALLS // 3, limit_s=60)
        until(lambda: all(each.hot == len(session.status().libraries) for each in session.status().contexts))
        self.loads = count_lines(self.log)["loaded"]

    @contextmanager
    def crash(self) -> Iterator[None]:
        """Kill the manager after the `with` block has changed its journal."""
        manager = self.world.manager()
        kill([manager], signal.SIGSTOP)
        yield
        kill([manager])

    def end(self) -> list[str]:
        """Check that each call ends once and that contexts stay loaded; return the notices."""
        assert [future.result(60) for future in self.futures] == [number * number for number in range(CALLS)]
        runs = count_lines(self.log)
        assert runs.pop("loaded") == self.loads, "the manager uses the libraries again"
        assert set(runs) == {str(number) for number in range(CALLS)}
        assert sum(count - 1 for count in runs.values()) <= CALLS // 3, "results that the client has are kept"
        status = self.session.status()
        assert (status.failed, status.cancelled, status.queued, status.running) == (0, 0, 0, 0)
        return [line.text for line in status.notices]


@pytest.fixture
def work(session, world, tmp_path) -> Work:
    return Work(session, world, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("keep", [0.5, 0.0])
def test_every_call_ends_once_after_the_journal_is_truncated(work, keep):
    with work.crash():
        os.truncate(work.journal, int(work.journal.stat().st_size * keep))
    assert JOURNAL_LOST in work.end()


def test_damaged_journal_record_loses_only_its_own_content(work):
    with work.crash():
        data = bytearray(work.journal.read_bytes())
        ends = [end for end, _, _ in read_records(work.journal)]
        for end in ends[len(ends) // 3 :: len(ends) // 3]:
            data[end - 4] ^= 0x10
        work.journal.write_bytes(data)
    assert [text for text in work.end() if "damaged" in text]
    assert [path for path in work.session.folder.glob("journal.damaged-*") if path.read_bytes() == data]


@pytest.mark.parametrize("version", ["0.0.9", f"{stoker.__version__} (protocol {VERSION - 1})"])
def test_journal_of_a_version_with_other_decisions_is_set_aside(work, version):
    with work.crash():
        other = bytearray(MAGIC)
        for _, now, record in read_records(work.journal):
            assert not isinstance(record, DamagedPart)
            if isinstance(record, SegmentHead):
                record = msgspec.structs.replace(record, stoker=version)
            elif isinstance(record, DecisionChecksums):
                record = msgspec.structs.replace(record, checks=bytes(byte ^ 1 for byte in record.checks))
            other += b"".join(encode_record(now, record))
        work.journal.write_bytes(other)
    assert [text for text in work.end() if "decides differently" in text and version in text]
    (aside,) = work.session.folder.glob("journal.aside-*")
    assert aside.read_bytes() == other
