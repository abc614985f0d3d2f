"""A pool over a stand-in for TaskVine that finishes orders on request."""

from __future__ import annotations

from pathlib import Path

from stoker.contexts.recipe import ObjectRef
from stoker.pilot.core.commands import SendHeartbeat, SendHello, SendToManager
from stoker.pilot.core.events import FromManager, HelloDue, UnacknowledgedFacts
from stoker.pilot.core.state import PilotFacts
from stoker.pilot.taskvine import messages
from stoker.pilot.taskvine.engine import FinishedOrder
from stoker.pilot.taskvine.pool import UNLIMITED_BYTES, VinePool
from stoker.protocol.ids import DeviceId
from stoker.protocol.to_manager import DeviceFacts, FromPilot, PilotHello
from stoker.protocol.to_pilot import FunctionBlob, PilotWelcome, ToPilot

GB = 10**9


class Vine:
    """A TaskVine that keeps orders and finishes none."""

    def __init__(self) -> None:
        self.orders: list[messages.PoolOrder] = []
        self.forgotten: list[str] = []

    def new_ticket(self) -> int:
        return len(self.orders) + 1

    def add_function(self, blob: FunctionBlob) -> None:
        pass

    def install_library(self, setup: messages.VineLibrarySetup, *, cores: int) -> str:
        return setup.recipe.key

    def submit(self, name: str, order: messages.PoolOrder, *, large: tuple[ObjectRef, ...]) -> None:
        self.orders.append(order)

    def forget_object(self, name: str) -> None:
        self.forgotten.append(name)


class Manager:
    def __init__(self) -> None:
        self.said: list[FromPilot] = []
        self.hellos: list[PilotHello] = []

    def execute_command(self, command: SendToManager | SendHeartbeat | SendHello) -> None:
        if isinstance(command, SendHello):
            self.hellos.append(command.hello)
        else:
            self.said.append(command.message)


class PoolOfSlots:
    """A pool of slots after its welcome. `running`: folder for notes and stop files."""

    def __init__(self, running: Path, *, slots: int = 4) -> None:
        self.running = running
        self.vine, self.manager = Vine(), Manager()
        facts = PilotFacts(pilot="pool", session="s", host="h", pid=1, devices=(), cache_bound_bytes=UNLIMITED_BYTES)
        setup = messages.VineLibrarySetup(pilot="pool", logs="", objects="", running=str(running))
        self.pool = VinePool(self.vine, self.manager, facts=facts, setup=setup)  # type: ignore[arg-type]
        self.pool.replace_core_with_devices(
            tuple(DeviceFacts(DeviceId(f"cpu:{number}"), "cpu (TaskVine)", GB) for number in range(slots))
        )
        self.pool.handle_event(HelloDue(UnacknowledgedFacts(), 0, ()))
        self.hear(PilotWelcome("s", 5.0, 60.0, hello=1))

    @property
    def said(self) -> list[FromPilot]:
        return self.manager.said

    def hear(self, message: ToPilot) -> None:
        self.pool.handle_event(FromManager(message))

    def finish(
        self, order: messages.PoolOrder, answer: messages.PoolAnswer | None = None, *, result: str = "success"
    ) -> None:
        data = messages.encode(answer) if answer is not None else b""
        self.pool.handle_finished_order(FinishedOrder(order.ticket, result, data))

    def loaded(self, load: messages.PoolOrder, *, load_s: float = 0.0, resident_bytes: int = 0) -> None:
        assert load.calls == []
        held = messages.LibraryReport(host="node", pid=1, log="", load_s=load_s, resident_bytes=resident_bytes)
        self.finish(load, messages.PoolAnswer(load.ticket, held))
