from __future__ import annotations

import pytest
from core.pilot_shell import GIB, CoreShell, EvenCost

from stoker.contexts.recipe import Needs, Recipe
from stoker.pilot.core import commands
from stoker.pilot.core.events import OfferInspected, ProcessEnded
from stoker.pilot.core.turns import STEP_TIME_MARGIN, EngineOutlook, UnreadPrompt
from stoker.protocol import to_agent, to_library
from stoker.protocol import to_manager as told
from stoker.protocol.calls import CallSpec, RefusalCase
from stoker.protocol.ids import CallId, FunctionKey, LibraryId
from stoker.protocol.to_pilot import ResizeLibrary, RunCalls, StopLibrary

IDLE = EngineOutlook(LibraryId(1), EvenCost())
MODEL = Recipe("k", "model", needs=Needs(device_memory_bytes=8 * GIB))


@pytest.fixture
def pilot() -> CoreShell:
    return CoreShell().join().ready(recipe=MODEL, device_memory_bytes=8 * GIB).forget()


def offer(pilot: CoreShell, call: int = 1, *, reserve: int = 0, preempts: tuple[int, ...] = ()) -> RunCalls:
    order = RunCalls(
        LibraryId(1), FunctionKey("f"), [CallSpec(CallId(call), b"x")], offer=True, reserve_bytes=reserve,
        preempts=tuple(map(LibraryId, preempts)),
    )  # fmt: skip
    pilot.hear(order)
    return pilot.take(commands.InspectOffer).order


def test_call_does_not_start_before_its_offer_is_decided(pilot: CoreShell) -> None:
    order = offer(pilot)
    assert pilot.all(to_library.Run) == []
    assert [spec.call for spec in order.calls] == [1]
    pilot.give(OfferInspected(order, UnreadPrompt(100, 200.0, 0.25), [IDLE], 100.0))
    assert [spec.call for spec in pilot.take(to_library.Run).calls] == [1]
    assert pilot.all(told.CallsReturned) == []


def test_call_that_would_be_late_is_refused(pilot: CoreShell) -> None:
    pilot.give(OfferInspected(offer(pilot), UnreadPrompt(1000, 100.5, 0.25), [IDLE], 100.0))
    assert pilot.take(told.CallsReturned) == told.CallsReturned(
        LibraryId(1), (CallId(1),), refused="its first token would be 600 ms late", case=RefusalCase.FIRST_TOKEN
    )
    assert pilot.all(to_library.Run) == []


def test_call_without_cache_room_is_refused_with_the_bytes_it_needs(pilot: CoreShell) -> None:
    pilot.give(OfferInspected(offer(pilot), required_bytes=9 * GIB))
    back = pilot.take(told.CallsReturned)
    assert (back.required_bytes, back.refused) == (9 * GIB, "lib-1 needs 9.7 GB of device memory for the call")


def test_library_grows_for_a_call_that_it_accepts(pilot: CoreShell) -> None:
    pilot.give(OfferInspected(offer(pilot, reserve=10 * GIB), required_bytes=9 * GIB))
    assert pilot.take(to_library.Resize).device_memory_bytes == 10 * GIB
    assert pilot.take(to_library.Run)
    pilot.say(1, to_agent.Resized(10 * GIB))
    assert pilot.take(told.LibraryResized).device_memory_bytes == 10 * GIB


def test_library_is_unchanged_by_a_call_that_it_refuses(pilot: CoreShell) -> None:
    pilot.give(OfferInspected(offer(pilot, reserve=10 * GIB), UnreadPrompt(1000, 100.5), [IDLE], 100.0))
    resized = pilot.take(told.LibraryResized)
    assert (resized.device_memory_bytes, resized.ordered_bytes) == (8 * GIB, 10 * GIB)
    assert pilot.take(told.CallsReturned).refused
    assert pilot.all(to_library.Resize) == []


def test_call_does_not_wait_for_memory_of_other_libraries(pilot: CoreShell) -> None:
    pilot.ready(2, MODEL, device_memory_bytes=10 * GIB).forget()
    pilot.give(OfferInspected(offer(pilot, reserve=15 * GIB)))
    assert pilot.take(told.CallsReturned).refused == "lib-1 would wait for memory on its devices"
    pilot.hear(ResizeLibrary(LibraryId(1), 15 * GIB)).forget()  # the growth of lib-1 waits until lib-2 shrinks
    pilot.give(OfferInspected(offer(pilot)))
    assert pilot.take(told.CallsReturned).refused == "lib-1 waits for memory on its devices"


def test_library_that_ended_during_the_decision_refuses_the_offer(pilot: CoreShell) -> None:
    order = offer(pilot, reserve=10 * GIB)
    pilot.hear(StopLibrary(LibraryId(1), "enough")).forget()
    pilot.give(OfferInspected(order))
    assert pilot.take(told.CallsReturned).refused == "lib-1 is about to end"


def test_offer_is_decided_by_the_planned_size_of_a_shrinking_library(pilot: CoreShell) -> None:
    pilot.hear(ResizeLibrary(LibraryId(1), 6 * GIB)).forget()  # the library still uses 8 GiB
    pilot.give(OfferInspected(offer(pilot), required_bytes=7 * GIB))
    assert pilot.take(told.CallsReturned).required_bytes == 7 * GIB
    pilot.give(OfferInspected(offer(pilot, reserve=7 * GIB), required_bytes=7 * GIB))
    assert pilot.take(to_library.Resize).device_memory_bytes == 7 * GIB
    assert pilot.take(to_library.Run)


def test_offer_may_use_the_memory_of_preempted_libraries(pilot: CoreShell) -> None:
    pilot.ready(2, MODEL, device_memory_bytes=10 * GIB).forget()
    pilot.give(OfferInspected(offer(pilot, reserve=15 * GIB, preempts=(2,))))
    assert pilot.take(told.OfferAccepted) == told.OfferAccepted(LibraryId(1), CallId(1), (LibraryId(2),), 15 * GIB)
    assert pilot.take(to_library.Run)
    assert pilot.all(to_library.Stop) == []  # the manager orders the end of the library
    assert pilot.all(to_library.Resize) == []
    pilot.hear(StopLibrary(LibraryId(2), "lib-1 grows")).give(ProcessEnded(LibraryId(2)))
    assert pilot.take(to_library.Resize).device_memory_bytes == 15 * GIB


def test_memory_awaited_by_another_library_is_not_counted_twice(pilot: CoreShell) -> None:
    pilot.ready(2, MODEL, device_memory_bytes=8 * GIB).ready(3, MODEL, device_memory_bytes=2 * GIB).forget()
    pilot.hear(ResizeLibrary(LibraryId(3), 9 * GIB)).forget()
    pilot.give(OfferInspected(offer(pilot, reserve=15 * GIB, preempts=(2,))))
    assert pilot.take(told.CallsReturned).refused == "lib-1 would wait for memory on its devices"


def test_offer_is_decided_without_the_work_of_preempted_libraries(pilot: CoreShell) -> None:
    pilot.ready(2, MODEL, device_memory_bytes=8 * GIB).forget()
    mine = EngineOutlook(LibraryId(1), EvenCost(0.12), 1, 100.0, 110.0, 0.25)
    work = [mine, EngineOutlook(LibraryId(2), EvenCost(0.12), 1, 100.0, 110.0, 0.25)]
    new = UnreadPrompt(100, 109.0, 0.25)
    pilot.give(OfferInspected(offer(pilot), new, work, 100.0))
    refused = pilot.take(told.CallsReturned)
    assert refused.over_s == pytest.approx(2 * 0.12 * STEP_TIME_MARGIN - 0.25)
    pilot.give(OfferInspected(offer(pilot, 2, preempts=(2,)), new, work, 100.0))
    assert pilot.take(told.OfferAccepted).reserve_bytes == 0
