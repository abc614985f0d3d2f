from __future__ import annotations

import json
from pathlib import Path

import journal_files
import msgspec
import pytest
from cli.command_line import Stoker
from live.peers import Manager, Peer

from stoker.errors import SessionError
from stoker.manager.cli.replay import render_replay_result
from stoker.manager.live import journal
from stoker.manager.live.records import DecisionChecksums
from stoker.manager.live.replay import ReplayResult
from stoker.protocol import to_client, to_pilot
from stoker.protocol import to_manager as say
from stoker.protocol.session import SessionFolder


@pytest.fixture
def ended(manager: Manager, client: Peer, pilot: Peer, folder: SessionFolder) -> SessionFolder:
    """The folder of an ended session, in which a call ran."""
    call = client.hear(to_client.ClientWelcome).number << 40
    client.define()
    client.submit(call)
    library = pilot.serve()
    pilot.hear(to_pilot.RunCalls)
    pilot.end(call, library=library)
    client.hear(to_client.Results)
    client.send(say.EndSession("done"))
    manager.ended()
    return folder


def forge(path: SessionFolder, *, wrong: int = -1, checked: bool = True) -> None:
    """Write the journal again, with a wrong checksum for one event, or without checksums."""
    records = list(journal_files.read_events_and_checks(path.journal))
    checks = dict(pair for _, each in records if isinstance(each, DecisionChecksums) for pair in each.numbered_checks())
    events = [(now, each) for now, each in records if not isinstance(each, DecisionChecksums)]
    path.journal.unlink()
    book = journal.Journal(path.journal)
    for number, (now, event) in enumerate(events):
        book.add_event(now, event)
        if checked:
            book.add_decision_checksum(checks[number] ^ (number == wrong))
    book.close()


def test_ended_session_can_be_replayed(stoker: Stoker, ended: SessionFolder):
    shown = stoker.ok("replay")
    assert shown.output.startswith("session test · ")
    assert "decisions are the same" in shown.output
    told = msgspec.json.decode(stoker("replay", str(ended.journal), "--json").output)
    assert told["replayed"]["checked"] == told["replayed"]["events"] > 0
    assert told["replayed"]["difference"] is None
    assert told["simulated"] is None
    simulated = stoker.ok("replay", "--simulate")
    assert "live, " in simulated.output.splitlines()[-1]


def test_decisions_missing_from_the_journal_are_reported():
    one = ReplayResult("k3v9", events=10, checked=9, restarts=0, lasted_s=5.0)
    unknown = "  note  the decisions about 1 event are not in the journal: "
    assert render_replay_result(one, took_s=0.1, live=True)[-1] == (
        unknown + "the session is live, and its manager writes them a moment later"
    )
    assert render_replay_result(one, took_s=0.1)[-1] == unknown + "a manager was killed before it wrote them"
    restarted = msgspec.structs.replace(one, restarts=1)
    assert (
        render_replay_result(restarted, took_s=0.1, live=True)[-1]
        == unknown + "a manager was killed before it wrote them"
    )
    assert render_replay_result(restarted, took_s=0.1)[0].endswith(", the manager was restarted once")
    old = msgspec.structs.replace(one, checked=0)
    assert "has not written them yet" in render_replay_result(old, took_s=0.1, live=True)[1]


def test_replay_fails_and_reports_the_event_of_a_different_decision(stoker: Stoker, ended: SessionFolder):
    events = sum(1 for _ in journal_files.read(ended.journal))
    forge(ended, wrong=events - 1)
    result = stoker("replay", "test")
    assert isinstance(result.exception, SessionError)
    assert result.exception.facts["session"] == "test"
    assert f"event {events - 1:,}" in str(result.exception)
    assert "EndSession" in result.output
    assert "EndManager" in result.output


def test_journal_of_an_older_version_is_replayed_with_a_note(stoker: Stoker, ended: SessionFolder):
    forge(ended, checked=False)
    result = stoker.ok("replay")
    assert "nothing was compared" in result.output


def test_replay_writes_a_timeline_for_perfetto(stoker: Stoker, ended: SessionFolder, tmp_path: Path):
    file = tmp_path / "timeline.json"
    assert "1 calls are in" in stoker.ok("replay", "--perfetto", str(file)).output
    events = json.loads(file.read_text())["traceEvents"]
    load, run = [event for event in events if event["ph"] == "X"]
    assert (load["name"], run["name"], run["args"]["call"]) == ("load bare", "f", "c-0")
    assert (load["pid"], load["tid"]) == (run["pid"], run["tid"])
    assert run["ts"] >= load["ts"] + load["dur"]
    assert {event["name"] for event in events if event["ph"] == "C"} >= {"calls that wait", "calls that run"}
    assert "cannot be written" in str(stoker("replay", "--perfetto", str(tmp_path / "no" / "t.json")).exception)
