from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from core.toy import Toy
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.contexts.folders import ProgramFolder
from stoker.contexts.step_times import StepCell, StepTimes
from stoker.manager.core.events import AdviceArrived, ContextAdvice, CostAdvice, OfContext
from stoker.manager.core.reactor import Core
from stoker.manager.core.seams import Policies
from stoker.manager.live import journal, records, snapshot
from stoker.manager.live.compaction import JournalCompaction
from stoker.manager.live.decisions import decision_checksum
from stoker.manager.live.records import SegmentHead
from stoker.manager.live.restore import JournalReplay, restore_manager
from stoker.manager.live.snapshot import UnreadableSnapshotError, UnsaveableStateError
from stoker.manager.policies import HottestFirst, KeepBlocks, LoadWhereWanted, default_policies
from stoker.manager.policies.slinfer import slinfer
from stoker.protocol import to_manager
from stoker.protocol.ids import CallId, RecipeKey


def busy() -> Toy:
    toy = Toy()
    toy.context("small", load_s=0.5, memory="2 GB").context("large", load_s=2.0, memory="6 GB")
    toy.pilot("p0", devices=2)
    toy.pilot("p1")
    for context in ("small", "large", "bare"):
        toy.call(*(f"{context}{n}" for n in range(12)), context=context, run_s=0.4)
    toy.run(until=toy.now + 4.0)
    assert toy.ended
    assert toy.open()
    return toy


HEAD = SegmentHead(2, 10, "mark", "0.1.0")


@pytest.fixture(scope="module")
def toy() -> Toy:
    return busy()


def saved(core: Core, path: Path) -> Path:
    snapshot.write_snapshot(path, core, HEAD)
    return path


def test_snapshot_contains_its_segment_and_unacknowledged_results(toy: Toy, tmp_path: Path) -> None:
    path = saved(toy.core, tmp_path / "journal.000002.snapshot")
    found = snapshot.read_snapshot(path)
    assert found.segment == HEAD
    assert [end.call for end in found.ends] == [end.call for end in toy.core.state.clients["ana"].unacked]  # type: ignore[index]
    assert snapshot.load_core(found).state.calls.keys() == toy.core.state.calls.keys()
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


@pytest.fixture(scope="module")
def shot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(Core("test", default_policies()), tmp_path_factory.mktemp("snapshot") / "journal.000002.snapshot")


@settings(max_examples=100, deadline=None)
@given(st.floats(0, 0.9999), st.none() | st.integers(0, 7))
def test_snapshot_with_a_flipped_bit_or_lost_end_is_unreadable(shot: Path, where: float, bit: int | None) -> None:
    data = bytearray(shot.read_bytes())
    at = int(where * len(data))
    if bit is None:
        del data[at:]
    else:
        data[at] ^= 1 << bit
    damaged = shot.with_suffix(".damaged")
    damaged.write_bytes(data)
    with pytest.raises(UnreadableSnapshotError):
        snapshot.load_core(snapshot.read_snapshot(damaged))


class Evil:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch /tmp/never",)


@pytest.mark.parametrize(
    "thing", [Evil(), os.system, eval, Path("/"), io.BytesIO(), Policies.__init__, pickle.Unpickler, lambda: 1]
)
def test_snapshot_refuses_objects_other_than_state_and_messages(thing: object) -> None:
    with pytest.raises(UnsaveableStateError):
        snapshot.write_object_graph([thing], io.BytesIO())
    try:
        data = pickle.dumps(thing)
    except (pickle.PicklingError, TypeError, AttributeError):
        return
    with pytest.raises(UnreadableSnapshotError):
        snapshot.read_object_graph(data, {})


def classes_of(annotation: object, found: set[type]) -> None:
    if isinstance(annotation, type) and annotation.__module__.startswith("stoker.") and annotation not in found:
        found.add(annotation)
        for each in get_type_hints(annotation).values():
            classes_of(each, found)
    for each in get_args(annotation):
        classes_of(each, found)


def test_snapshot_can_contain_every_type_used_in_messages() -> None:
    found: set[type] = set()
    for kind in (to_manager.FromClient, to_manager.FromPilot):
        classes_of(kind, found)
    assert ProgramFolder in found
    for each in found:
        snapshot.write_object_graph([each], io.BytesIO())


def test_snapshot_of_a_class_with_other_fields_is_refused(toy: Toy, tmp_path: Path) -> None:
    found = snapshot.read_snapshot(saved(toy.core, tmp_path / "journal.000002.snapshot"))
    layout = {**found.layout, "stoker.manager.core.nouns:Client": ["id", "shoe_size"]}
    with pytest.raises(UnreadableSnapshotError, match="the fields of Client have changed"):
        snapshot.read_object_graph(found.core, layout)
    with pytest.raises(UnreadableSnapshotError, match="no class Janitor"):
        snapshot.read_object_graph(found.core, {**found.layout, "stoker.manager.core.state:Janitor": ["id"]})


@pytest.mark.parametrize("make", [default_policies, slinfer])
def test_measured_step_times_are_restored(make: Callable[[], Policies], tmp_path: Path) -> None:
    toy = Toy(policies=make)
    toy.context("small", load_s=0.5, memory="2 GB")
    toy.call("a", context="small")
    steps = StepTimes(prefill=(StepCell(16, 8, 0.1, 5),), decode=(StepCell(1, 10, 0.1, 5),))
    key = RecipeKey(next(iter(toy.core.state.contexts)))
    toy.give(AdviceArrived(OfContext(key), CostAdvice({"cpu": ContextAdvice(steps=steps)})))
    path = saved(toy.core, tmp_path / "journal.000002.snapshot")
    back = snapshot.load_core(snapshot.read_snapshot(path))
    assert back.state.contexts[key].advice["cpu"].steps == steps


# ---- journals with snapshots


def lived(path: Path, toy: Toy, *, cut_at: int) -> journal.Journal:
    book = journal.Journal(path)
    core = Core("k3v9", default_policies(), strict=True)
    core.start()
    for number, (now, event) in enumerate(toy.past):
        if number == cut_at:
            head = book.begin_segment()
            snapshot.write_snapshot(records.snapshot_path(path, head.number), core, head)
        book.add_event(now, event)
        book.add_decision_checksum(decision_checksum(core.handle(event, now)))
        book.flush()
    return book


def test_manager_starts_from_the_newest_readable_snapshot(toy: Toy, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    lived(path, toy, cut_at=20).close()
    shot = records.snapshot_path(path, 2)
    whole = shot.read_bytes()
    past = JournalReplay(path, policies=default_policies())
    assert past.core is not None
    assert past.next_event == 20

    shot.write_bytes(whole[:-20])
    came = restore_manager(path, "k3v9", default_policies())
    assert came.core.state.calls.keys() == toy.core.state.calls.keys(), "the first segment is still there"
    assert len([text for text in came.notices if "cannot be read" in text]) == 1


def test_ended_calls_survive_a_lost_journal_beginning(toy: Toy, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    lived(path, toy, cut_at=len(toy.past) - 5).close()
    records.numbered_segment_path(path, 1).unlink()
    shot = records.snapshot_path(path, 2)
    data = bytearray(shot.read_bytes())
    size = len(data)
    found = snapshot.read_snapshot(shot)
    at = data.index(found.core[:200]) + 300
    data[at] ^= 1
    shot.write_bytes(data)
    came = restore_manager(path, "k3v9", default_policies())
    assert came.core is None
    unconfirmed = {end.call for end in toy.core.state.clients["ana"].unacked}  # type: ignore[index]
    assert unconfirmed <= {end.call for end in came.ends} <= {toy.ids[name] for name in toy.ended}
    assert came.ends
    assert "lacks the beginning of the session" in came.notices[0]
    assert not records.journal_exists(path)
    assert [each for each in tmp_path.glob("journal.aside-*") if each.stat().st_size == size]


class Lambdas(HottestFirst):
    def __init__(self) -> None:
        self.rank = lambda call: CallId(call)


def test_policy_that_cannot_be_saved_is_reported_once(tmp_path: Path) -> None:
    policies = Policies(dispatch=Lambdas(), residency=LoadWhereWanted(), provisioning=KeepBlocks())
    book = journal.Journal(tmp_path / "journal")
    told: list[str] = []
    work = JournalCompaction(book, snapshot_bytes=0, tail_bytes=0, starts_now=True, tell=told.append)
    core = Core("test", policies)
    while not told:
        work.start_or_check(core)
    (text,) = told
    assert "not compacted" in text
    assert "function" in text
    assert records.list_snapshots(book.path) == []
    work._now = True
    work.start_or_check(core)
    assert work.wait_s == float("inf"), "the snapshot is not tried again"
    assert len(records.list_segments(book.path)) == 2
    work.close()
    book.close()


class Raises(LoadWhereWanted):
    def on_waiting_calls(self, view: object, context: object) -> tuple[()]:  # type: ignore[override]
        raise ZeroDivisionError("of the user's own")


def test_journal_that_cannot_be_replayed_does_not_end_the_session(toy: Toy, tmp_path: Path) -> None:
    lived(tmp_path / "journal", toy, cut_at=-1).close()
    policies = Policies(dispatch=HottestFirst(), residency=Raises(), provisioning=KeepBlocks())
    came = restore_manager(tmp_path / "journal", "k3v9", policies)
    assert came.core is None
    assert {end.call for end in came.ends} == {toy.ids[name] for name in toy.ended}
    assert "cannot be replayed (ZeroDivisionError: of the user's own)" in came.notices[0]
