"""A TaskVine pool over a stand-in for TaskVine."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from conformance.shell import Loads, Shell, answer_to
from taskvine.stand_in import GB, PoolOfSlots

from stoker.contexts.recipe import ObjectRef, Recipe
from stoker.pilot.agent.agent import collect_unacknowledged_facts
from stoker.pilot.core.events import HelloDue, SignalReceived, Tick
from stoker.pilot.taskvine import messages
from stoker.protocol import wire
from stoker.protocol.calls import CallEnd, Failure, FailureKind
from stoker.protocol.ids import CallId, FunctionKey, LibraryId
from stoker.protocol.to_manager import PilotHello
from stoker.protocol.to_pilot import FunctionBlob, RunCalls, ToPilot

BLOB = FunctionBlob(FunctionKey("hold"), "hold", b"code")
HELD = messages.LibraryReport(host="node", pid=1, log="")


class Pooled(Shell):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="pool-"))
        self.slots = PoolOfSlots(self.folder, slots=2)
        self.vine, self.pool = self.slots.vine, self.slots.pool
        self.loads: dict[str, Loads] = {}
        self.let: set[LibraryId] = set()
        self.done: set[int] = set()
        self.read = 0
        self.unacked_from: int | None = None

    # ---- TaskVine

    def settle(self) -> None:
        moved = True
        while moved:
            moved = False
            for order in self.vine.orders:
                if order.ticket in self.done or order.calls:
                    continue
                moved |= self.load(order)
        for message in self.slots.said[self.read :]:
            self.heard(message)
        self.read = len(self.slots.said)

    def load(self, order: messages.PoolOrder) -> bool:
        library = self.owner(order)
        if library is None:
            self.done.add(order.ticket)
            return False
        known = self.pool.state.libraries[library]
        how = self.loads[known.recipe.key]
        if how is Loads.NEVER or (how is Loads.WHEN_LET and library not in self.let):
            return False
        self.done.add(order.ticket)
        failure = Failure(FailureKind.CONTEXT, "the loader failed") if how is Loads.FAILS else None
        held = messages.LibraryReport(host="node", pid=1, log="", failure=failure)
        self.slots.finish(order, messages.PoolAnswer(order.ticket, held))
        return True

    def owner(self, order: messages.PoolOrder) -> LibraryId | None:
        for number, library in self.pool.libraries.items():
            if library._open_order is order:
                return number
        return None

    def order_of(self, library: LibraryId) -> messages.PoolOrder:
        order = self.pool.libraries[library]._open_order
        assert order is not None
        return order

    # ---- the driver

    def say(self, message: ToPilot) -> None:
        self.slots.hear(message)
        self.settle()

    def hear(self) -> bool:
        before = self.read
        self.settle()
        return self.read > before

    def hello(self, *, welcome: bool = True) -> PilotHello:
        self.settle()
        unacked = self.slots.said[self.unacked_from :] if self.unacked_from is not None else []
        self.pool.handle_event(HelloDue(collect_unacknowledged_facts([wire.encode(unacked)] if unacked else []), 0, ()))
        hello = self.slots.manager.hellos[-1]
        if welcome:
            self.say(answer_to(hello))
        return hello

    def recipe(self, loads: Loads) -> Recipe:
        self.numbers += 1
        key = f"recipe-{self.numbers}"
        self.loads[key] = loads
        objects = (ObjectRef(f"object-{self.numbers}", 1000, "/shared/object"),) if loads is Loads.FILES else ()
        return Recipe(key=key, name=key, objects=objects)

    def device(self, number: int) -> tuple[str, int]:
        return f"cpu:{number}", GB

    def as_taken(self, order: RunCalls) -> RunCalls:
        return RunCalls(order.library, order.function, order.calls, order.options, BLOB)

    def let_load(self, library: LibraryId) -> None:
        self.let.add(library)
        self.settle()

    def let_end(self, call: CallId, library: LibraryId) -> None:
        order = self.order_of(library)
        assert [spec.call for spec in order.calls] == [call], "it does not run"
        ends = [CallEnd(call, ok=True, run_s=1.0)]
        self.slots.finish(order, messages.PoolAnswer(order.ticket, HELD, ends))
        self.settle()

    def die(self, library: LibraryId) -> None:
        order = self.order_of(library)
        if order.calls:
            note = messages.LibraryNote(order.calls[0].call, "")
            messages.note_file(str(self.folder), order.ticket).write_bytes(messages.encode_note(note))
        self.done.add(order.ticket)
        self.slots.finish(order, result="forsaken")
        self.settle()

    def wait(self, seconds: float) -> None:
        """Send a tick: TaskVine's stand-in has no clock."""
        self.pool.handle_event(Tick())
        self.settle()

    def signal(self) -> None:
        self.pool.handle_event(SignalReceived("it got SIGTERM"))
        self.settle()

    def keep_acks(self) -> None:
        self.unacked_from = len(self.slots.said)

    def say_acks(self) -> None:
        self.unacked_from = None

    def exit_code(self) -> int:
        self.pool.handle_event(Tick())
        assert self.pool.is_over
        self.pool.report_pool_end()
        self.settle()
        return self.pool.state.exit_code

    def close(self) -> None:
        self.pool.state.ledger.validate()
        for order in self.vine.orders:  # these orders still hold calls of ended libraries
            self.slots.finish(order, result="forsaken")
        assert not list(self.folder.iterdir()), "stop files and notes go with their orders"
        shutil.rmtree(self.folder)
