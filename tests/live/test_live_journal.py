"""The journal keeps what it was given up to any point where a crash may cut it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from live.peers import Manager, Peer

from stoker.errors import SessionError
from stoker.manager.core.events import Event, FromPilot, PilotCut, PilotLost, TimerFired
from stoker.manager.live import journal
from stoker.protocol import to_client, to_pilot
from stoker.protocol import to_manager as say
from stoker.protocol.session import SessionFolder

events: st.SearchStrategy[Event] = st.one_of(
    st.builds(PilotCut, st.text()), st.builds(PilotLost, st.text(), st.text()), st.builds(TimerFired, st.text())
)


@settings(max_examples=60, deadline=None)
@given(st.lists(events, max_size=8), st.integers(0, 400))
def test_any_cut_loses_only_what_comes_after_it(
    tmp_path_factory: pytest.TempPathFactory, given: list[Event], cut: int
) -> None:
    path = tmp_path_factory.mktemp("journal") / "journal"
    book = journal.Journal(path)
    for now, event in enumerate(given):
        book.write(float(now), event)
    book.close()
    whole = path.read_bytes()
    path.write_bytes(whole[: max(0, len(whole) - cut)])
    kept = list(journal.read(path))
    assert kept == [(float(now), event) for now, event in enumerate(given)][: len(kept)]
    assert cut or len(kept) == len(given)
    again = journal.Journal(path)
    again.write(99.0, PilotCut("after"))
    again.close()
    assert list(journal.read(path)) == [*kept, (99.0, PilotCut("after"))]


def test_a_flipped_bit_ends_the_journal_there(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    book = journal.Journal(path)
    for now in range(3):
        book.write(float(now), TimerFired(f"key {now}"))
    book.close()
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    assert [now for now, _ in journal.read(path)] == [0.0, 1.0]


def test_another_file_is_not_taken_for_a_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_text("this is somebody's diary, not a journal")
    with pytest.raises(SessionError, match="not a journal"):
        list(journal.read(path))
    with pytest.raises(SessionError, match="not a journal"):
        journal.Journal(path)
    assert path.read_text().startswith("this is somebody")


# ---- what is written


def test_plain_heartbeats_are_not_written(manager: Manager, peers: Callable[..., Peer], folder: SessionFolder) -> None:
    client, pilot, stranger = peers("client"), peers("pilot"), peers("pilot", hello=False)
    pilot.hear(to_pilot.PilotWelcome)
    client.hear(to_client.ClientWelcome)

    def beat(**facts: int) -> int:
        before = client.sequence
        pilot.send(say.Heartbeat(**facts), numbered=False)  # type: ignore[arg-type]
        client.send(say.Received(0))  # what is acknowledged is in the journal, and so is what came before it
        client.hear(to_client.Ack, where=lambda ack: ack.sequence > before)
        return sum(
            isinstance(message, say.Heartbeat)
            for _, event in journal.read(folder.journal)
            if isinstance(event, FromPilot)
            for message in event.messages
        )

    for _ in range(20):
        stranger.send(say.Heartbeat(), numbered=False)
        assert beat() == 0
    assert beat(refused_frames=2) == 1
    assert beat(refused_frames=2) == 1
    client.send(say.AskStatus(), numbered=False)
    assert client.hear(to_client.Status).refused["frames refused by pilots"] == 2
