from __future__ import annotations

import errno
import random
import zlib
from pathlib import Path

import journal_files
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from live.peers import Manager, Peers

from stoker.contexts.recipe import BARE
from stoker.errors import SessionError
from stoker.manager.core.events import (
    Event,
    FromClient,
    FromPilot,
    ManagerRestarted,
    Noticed,
    PilotCut,
    PilotLost,
    RecordsLost,
    TimerFired,
)
from stoker.manager.core.reactor import Core
from stoker.manager.live import journal, restore
from stoker.manager.live.decisions import decision_checksum
from stoker.manager.live.records import HEAD, MAGIC, DamagedPart, SegmentHead, numbered_segment_path, read_records
from stoker.manager.live.replay import verify_replay
from stoker.manager.live.restore import JournalReplay, restore_manager
from stoker.manager.policies import default_policies
from stoker.protocol import to_client, to_pilot, wire
from stoker.protocol import to_manager as say
from stoker.protocol.session import SessionFolder

# ---- journal


events: st.SearchStrategy[Event] = st.one_of(
    st.builds(PilotCut, st.text()), st.builds(PilotLost, st.text(), st.text()), st.builds(TimerFired, st.text())
)


@settings(max_examples=60, deadline=None)
@given(st.lists(events, max_size=8), st.integers(0, 400))
def test_truncation_at_any_byte_loses_only_later_records(
    tmp_path_factory: pytest.TempPathFactory, given: list[Event], cut: int
) -> None:
    path = tmp_path_factory.mktemp("journal") / "journal"
    book = journal.Journal(path)
    for now, event in enumerate(given):
        book.add_event(float(now), event)
    book.close()
    whole = path.read_bytes()
    path.write_bytes(whole[: max(0, len(whole) - cut)])
    kept = list(journal_files.read(path))
    assert kept == [(float(now), event) for now, event in enumerate(given)][: len(kept)]
    assert cut or len(kept) == len(given)
    again = journal.Journal(path)
    again.add_event(99.0, PilotCut("after"))
    again.close()
    assert list(journal_files.read(path)) == [*kept, (99.0, PilotCut("after"))]


def test_file_of_another_format_is_not_read_as_a_journal(path: Path) -> None:
    path.write_text("this is somebody's diary, not a journal")
    with pytest.raises(SessionError, match="not a journal"):
        list(journal_files.read(path))
    with pytest.raises(SessionError, match="not a journal"):
        journal.Journal(path)
    assert path.read_text().startswith("this is somebody")


# ---- written records


def test_heartbeats_without_news_are_not_written(manager: Manager, peers: Peers, folder: SessionFolder) -> None:
    client, pilot, stranger = peers("client"), peers("pilot"), peers("pilot", hello=False)
    pilot.hear(to_pilot.PilotWelcome)
    client.hear(to_client.ClientWelcome)

    def beat(**facts: int) -> int:
        before = client.sequence
        pilot.send(say.Heartbeat(**facts), numbered=False)  # type: ignore[arg-type]
        client.send(say.Received(0))  # its acknowledgement means that the journal has all events up to this event
        client.hear(to_client.Ack, where=lambda ack: ack.sequence > before)
        return sum(
            isinstance(message, say.Heartbeat)
            for _, event in journal_files.read(folder.journal)
            if isinstance(event, FromPilot)
            for message in event.messages
        )

    for _ in range(20):
        stranger.send(say.Heartbeat(), numbered=False)
        assert beat() == 0
    assert beat(refused_frames=2) == 1
    assert beat(refused_frames=2) == 1
    assert client.status().refused["frames refused by pilots"] == 2


# ---- damage


def written(path: Path, *, events: int = 40) -> list[tuple[float, Event]]:
    book = journal.Journal(path)
    given: list[tuple[float, Event]] = []
    for number in range(events):
        given.append((float(number), Noticed(f"event {number} " + "x" * (number * 7 % 50))))
        book.add_event(*given[-1])
        book.add_decision_checksum(0)
        book.flush()
    book.close()
    return given


def bounds(path: Path) -> list[tuple[int, int]]:
    out, start = [], len(MAGIC)
    for end, _, record in read_records(path):
        if isinstance(record, Noticed):
            out.append((start, end))
        start = end
    return out


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 39), st.floats(0, 0.999), st.integers(0, 7))
def test_flipped_bit_loses_one_record(
    tmp_path_factory: pytest.TempPathFactory, which: int, where: float, bit: int
) -> None:
    path = tmp_path_factory.mktemp("journal") / "journal"
    given = written(path)
    start, end = bounds(path)[which]
    data = bytearray(path.read_bytes())
    data[start + int(where * (end - start))] ^= 1 << bit
    path.write_bytes(data)
    assert list(journal_files.read(path)) == given[:which] + given[which + 1 :]
    past = JournalReplay(path)
    told = [record for _, record in past.read_journal() if isinstance(record, Noticed | RecordsLost)]
    if which < 39:  # damage 39 is after the last event, where the journal contains only checks
        assert [isinstance(record, RecordsLost) for record in told] == [n == which for n in range(40)]
    assert sum(damage.length for _, damage in past.damage) == end - start


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1_000_000), st.integers(1, 600), st.sampled_from(("zeros", "ones", "noise", "gone", "again")))
def test_journal_is_readable_and_writable_after_arbitrary_damage(
    tmp_path_factory: pytest.TempPathFactory, seed: int, length: int, how: str
) -> None:
    path = tmp_path_factory.mktemp("journal") / "journal"
    given = written(path)
    data, where = path.read_bytes(), bounds(path)
    chance = random.Random(seed)
    at = chance.randrange(len(MAGIC), len(data))
    part = {
        "zeros": bytes(length), "ones": b"\xff" * length, "noise": chance.randbytes(length), "gone": b"",
        "again": data[at - length if at > length else 0 : at],
    }[how]  # fmt: skip
    path.write_bytes(data[:at] + part + data[at + length :])
    read = list(journal_files.read(path))
    untouched = [each for each, (start, end) in zip(given, where, strict=True) if end <= at or start >= at + length]
    assert all(each in read for each in untouched)
    came = restore_manager(path, "test", default_policies())
    book = journal.Journal(path, end=came.end)
    book.add_event(99.0, TimerFired("after"))
    book.close()
    assert list(journal_files.read(path))[-1] == (99.0, TimerFired("after"))


@pytest.mark.parametrize(
    "body",
    [
        b"\x92\xcb" + bytes(8) + b"\x92\xa7noticed\xa2\xff\xfe",  # a text that is not UTF-8
        b"\x92\xcb" + bytes(8) + b"\x92\xa7noticed" + b"\x91" * 4000,  # nested more deeply than the reader accepts
        b"\x92\xcb" + bytes(8) + b"\x92\xa5later\x01",  # an event of a later version
        b"\x92\xcb" + bytes(8),
    ],
)
def test_undecodable_record_counts_as_damage(path: Path, body: bytes) -> None:
    given = written(path, events=3)
    data = path.read_bytes()
    at = bounds(path)[1][0]
    path.write_bytes(data[:at] + HEAD.pack(len(body), zlib.crc32(body)) + body + data[at:])
    assert list(journal_files.read(path)) == given
    assert [record.length for _, _, record in read_records(path) if isinstance(record, DamagedPart)] == [
        HEAD.size + len(body)
    ]


def damaged(folder: Path) -> Path:
    path = folder / "journal"
    written(path)
    data = bytearray(path.read_bytes())
    data[bounds(path)[5][0] + 12] ^= 1
    path.write_bytes(data)
    return path


def no_room(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def no_links(*_: object) -> None:
    raise OSError(errno.EOPNOTSUPP, "Operation not supported")


def test_damage_is_reported_and_its_file_kept(tmp_path: Path) -> None:
    path = damaged(tmp_path)
    data = path.read_bytes()
    came = restore_manager(path, "test", default_policies())
    assert came.core is not None
    assert came.compact
    (notice,) = came.notices
    assert "damaged" in notice
    (copy,) = tmp_path.glob("journal.damaged-*")
    assert copy.name in notice
    assert copy.read_bytes() == data
    assert restore_manager(path, "test", default_policies()).notices == [], "the damage is reported once"


def test_last_three_journals_that_were_put_aside_are_kept(path: Path) -> None:
    for number in range(1, 6):
        for name in ("", "-000001", "-000002-snapshot"):
            path.with_name(f"journal.aside-2020010{number}-000000{name}").touch()
    book = journal.Journal(path)
    book.add_event(1.0, TimerFired("a"))
    book.begin_segment()
    book.close()
    numbered_segment_path(path, 1).unlink()
    assert "lacks the beginning" in restore_manager(path, "test", default_policies()).notices[0]
    stamps = [kept.name[14:22] for kept in sorted(path.parent.glob("journal.aside-*"))]
    assert stamps[:-1] == ["20200104"] * 3 + ["20200105"] * 3


def test_damaged_file_is_kept_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = damaged(tmp_path)
    before = path.read_bytes()
    monkeypatch.setattr(restore.shutil, "copyfile", no_room)
    came = restore_manager(path, "test", default_policies())
    journal.Journal(path, end=came.end).close()
    (kept,) = tmp_path.glob("journal.damaged-*")
    assert kept.read_bytes() == before, "nothing more is written to the journal"
    assert [kept.name in notice for notice in came.notices] == [True]


def test_notice_says_that_a_damaged_file_was_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = damaged(tmp_path)
    monkeypatch.setattr(Path, "hardlink_to", no_links)
    with monkeypatch.context() as full:
        full.setattr(restore.shutil, "copyfile", no_room)
        (notice,) = restore_manager(path, "test", default_policies()).notices
    assert notice.endswith("the damaged file could not be kept: No space left on device")
    assert not list(tmp_path.glob("journal.damaged-*")), "no incomplete copy"
    (notice,) = restore_manager(path, "test", default_policies()).notices
    (kept,) = tmp_path.glob("journal.damaged-*")
    assert notice.endswith(f"is kept as {kept.name}"), "the next manager tries again"


def test_damaged_and_truncated_file_replays_equally_each_time(tmp_path: Path) -> None:
    path = damaged(tmp_path)
    path.write_bytes(path.read_bytes()[:-5])
    for _ in range(3):
        came = restore_manager(path, "test", default_policies())
        assert came.core.state.refused == {"damaged records of the journal": 1}
        book = journal.Journal(path, end=came.end)
        book.add_event(100.0, Noticed("later"))
        book.close()


def test_damaged_last_record_of_full_length_counts_as_lost(path: Path) -> None:
    written(path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    came = restore_manager(path, "test", default_policies())
    assert came.lost > 0
    assert [list(JournalReplay(path).read_journal())[-1][1].__class__, len(came.notices)] == [RecordsLost, 1]


class Managed:
    """A journal with events and checks of decisions, like journals of managers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.core = Core("test", default_policies())
        self.core.start()
        self.book = journal.Journal(path)
        self.now = 0.0

    def give(self, event: Event, *, wrong: bool = False) -> None:
        self.now += 1.0
        self.book.add_event(self.now, event)
        self.book.add_decision_checksum(decision_checksum(self.core.handle(event, self.now)) + wrong)
        self.book.flush()

    def hello(self, client: str, *, wrong: bool = False) -> None:
        self.give(FromClient(client, 0, [say.ClientHello(wire.VERSION, "test")]), wrong=wrong)  # type: ignore[arg-type]

    def damage(self, word: bytes) -> None:
        with self.path.open("r+b") as file:
            at = file.read().index(word)
            file.seek(at)
            file.write(b"?")

    def restart(self) -> list[str]:
        self.book.close()
        came = restore_manager(self.path, "test", default_policies())
        self.core, self.book = came.core, journal.Journal(self.path, end=came.end)
        self.give(ManagerRestarted(came.lost))
        return came.notices


@pytest.mark.parametrize("record", [b"client-hello", b"decided"])
def test_damaged_record_does_not_shift_the_replay_comparison(path: Path, record: bytes) -> None:
    live = Managed(path)
    live.hello("ana")
    live.hello("bob")
    assert live.restart() == []
    live.hello("carl")
    live.damage(record)
    (notice,) = live.restart()
    assert "damaged" in notice
    live.hello("dora")
    assert live.restart() == [], "decisions before the damage are compared again"
    assert verify_replay(path, session="test", policies=default_policies()).difference is None
    live.hello("emil", wrong=True)
    (notice,) = live.restart()
    assert "a replay decides differently" in notice


def test_truncated_record_is_not_reported_as_damage(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    written(path)
    path.write_bytes(path.read_bytes()[:-5])
    came = restore_manager(path, "test", default_policies())
    assert came.notices == []
    assert list(tmp_path.glob("journal.damaged-*")) == []


@pytest.mark.parametrize("spoilt", ["a bit of the first line", "the first line and the head", "the first page"])
def test_damaged_beginning_loses_its_content_but_not_the_session(path: Path, spoilt: str) -> None:
    given = written(path, events=400)
    data = bytearray(path.read_bytes())
    if spoilt == "a bit of the first line":
        data[3] ^= 4
    else:
        size = 4096 if spoilt == "the first page" else len(MAGIC) + 40
        data[:size] = bytes(size)
    path.write_bytes(data)
    here = list(journal_files.read(path))
    assert here
    assert here == given[-len(here) :]
    assert (len(here) < len(given)) is (spoilt == "the first page")
    came = restore_manager(path, "test", default_policies())
    assert list(came.core.state.notices)[-1].startswith(here[-1][1].text)
    assert any("damaged" in notice for notice in came.notices)
    assert came.lost > 0
    assert abs(came.core.state.started_at - here[0][0]) <= 1.0


def test_session_continues_after_its_journal_became_zero_bytes(path: Path) -> None:
    written(path)
    path.write_bytes(bytes(path.stat().st_size))
    written_at = path.stat().st_mtime
    came = restore_manager(path, "test", default_policies())
    assert came.lost > 0
    assert came.core.state.started_at == written_at
    book = journal.Journal(path, end=came.end)
    book.add_event(1.0, Noticed("it goes on"))
    book.flush()
    book.close()
    assert [event for _, event in journal_files.read(path)] == [Noticed("it goes on")]


def test_damaged_journal_file_after_the_file_in_use_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    written(path)
    (tmp_path / "journal.000009").write_bytes(bytes(4096))  # this number follows the number of the file in use
    came = restore_manager(path, "test", default_policies())
    assert (came.lost, came.notices) == (0, [])


def test_journal_of_another_version_is_refused(path: Path) -> None:
    written(path)
    path.write_bytes(b"stoker journal 3\n" + path.read_bytes()[len(MAGIC) :])
    with pytest.raises(SessionError, match="not a journal of this version"):
        restore_manager(path, "test", default_policies())


def test_client_frames_after_a_lost_record_are_accepted(path: Path) -> None:
    book = journal.Journal(path)
    book.add_event(0.0, FromClient("ana", 0, [say.ClientHello(wire.VERSION, "test")]))  # type: ignore[arg-type]
    for number in range(1, 6):
        recipe = say.DefineRecipe(BARE) if number == 1 else say.DefineFunction(f"f{number}", "f", b"code")  # type: ignore[arg-type]
        book.add_event(float(number), FromClient("ana", number, [recipe]))  # type: ignore[arg-type]
    book.close()
    ends = [end for end, _, record in read_records(path) if not isinstance(record, SegmentHead)]
    data = bytearray(path.read_bytes())
    data[ends[2] - 3] ^= 1  # this byte is in the definition of f2
    path.write_bytes(data)
    core = restore_manager(path, "test", default_policies()).core
    assert list(core.state.functions) == ["f3", "f4", "f5"]
    assert core.state.clients["ana"].inbox.last == 5  # type: ignore[index]
    assert core.state.clients["ana"].inbox.lost_handled_frames  # type: ignore[index]
