"""The pilot agent with real processes and sockets; the sequence acts as the manager."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from conformance.shell import Loads, Shell, answer_to
from fake_manager import FakeManager, function, recipe
from polling import PATIENCE_S

from stoker.contexts import payloads
from stoker.contexts.objects import make_object_ref
from stoker.contexts.recipe import Needs, Recipe
from stoker.protocol.calls import CallSpec
from stoker.protocol.ids import CallId, LibraryId
from stoker.protocol.to_manager import PilotHello, WantObjects
from stoker.protocol.to_pilot import Ack, HelloAgain, RunCalls, ToPilot


def _load(how: str, folder: str) -> int:
    import os
    import time
    from pathlib import Path

    here = Path(folder)
    (here / f"library-{os.environ['STOKER_LIBRARY']}").write_text(str(os.getpid()))
    if how == "FAILS":
        raise FileNotFoundError("the loader failed")
    while how == "NEVER" or (how == "WHEN_LET" and not (here / f"load-{os.environ['STOKER_LIBRARY']}").exists()):
        time.sleep(0.01)
    return 0


def _hold(folder: str, call: int) -> int:
    import time
    from pathlib import Path

    import stoker

    here = Path(folder)
    (here / f"began-{call}-{time.monotonic_ns()}").touch()
    while not (here / f"end-{call}").exists():
        if not (here / f"deaf-{call}").exists():
            stoker.progress(1)
        time.sleep(0.01)
    return call


HOLD = function(_hold)


class RealAgent(Shell):
    def __init__(self, folder: Path, *, walltime_s: float = 0.0) -> None:
        super().__init__()
        self.folder = folder / "world"
        self.folder.mkdir(parents=True)
        self.said_at = time.monotonic()
        self.manager = _Listening(folder, self)
        arguments = ["--devices", "cpu:2"]
        if walltime_s:
            arguments += ["--walltime-s", str(walltime_s)]
        self.process = self.manager.start_pilot(*arguments)
        self.manager.hello()
        self.manager.send(answer_to(self.manager.hellos[-1], lease_s=1.0))

    # ---- the driver

    def say(self, message: ToPilot) -> None:
        self.say_together(message)

    def say_together(self, *messages: ToPilot) -> None:
        self.said_at = time.monotonic()
        self.manager.send(*messages)

    def said_s_ago(self) -> float:
        return time.monotonic() - self.said_at

    def settle(self) -> None:
        """Request a hello, which follows all messages about earlier orders."""
        self.hello()

    def hear(self) -> bool:
        until = time.monotonic() + PATIENCE_S
        while not self.manager.pass_on():
            if time.monotonic() > until:
                return False
            self.manager.receive(0.05)
        return True

    def hello(self, *, welcome: bool = True) -> PilotHello:
        known = len(self.manager.hellos)
        self.manager.welcomes = False
        self.manager.send(HelloAgain())
        self.manager.until(lambda: len(self.manager.hellos) > known, what="a hello")
        self.manager.pass_on()
        hello = self.manager.hellos[-1]
        if welcome:
            self.manager.send(answer_to(hello, lease_s=20.0))
        return hello

    def recipe(self, loads: Loads) -> Recipe:
        self.numbers += 1
        more: dict[str, Any] = {}
        if loads is Loads.NEVER:
            more["needs"] = Needs(load_limit_s=0.5)
        if loads is Loads.FILES:
            file = self.folder / f"object-{self.numbers}"
            file.write_bytes(os.urandom(1000))
            more["objects"] = (make_object_ref(file, digest_cache_file=self.folder / "memo"),)
        return recipe(_load, loads.name, str(self.folder), calls_per_library=10_000 + self.numbers, **more)

    def device(self, number: int) -> tuple[str, int]:
        facts = self.manager.hellos[0].devices[number]
        return facts.device, facts.memory_bytes

    def as_taken(self, order: RunCalls) -> RunCalls:
        specs = [CallSpec(spec.call, payloads.dumps(((str(self.folder), spec.call), {}))) for spec in order.calls]
        return RunCalls(order.library, HOLD.key, specs, order.options, HOLD)

    def let_load(self, library: LibraryId) -> None:
        (self.folder / f"load-{library}").touch()

    def let_end(self, call: CallId, library: LibraryId) -> None:
        (self.folder / f"end-{call}").touch()

    def ignores_stops(self, library: LibraryId, call: CallId) -> None:
        (self.folder / f"deaf-{call}").touch()

    def die(self, library: LibraryId) -> None:
        os.kill(int((self.folder / f"library-{library}").read_text()), signal.SIGKILL)

    def begins(self, call: CallId) -> None:
        self.manager.until(lambda: list(self.folder.glob(f"began-{call}-*")), what=f"call {call} runs")
        self.manager.pass_on()

    def wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.manager.receive(0.02)
        self.manager.pass_on()

    def signal(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def keep_acks(self) -> None:
        self.settle()
        self.manager.acks = False

    def say_acks(self) -> None:
        self.manager.acks = True
        self.manager.send(Ack(self.manager.inbox.last))

    def exit_code(self) -> int:
        self.manager.until(lambda: self.process.poll() is not None, what="the pilot ends")
        self.manager.pass_on()
        return int(self.process.wait())

    def close(self) -> None:
        self.manager.close()


class _Listening(FakeManager):
    def __init__(self, folder: Path, shell: RealAgent) -> None:
        super().__init__(folder)
        self.plans = False
        self._shell = shell
        self._passed = 0

    def pass_on(self) -> bool:
        """True if the pilot has sent a message since the last call."""
        fresh, self._passed = self.said[self._passed :], len(self.said)
        wanted, self.wanted = self.wanted, []
        if wanted:
            fresh.append(WantObjects(tuple(wanted)))
        for message in fresh:
            self._shell.heard(message)
        return bool(fresh)
