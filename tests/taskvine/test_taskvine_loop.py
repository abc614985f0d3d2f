"""Test the pool loop with a real manager connection and a stand-in for TaskVine."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_manager import FakeManager
from taskvine.stand_in import Vine

from stoker.contexts.recipe import BARE
from stoker.pilot.agent.agent import ManagerLink
from stoker.pilot.core.state import PilotFacts
from stoker.pilot.taskvine import messages
from stoker.pilot.taskvine.engine import FinishedOrder, VinePlan, VineWorker
from stoker.pilot.taskvine.main import PoolLoop
from stoker.pilot.taskvine.pool import UNLIMITED_BYTES, VinePool
from stoker.protocol.blocks import LossReason
from stoker.protocol.calls import CallEnd
from stoker.protocol.to_manager import DeviceFault, LibraryGone, PilotLeaving
from stoker.protocol.to_pilot import Exit

HELD = messages.LibraryReport(host="node", pid=1, log="")


class WorkingVine(Vine):
    """A TaskVine that finishes all orders in the next iteration of the pool loop."""

    def __init__(self) -> None:
        super().__init__()
        self.here = [VineWorker("node", cores=2, gpus=0, memory_bytes=2 * 10**9)]
        self.done = 0

    @property
    def open_orders(self) -> int:
        return len(self.orders) - self.done

    def connected_workers(self) -> list[VineWorker]:
        return self.here

    def collect_finished(self, *, block: bool) -> list[FinishedOrder]:
        fresh, self.done = self.orders[self.done :], len(self.orders)
        out = []
        for order in fresh:
            ends = [CallEnd(spec.call, ok=True, payload=b"\x80\x04N.") for spec in order.calls]
            out.append(
                FinishedOrder(order.ticket, "success", messages.encode(messages.PoolAnswer(order.ticket, HELD, ends)))
            )
        return out

    def close(self) -> None:
        pass


class NoFactory:
    """A stand-in for TaskVine's factory; workers join without it."""

    def __init__(self) -> None:
        self.why_ended = ""

    def set_wanted_workers(self, workers: int) -> None:
        pass

    def explain_end(self) -> str:
        return self.why_ended

    def close(self) -> None:
        pass


class Played:
    """A pool in this thread, and its manager in another thread."""

    def __init__(self, folder: Path) -> None:
        self.manager = FakeManager(folder)
        self.vine, self.factory = WorkingVine(), NoFactory()
        running = folder / "running"
        running.mkdir()
        link = ManagerLink(self.manager.folder, pilot="pool")
        facts = PilotFacts(pilot="pool", session="test", host="h", pid=1, devices=(), cache_bound_bytes=UNLIMITED_BYTES)
        setup = messages.VineLibrarySetup(pilot="pool", logs="", objects="", running=str(running))
        pool = VinePool(self.vine, link, facts=facts, setup=setup)  # type: ignore[arg-type]
        self.loop = PoolLoop(link, pool, self.vine, self.factory, plan=VinePlan(devices="cpu:2", most_workers=2))  # type: ignore[arg-type]
        self.failure: BaseException | None = None

    def play(self, script: Callable[[FakeManager], Any]) -> int:
        """Run the pool until it leaves; return its exit code."""

        def play() -> None:
            try:
                script(self.manager)
                self.manager.wait_for(PilotLeaving)
            except BaseException as error:
                self.failure = error
                self.manager.send(Exit("the test failed"))

        thread = threading.Thread(target=play)
        thread.start()
        before = {how: signal.getsignal(how) for how in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
        try:
            code = self.loop.run()
        finally:
            for how, handler in before.items():
                signal.signal(how, handler)
        thread.join()
        if self.failure is not None:
            raise self.failure
        return code


@pytest.fixture
def played(tmp_path: Path) -> Iterator[Played]:
    made = Played(tmp_path)
    yield made
    made.manager.close()


def work(number: int) -> int:
    return number


def test_pool_runs_calls_and_exits_on_request(played: Played) -> None:
    def script(manager: FakeManager) -> None:
        hello = manager.hello()
        assert [facts.device for facts in hello.devices] == ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
        manager.ready(BARE)
        calls = manager.run(work, [(n,) for n in range(20)])
        manager.until(lambda: set(manager.ends()) == set(calls))
        manager.until(lambda: manager.heartbeats, what="a heartbeat")
        manager.send(Exit("enough", drain=True))
        assert manager.gone().failure is None

    assert played.play(script) == 0


def test_slots_without_a_worker_are_reported_until_it_starts(played: Played) -> None:
    def script(manager: FakeManager) -> None:
        manager.hello()
        fault = manager.wait_for(DeviceFault, device="cpu:3")
        assert "1 of 2 workers are connected" in fault.reason
        played.vine.here.append(VineWorker("other", cores=2, gpus=0, memory_bytes=2 * 10**9))
        manager.wait_for(DeviceFault, device="cpu:3", reason="")
        manager.send(Exit("enough"))

    assert played.play(script) == 0


def test_signal_lets_the_pool_report_why_it_exits(played: Played) -> None:
    def script(manager: FakeManager) -> None:
        manager.ready(BARE)
        signal.raise_signal(signal.SIGTERM)
        assert manager.wait_for(PilotLeaving).loss is LossReason.SIGNALLED
        assert LibraryGone(1) in manager.said

    assert played.play(script) == 0


def test_pool_whose_factory_ends_fails(played: Played) -> None:
    def script(manager: FakeManager) -> None:
        manager.hello()
        played.factory.why_ended = "vine_factory ended with exit code 1"
        assert "vine_factory" in manager.wait_for(PilotLeaving).reason

    assert played.play(script) == 1
