from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from taskvine.stand_in import PoolOfSlots

from stoker.contexts.recipe import BARE, ObjectRef, Recipe
from stoker.pilot.core.events import UsageMeasured
from stoker.pilot.taskvine import messages, pool
from stoker.protocol.calls import CallEnd, CallOptions, CallSpec, Failure, FailureKind, GangPlace
from stoker.protocol.ids import CallId, DeviceId, FunctionKey, LibraryId
from stoker.protocol.to_manager import CallsEnded, CallsReturned, Heartbeat, LibraryGone, LibraryReady
from stoker.protocol.to_pilot import CancelCalls, FunctionBlob, RunCalls, StartLibrary, StopLibrary

BLOB = FunctionBlob(FunctionKey("f"), "work", b"code")
HELD = messages.LibraryReport(host="node", pid=1, log="")


class World(PoolOfSlots):
    """A pool with two libraries on separate slots, and its messages to the manager."""

    def __init__(self, folder: Path) -> None:
        running = folder / "running"
        running.mkdir()
        super().__init__(running)
        self.lost, self.other = (self.ready(number) for number in (1, 2))

    def start(self, number: int, *, device: int, recipe: Recipe = BARE) -> LibraryId:
        self.hear(StartLibrary(LibraryId(number), recipe, (DeviceId(f"cpu:{device}"),)))
        return LibraryId(number)

    def ready(self, number: int) -> LibraryId:
        library = self.start(number, device=number)
        self.loaded(self.vine.orders[-1])
        return library

    def run(self, library: LibraryId, *calls: int, payload: object = b"arguments") -> messages.PoolOrder:
        specs = [CallSpec(CallId(call), payload) for call in calls]  # type: ignore[arg-type]
        self.hear(RunCalls(library, FunctionKey("f"), specs, CallOptions(), BLOB))
        return self.vine.orders[-1]

    def end(self, order: messages.PoolOrder) -> None:
        ends = [CallEnd(spec.call, ok=True, run_s=1.0) for spec in order.calls]
        self.finish(order, messages.PoolAnswer(order.ticket, HELD, ends))

    def gone(self) -> Any:
        assert isinstance(self.said[-1], LibraryGone)
        return self.said[-1]

    def stops(self, order: messages.PoolOrder, call: int) -> bool:
        return messages.stop_file(str(self.running), order.ticket, CallId(call)).exists()


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_call_stopped_on_a_lost_worker_runs_in_another_library(world: World) -> None:
    first = world.run(world.lost, 7)
    world.hear(CancelCalls(world.lost, (CallId(7),), running=True))
    world.hear(StopLibrary(world.lost, "cpu:1 is quarantined: TaskVine has no worker for this slot"))
    second = world.run(world.other, 7)
    assert [spec.call for spec in second.calls] == [CallId(7)]
    assert world.stops(first, 7)
    assert not world.stops(second, 7)

    world.finish(first, result="forsaken")
    assert not list(world.running.iterdir()), "a stop file is removed with its order"
    assert world.said[-2:] == [CallsReturned(world.lost, (CallId(7),)), LibraryGone(world.lost)]


def test_unstarted_order_is_resent_without_stopped_calls(world: World) -> None:
    first = world.run(world.lost, 7)
    world.hear(CancelCalls(world.lost, (CallId(7),), running=True))
    world.finish(first, result="forsaken")
    assert world.said[-1] == CallsReturned(world.lost, (CallId(7),))
    assert world.vine.orders[-1] is first

    kept = world.run(world.lost, 8)
    world.finish(kept, result="forsaken")
    assert [spec.call for spec in world.vine.orders[-1].calls] == [CallId(8)]
    assert world.vine.orders[-1].ticket != kept.ticket


def test_cancelled_running_call_is_stopped_and_its_context_stays(world: World) -> None:
    order = world.run(world.lost, 7)
    world.hear(CancelCalls(world.lost, (CallId(7),), running=True))
    failure = Failure(FailureKind.CANCELLED, "it was cancelled while it ran")
    world.finish(order, messages.PoolAnswer(order.ticket, HELD, [CallEnd(CallId(7), ok=False, failure=failure)]))
    ended = world.said[-1]
    assert isinstance(ended, CallsEnded)
    assert [(end.call, end.failure) for end in ended.ends] == [(7, failure)]
    assert [spec.call for spec in world.run(world.lost, 8).calls] == [8]


def test_order_abandoned_too_often_ends_its_library(world: World) -> None:
    order = world.run(world.lost, 7)
    for _ in range(4):
        world.finish(world.vine.orders[-1], result="forsaken")
    gone = world.gone()
    assert (gone.failure.kind, gone.running, gone.unstarted) == (FailureKind.DIED, (), (7,))
    assert "forsaken" in gone.failure.message
    assert len([one for one in world.vine.orders if one.calls == order.calls]) == 4


def test_note_names_the_call_during_which_its_process_died(world: World) -> None:
    order = world.run(world.lost, 7)
    note = messages.LibraryNote(7, "", messages.MEMORY_LIMIT_EXCEEDED)
    messages.note_file(str(world.running), order.ticket).write_bytes(messages.encode_note(note))
    world.finish(order, result="forsaken")
    gone = world.gone()
    assert (gone.failure.kind, gone.running, gone.loading) == (FailureKind.MEMORY, (7,), False)


def test_short_calls_share_an_order_once_their_length_is_known(world: World) -> None:
    order = world.run(world.lost, 1, 2, 3)
    assert [spec.call for spec in order.calls] == [1], "how long they take is not known"
    ends = [CallEnd(CallId(1), ok=True, run_s=0.001)]
    world.finish(order, messages.PoolAnswer(order.ticket, HELD, ends))
    assert [spec.call for spec in world.vine.orders[-1].calls] == [2, 3]


def test_large_argument_is_removed_with_the_last_order_that_needs_it(world: World) -> None:
    ref = ObjectRef("argument", 2_000_000, "/session/objects/argument")
    first = world.run(world.lost, 1, payload=ref)
    second = world.run(world.other, 2, payload=ref)
    assert first.objects == {"argument": "argument-0"}
    world.end(first)
    assert world.vine.forgotten == []
    world.end(second)
    assert world.vine.forgotten == ["argument"]


def test_gangs_are_refused_and_unknown_functions_requested(world: World) -> None:
    specs = [CallSpec(CallId(1), b"x")]
    world.hear(RunCalls(world.lost, FunctionKey("f"), specs, CallOptions(), BLOB, gang=GangPlace(rank=0, size=2)))
    ended = world.said[-1]
    assert isinstance(ended, CallsEnded)
    assert "does not support gangs" in str(ended.ends[0].failure)
    world.hear(RunCalls(world.lost, FunctionKey("g"), specs, CallOptions()))
    assert world.said[-1] == CallsReturned(world.lost, (CallId(1),), need_function=True)


# ---- slots


def test_idle_library_leaves_its_slot_to_another_context(world: World) -> None:
    library = world.start(3, device=1)
    assert LibraryGone(world.lost) in world.said
    world.loaded(world.vine.orders[-1])
    ready = world.said[-1]
    assert isinstance(ready, LibraryReady)
    assert ready.library == library


def test_busy_library_finishes_its_turn_first(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    order = world.run(world.lost, 7, 8)
    orders = len(world.vine.orders)
    library = world.start(3, device=1)
    assert len(world.vine.orders) == orders, "the library waits for the slot"
    monkeypatch.setattr(pool, "MIN_SLOT_TURN_S", -1.0)
    world.pool.give_free_slots()
    assert world.said[-1] == CallsReturned(world.lost, (CallId(8),))
    world.end(order)
    assert LibraryGone(world.lost) in world.said
    world.loaded(world.vine.orders[-1])
    assert world.said[-1].library == library  # type: ignore[union-attr]


def test_library_that_waits_for_its_slot_can_be_ended(world: World) -> None:
    world.run(world.lost, 7)
    orders = len(world.vine.orders)
    library = world.start(3, device=1)
    world.hear(StopLibrary(library, "enough"))
    assert world.said[-1] == LibraryGone(library, loading=True)
    world.end(world.vine.orders[-1])
    world.pool.give_free_slots()
    assert len(world.vine.orders) == orders, "the context is no longer loaded"


# ---- the pilot


def test_used_memory_of_a_context_is_measured_but_not_used_for_plans(world: World) -> None:
    world.start(3, device=3)
    world.loaded(world.vine.orders[-1], load_s=0.0, resident_bytes=1000)
    ready = world.said[-1]
    assert isinstance(ready, LibraryReady)
    assert (ready.resident_bytes, ready.device_bytes) == (0, 0)
    sizes = {number: library.memory_bytes for number, library in world.pool.libraries.items() if library.memory_bytes}
    world.pool.handle_event(UsageMeasured(sizes, {}, 0))
    beat = world.said[-1]
    assert isinstance(beat, Heartbeat)
    assert [(use.library, use.memory_bytes) for use in beat.libraries] == [(3, 1000)]
