from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from transfer.hosts import FaultyRelay, Link, until

from stoker.contexts.objects import make_object_ref, publish_objects
from stoker.pilot.starter import main
from stoker.pilot.starter.place import StartError
from stoker.pilot.transfer import meeting
from stoker.pilot.transfer.meeting import SeedMeetings
from stoker.pilot.transfer.seed import Seed
from stoker.pilot.transfer.server import MOST_PEERS

KEY = os.urandom(32)
SIZE = 32 << 20


class Session:
    """A session folder with a running seed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "keys").mkdir(parents=True)
        (folder / "objects").mkdir()
        (folder / "keys" / "transfer.json").write_text(json.dumps({"secret": KEY.hex()}))
        self.seed = Seed(folder / "objects").serve(key=KEY, host="127.0.0.1")
        (folder / "seed.address").write_text(self.seed.address)

    def has_sent(self, count: int) -> None:
        """Wait until the seed has counted `count` sent bytes, which the receiver may already have."""
        until(lambda: self.seed.sent_bytes >= count, what=f"{count} bytes of the seed")


@pytest.fixture
def session(tmp_path: Path):
    made = Session(tmp_path / "session")
    yield made
    made.seed.close()


@pytest.fixture
def packages(session: Session, tmp_path: Path) -> dict[str, object]:
    (tmp_path / "archive").write_bytes(os.urandom(SIZE))
    ref = make_object_ref(tmp_path / "archive", digest_cache_file=tmp_path / "memo")
    publish_objects(session.folder / "objects", (ref,))
    return {"name": ref.name, "size_bytes": ref.size_bytes, "source": str(tmp_path / "nowhere")}


class Starters:
    """Threads that each fetch the archive into a separate file."""

    def __init__(self, packages: dict[str, object], session: Session, folder: Path) -> None:
        self._packages, self._session, self._folder = packages, session, folder
        self._threads: list[threading.Thread] = []
        self._serving: list[main.SharedArchiveFetch] = []
        self.failures: list[Exception] = []

    def start(self, count: int) -> None:
        fresh = [self._thread(len(self._threads) + number) for number in range(count)]
        self._threads += fresh
        for thread in fresh:
            thread.start()

    def wait(self) -> None:
        for thread in self._threads:
            thread.join(120)
        assert not self.failures
        content = (self._folder / "archive").read_bytes()
        assert all(self._copy(number).read_bytes() == content for number in range(len(self._threads)))

    def close(self) -> None:
        while self._serving:
            self._serving.pop().close()

    def _thread(self, number: int) -> threading.Thread:
        def get() -> None:
            try:
                serving = main.get_environment_archive(self._packages, self._copy(number), session=self._session.folder)
                self._serving.append(serving)
            except Exception as error:
                self.failures.append(error)

        return threading.Thread(target=get)

    def _copy(self, number: int) -> Path:
        return self._folder / f"copy-{number}"


@pytest.fixture
def starters(packages: dict[str, object], session: Session, tmp_path: Path) -> Iterator[Starters]:
    made = Starters(packages, session, tmp_path)
    yield made
    made.close()


def test_later_starters_add_little_load_to_the_seed(session, starters: Starters):
    relay = FaultyRelay(session.seed.address, spoil=Link(bytes_per_s=24e6).carry)
    (session.folder / "seed.address").write_text(relay.source.address)
    starters.start(3)
    until(lambda: session.seed.sent_bytes > SIZE / 3, what="the first starters to receive data")
    starters.start(4)
    starters.wait()
    session.has_sent(SIZE)
    assert session.seed.sent_bytes <= 1.5 * SIZE
    relay.close()


@pytest.mark.parametrize("gone", ["exited", "unreachable"])
def test_starter_without_peers_gets_every_part_from_the_seed(
    session, packages, starters: Starters, gone: str, monkeypatch: pytest.MonkeyPatch
):
    """The seed withholds no part, although it assigned all parts to other starters."""
    starters.start(1)
    starters.wait()
    if gone == "exited":
        monkeypatch.setattr(meeting, "MISSED_REPORTS", 0.0)
    else:
        monkeypatch.setattr(meeting, "REPORTED_RESEND_S", 10_000.0)
        for port in (1, 2, 3):
            meeting.report_to_seed(
                packages["name"], f"127.0.0.1:{port}", have=b"\xff", again_s=60.0, seed=session.seed.address, key=KEY
            )
    starters.close()
    starters.start(1)
    starters.wait()
    session.has_sent(2 * SIZE)
    assert session.seed.sent_bytes == 2 * SIZE


def test_unchanged_archive_on_disk_is_used_without_a_seed(tmp_path: Path, packages):
    (tmp_path / "other").write_bytes(b"something else")
    bare = tmp_path / "bare"
    bare.mkdir()
    with pytest.raises(StartError, match="has changed"):
        main.get_environment_archive({**packages, "source": str(tmp_path / "other")}, tmp_path / "copy", session=bare)
    assert not (tmp_path / "copy").exists()
    main.get_environment_archive({**packages, "source": str(tmp_path / "archive")}, tmp_path / "copy", session=bare)
    assert (tmp_path / "copy").read_bytes() == (tmp_path / "archive").read_bytes()


def test_starters_learn_the_addresses_of_each_other(session: Session):
    def meet(address: str) -> set[str]:
        return set(meeting.report_to_seed("one", address, seed=session.seed.address, key=KEY))

    assert meet("10.0.0.1:5") == set()
    assert meet("10.0.0.2:5") == {"10.0.0.1:5"}
    assert meet("10.0.0.1:5") == {"10.0.0.2:5"}
    assert meeting.report_to_seed("other", "10.0.0.3:5", seed=session.seed.address, key=KEY) == []


# ---- peers named by the seed


def crowd(meetings: SeedMeetings, count: int) -> dict[str, list[str]]:
    """Let `count` addresses meet the seed 3 times; return the last answer for each address."""
    addresses = [f"10.0.0.{number}:5" for number in range(count)]
    return {address: meetings.record_report("one", address) for _ in range(3) for address in addresses}


def test_seed_names_a_peer_to_no_more_starters_than_it_can_serve():
    meetings = SeedMeetings()
    told = crowd(meetings, 50)
    assert all(len(others) == meeting.SOURCES_PER_ANSWER and address not in others for address, others in told.items())
    named = Counter(one for others in told.values() for one in others)
    assert max(named.values()) <= MOST_PEERS


def test_seed_names_the_same_peers_while_they_are_useful():
    meetings = SeedMeetings()
    told = crowd(meetings, 20)
    for address, others in told.items():
        assert meetings.record_report("one", address) == others
    address, (first, *rest) = next(iter(told.items()))
    others = meetings.record_report("one", address, lost=[first])
    assert first not in others
    assert set(rest) < set(others)
    assert meetings.record_report("one", address, wants=False) == []  # this address has the whole archive


def test_isolated_peers_learn_of_a_peer_with_more_parts():
    meetings = SeedMeetings()
    first = [f"10.0.0.{number}:5" for number in range(4)]
    for _ in range(2):
        for address in first:
            meetings.record_report("one", address, have=b"\x01")
    assert all(set(meetings.record_report("one", address, have=b"\x01")) == set(first) - {address} for address in first)
    meetings.record_report("one", "10.0.0.9:5", have=b"\x03")
    assert "10.0.0.9:5" in meetings.record_report("one", first[0], have=b"\x01")
    assert "10.0.0.9:5" not in meetings.record_report("one", first[1], have=b"\x03")


def test_part_assigned_to_a_living_peer_is_withheld():
    meetings = SeedMeetings()
    meetings.record_report("one", "10.0.0.1:5", have=b"\x02")
    assert meetings.resend_delay_s("one", 1, "10.0.0.1") == 0.0  # no other source exists
    meetings.record_report("one", "10.0.0.2:5")
    spared = [meetings.resend_delay_s("one", index, "10.0.0.2") for index in (0, 1)]
    assert spared == [meeting.UNREPORTED_RESEND_S, meeting.REPORTED_RESEND_S]
    assert meetings.resend_delay_s("other", 1, "10.0.0.2") == 0.0


def test_seed_withholds_no_part_from_a_starter_without_peers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(meeting, "_CHECK_S", 0.0)
    meetings = SeedMeetings()
    meetings.record_report("one", "10.0.0.1:5", have=b"\x02")
    meetings.record_report("one", "10.0.0.2:5", lost=["10.0.0.1:5"], alone=True)
    assert meetings.resend_delay_s("one", 1, "10.0.0.2") == 0.0
    assert meetings.resend_delay_s("one", 1, "10.0.0.1") == meeting.REPORTED_RESEND_S


def test_silent_peer_is_forgotten(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(meeting, "_CHECK_S", 0.0)
    meetings = SeedMeetings()
    meetings.record_report("one", "10.0.0.1:5", have=b"\x02", again_s=-1.0)
    assert meetings.record_report("one", "10.0.0.2:5") == []
    assert meetings.resend_delay_s("one", 1, "10.0.0.2") == 0.0
