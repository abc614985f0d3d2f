"""What a pool does about the manager's orders, over a stand-in for TaskVine that finishes an order when it is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.contexts.recipe import BARE, ObjectRef
from stoker.manager.protocol.calls import CallOptions, CallSpec
from stoker.manager.protocol.ids import CallId, DeviceId, FunctionKey, LibraryId
from stoker.manager.protocol.to_manager import CallsReturned, FromPilot, LibraryGone
from stoker.manager.protocol.to_pilot import CancelCalls, FunctionBlob, RunCalls, StartLibrary, StopLibrary
from stoker.pilot.taskvine import messages
from stoker.pilot.taskvine.engine import Finished
from stoker.pilot.taskvine.pool import Pool


class Vine:
    """TaskVine as far as a pool sees it: orders that it was given, none of which ends by itself."""

    def __init__(self) -> None:
        self.orders: list[messages.Order] = []

    def new_ticket(self) -> int:
        return len(self.orders) + 1

    def take_function(self, blob: FunctionBlob) -> None:
        pass

    def install(self, setup: messages.Setup, *, cores: int) -> str:
        return setup.recipe.key

    def submit(self, name: str, order: messages.Order, *, large: tuple[ObjectRef, ...]) -> None:
        self.orders.append(order)

    def forget(self, name: str) -> None:
        pass


def ready(pool: Pool, vine: Vine, number: int) -> LibraryId:
    """A library on a device of its own that has loaded its context."""
    library = LibraryId(number)
    pool.handle(StartLibrary(library, BARE, (DeviceId(f"cpu:{number}"),)))
    load = vine.orders[-1]
    assert load.calls == []
    held = messages.Held(host="node", pid=1, log="")
    pool.finished(Finished(load.ticket, "success", messages.encode(messages.Answer(load.ticket, held))))
    return library


class World:
    """A pool with two libraries, each on a slot of its own, and what it says to the manager."""

    def __init__(self, folder: Path) -> None:
        self.running = folder / "running"
        self.running.mkdir()
        self.vine, self.said = Vine(), list[FromPilot]()
        setup = messages.Setup(pilot="pool", logs="", objects="", running=str(self.running))
        self.pool = Pool(self.vine, self.said.append, setup=setup)  # type: ignore[arg-type]  # it stands in for a C library
        self.lost, self.other = (ready(self.pool, self.vine, number) for number in (1, 2))

    def run(self, library: LibraryId, *calls: int) -> messages.Order:
        """The manager sends calls to a library; the order that TaskVine is given."""
        blob = FunctionBlob(FunctionKey("f"), "work", b"code")
        specs = [CallSpec(CallId(call), b"arguments") for call in calls]
        self.pool.handle(RunCalls(library, FunctionKey("f"), specs, CallOptions(), blob))
        return self.vine.orders[-1]

    def stops(self, order: messages.Order, call: int) -> bool:
        return messages.stop_file(str(self.running), order.ticket, CallId(call)).exists()


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_call_of_a_lost_worker_runs_again_though_its_first_order_was_told_to_stop(world: World) -> None:
    """What the manager does when a slot has no worker any more: it takes the call away, ends the library, and sends the
    call to another slot of the same pool. TaskVine still has the first order."""
    first = world.run(world.lost, 7)
    world.pool.handle(CancelCalls(world.lost, (CallId(7),), running=True))
    world.pool.handle(StopLibrary(world.lost, "cpu:1 is quarantined: TaskVine has no worker for it"))
    second = world.run(world.other, 7)
    assert [spec.call for spec in second.calls] == [CallId(7)]
    assert world.stops(first, 7)
    assert not world.stops(second, 7)

    world.pool.finished(Finished(first.ticket, "forsaken"))
    assert not list(world.running.iterdir()), "a stop file goes with its order"
    assert world.said[-2:] == [CallsReturned(world.lost, (CallId(7),)), LibraryGone(world.lost)]


def test_an_order_that_never_began_is_sent_again_without_the_calls_that_were_stopped(world: World) -> None:
    first = world.run(world.lost, 7)
    world.pool.handle(CancelCalls(world.lost, (CallId(7),), running=True))
    world.pool.finished(Finished(first.ticket, "forsaken"))
    assert world.said[-1] == CallsReturned(world.lost, (CallId(7),))
    assert world.vine.orders[-1] is first

    kept = world.run(world.lost, 8)
    world.pool.finished(Finished(kept.ticket, "forsaken"))
    assert [spec.call for spec in world.vine.orders[-1].calls] == [CallId(8)]
    assert world.vine.orders[-1].ticket != kept.ticket
