from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import journal_files
import pytest
from live.peers import Manager, Peer, Peers, pilot_hello, session_folder, until, welcomed

from stoker.contexts.recipe import BARE, Recipe
from stoker.errors import SessionError
from stoker.manager.core import events as core_events
from stoker.manager.core.events import Command, SetTimer, TimerFired, ToClient, ToPilot
from stoker.manager.core.seams import Policies
from stoker.manager.live import journal
from stoker.manager.live.decisions import CHECKED_PARTS, decision_checksum
from stoker.manager.live.records import DecisionChecksums
from stoker.manager.live.replay import ReplayResult, find_journal_and_session, verify_replay
from stoker.manager.policies import HottestFirst, KeepBlocks, LoadWhereWanted, default_policies
from stoker.protocol import to_client, to_pilot, wire
from stoker.protocol import to_manager as say
from stoker.protocol.calls import CallEnd, CallSpec
from stoker.protocol.session import SessionFolder

CALLS = 300


def members(union: object) -> set[type]:
    return set(union.__args__)  # type: ignore[attr-defined]


def test_every_command_type_is_classified_as_a_decision_or_not() -> None:
    records = core_events.Record.__args__
    answers = {to_client.ProgressReports, to_client.Status, to_client.Story, to_client.Calls, to_client.Pieces}
    no_decisions = {to_pilot.Ack, to_client.Ack, to_pilot.AckPieces, *answers, *records}
    known = {to_pilot.RunCalls, to_client.Results, *CHECKED_PARTS, *no_decisions}
    every = members(to_pilot.ToPilot) | members(to_client.ToClient) | members(core_events.Command) - {ToPilot, ToClient}
    assert known == every


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ([to_pilot.TakeBack(1, 2)], [to_pilot.TakeBack(1, 3)], False),
        ([to_pilot.RunCalls(1, "f", [CallSpec(1, b"a")])], [to_pilot.RunCalls(1, "f", [CallSpec(2, b"a")])], False),
        ([to_pilot.RunCalls(1, "f", [CallSpec(1, b"a")])], [to_pilot.RunCalls(1, "f", [CallSpec(1, b"b")])], True),
        ([to_pilot.PilotWelcome("s", 5.0, 60.0)], [to_pilot.PilotWelcome("s", 1.0, 9.0)], True),
        ([to_pilot.StopLibrary(1, "no use")], [to_pilot.StopLibrary(1, "of no use")], True),
        ([to_pilot.StopLibrary(1, "no use")], [], False),
        ([to_pilot.Ack(4), to_pilot.TakeBack(1, 2)], [to_pilot.TakeBack(1, 2), to_pilot.Ack(9)], True),
    ],
)  # fmt: skip
def test_checksum_changes_only_with_decisions_of_the_core(one: list[object], other: list[object], same: bool) -> None:
    def check(messages: list[object]) -> int:
        return decision_checksum([ToPilot("p", message) for message in messages])  # type: ignore[arg-type]

    assert (check(one) == check(other)) is same


def test_checksum_of_a_decision_includes_its_receiver() -> None:
    said = to_pilot.TakeBack(1, 2)  # type: ignore[arg-type]
    assert decision_checksum([ToPilot("a", said)]) != decision_checksum([ToPilot("b", said)])  # type: ignore[arg-type]
    assert decision_checksum([SetTimer(1.0, "k")]) != decision_checksum([SetTimer(1.0 + 1e-9, "k")])
    nothing: list[Command] = []
    assert decision_checksum(nothing) == 0


# ---- a live session


def live(manager: Manager, client: Peer, pilot: Peer, *, calls: int = CALLS) -> None:
    """Run calls of two contexts alternately. One frame of the pilot reports several ended calls."""
    other = Recipe("other", "other", slots=4)
    client.send(say.ClientHello(wire.VERSION, client.session), numbered=False)
    pilot.send(pilot_hello(pilot.session), numbered=False)
    client.send(say.DefineRecipe(BARE), say.DefineRecipe(other), say.DefineFunction("f", "f", b"code"))  # type: ignore[arg-type]
    for call in range(0, calls, 2):
        for recipe in ("bare", "other"):
            client.submit(call + (recipe == "other"), recipe=recipe)
    done = 0
    while done < calls:
        for message in pilot.listen(0.05):
            if isinstance(message, to_pilot.StartLibrary):
                pilot.send(say.LibraryReady(message.library, 0.1, 0.2))
            elif isinstance(message, to_pilot.RunCalls):
                ends = [CallEnd(spec.call, True, b"result", 0.01) for spec in message.calls]
                pilot.send(say.CallsEnded(message.library, ends))
            elif isinstance(message, to_pilot.StopLibrary):
                pilot.send(say.LibraryGone(message.library))
        for message in client.listen():
            done += len(message.ends) if isinstance(message, to_client.Results) else 0
    client.send(say.EndSession("test is over"))
    assert manager.ended() == 0


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SessionFolder]:
    """An ended session that tests do not change."""
    place = tmp_path_factory.mktemp("lived")
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("STOKER_HOME", str(place / "home"))
        folder = session_folder(place / "session")
        manager = Manager(folder)
    peers = [Peer(folder, role, role) for role in ("client", "pilot")]
    live(manager, *peers)
    for peer in peers:
        peer.close()
    yield folder
    manager.close()


@pytest.fixture
def lived(ended: SessionFolder, tmp_path: Path) -> SessionFolder:
    shutil.copytree(ended.path, tmp_path / "lived")
    return SessionFolder(tmp_path / "lived")


def replayed(folder: SessionFolder, policies: Policies | None = None) -> ReplayResult:
    path, session = find_journal_and_session(folder.path)
    return verify_replay(path, session=session, policies=policies or default_policies())


def test_session_replays_with_equal_decisions(lived: SessionFolder) -> None:
    found = replayed(lived)
    assert found.difference is None
    assert found.checked == found.events > CALLS
    assert find_journal_and_session(lived.journal) == (lived.journal, "test")


class Coldest(HottestFirst):
    """A policy that sends one call at a time to a library, so it differs from the default at the first short call."""

    def window(self, view: object, library: object) -> int:  # type: ignore[override]
        return 1


def dispatched_by(dispatch: HottestFirst) -> Policies:
    blocks = KeepBlocks()
    return Policies(dispatch=dispatch, residency=LoadWhereWanted(provisioning=blocks), provisioning=blocks)


def test_replay_with_other_policies_names_the_first_difference(lived: SessionFolder) -> None:
    found = replayed(lived, dispatched_by(Coldest())).difference
    assert any("RunCalls" in line for line in found.decides) or found.decides == ("nothing",)
    assert any("CallsEnded" in line or "LibraryReady" in line or "Submit" in line for line in found.happened)


def test_restarted_manager_continues_to_record_decision_checks(
    manager: Manager, peers: Peers, folder: SessionFolder
) -> None:
    client, pilot = welcomed(peers, "client", "pilot")
    client.define()
    client.submit(0, 1)
    pilot.hear(to_pilot.StartLibrary)
    until(lambda: replayed(folder).checked, what="checks in the journal of a live manager")
    manager.kill()
    before = replayed(folder)
    manager.start()
    manager.kill()
    manager.start()
    found = until(lambda: (now := replayed(folder)).restarts == 2 and now, what="the second restart in the journal")
    assert found.difference is None
    assert found.events > before.events
    assert found.checked >= before.checked


def checks_in(path: Path) -> dict[int, int]:
    records = (
        record for _, record in journal_files.read_events_and_checks(path) if isinstance(record, DecisionChecksums)
    )
    return dict(pair for record in records for pair in record.numbered_checks())


class Careless(HottestFirst):
    def pull(self, view: object, library: object) -> int:  # type: ignore[override]
        raise ZeroDivisionError("nothing to divide by")


def test_replay_error_shows_the_lines_of_a_policy_that_raises(lived: SessionFolder) -> None:
    with pytest.raises(SessionError) as caught:
        replayed(lived, dispatched_by(Careless()))
    first, *rest = str(caught.value).splitlines()
    assert "the policy raises ZeroDivisionError" in first
    assert f"event {caught.value.facts['event']:,}, " in first
    assert __file__ in rest[0]
    assert rest[-1] == "ZeroDivisionError: nothing to divide by"
    assert not any("/core/" in line for line in rest)

    events = list(journal_files.read(lived.journal))  # the last event killed the manager
    lived.journal.unlink()
    again = journal.Journal(lived.journal)
    for now, event in events[: caught.value.facts["event"] + 1]:
        again.add_event(now, event)
    again.close()
    with pytest.raises(SessionError, match=r"the policy raises ZeroDivisionError"):
        replayed(lived, dispatched_by(Careless()))


def test_empty_journal_is_reported(path: Path) -> None:
    journal.Journal(path).close()
    with pytest.raises(SessionError, match="is empty"):
        verify_replay(path, session="test", policies=default_policies())


def test_each_journal_check_belongs_to_the_event_of_its_decision(path: Path) -> None:
    for manager in range(3):
        book = journal.Journal(path)
        for number in range(200):
            book.add_event(float(number), TimerFired(f"{manager}/{number}"))
            book.add_decision_checksum(1000 * manager + number)
            book.flush()
        book.close()
    assert checks_in(path) == {
        200 * manager + number: 1000 * manager + number for manager in range(3) for number in range(200)
    }
