"""Invariants of the core hold under random events, and equal events give equal commands.

Rules act on the toy cluster. Noise is repeated or early frames, and messages about unknown objects. `validate` runs
after every event. At the end every accepted call has ended once, and the test replays the events.
"""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
from core.desk import SESSION, picture
from core.toy import Toy
from hypothesis import HealthCheck, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule
from policies import stubs

from stoker.manager.core.events import FromClient, FromPilot, ManagerRestarted, TimerFired
from stoker.manager.core.seams import Policies
from stoker.protocol import to_manager as say
from stoker.protocol import wire
from stoker.protocol.calls import CallEnd, CallProgress

CONTEXTS = ("bare", "small", "large", "once", "slots", "sleepy", "drowsy")
times = st.sampled_from((0.0, 0.001, 0.01, 0.3, 2.0, 7.0))


def make_policies() -> Policies:
    return stubs.policies(dispatch=stubs.Preempt())


class Manager(RuleBasedStateMachine):
    calls: Bundle[str] = Bundle("calls")

    def __init__(self) -> None:
        super().__init__()
        self.toy = Toy(policies=make_policies, resize_s=0.2)
        self.count = 0

    @initialize()
    def world(self) -> None:
        self.toy.context("small", load_s=0.5, memory="2 GB").context("large", load_s=2.0, declares="7 GB")
        for name in ("sleepy", "drowsy"):  # a device fits both only if one sleeps
            self.toy.context(name, load_s=1.0, memory="1 GB", declares="6 GB", sleeps=True)
        self.toy.context("once", load_s=0.2, calls_per_library=1).context("slots", load_s=0.5, slots=3)
        self.toy.pilot("p0", devices=2)

    # ---- clients
    @rule(
        target=calls, context=st.sampled_from(CONTEXTS), run_s=times, priority=st.integers(0, 2), raises=st.booleans(),
        gang=st.sampled_from(((1, 1), (1, 1), (1, 2), (2, 2))),
    )  # fmt: skip
    def submit(self, context: str, run_s: float, priority: int, raises: bool, gang: tuple[int, int]) -> str:
        self.count += 1
        name = f"c{self.count}"
        gang = (1, 1) if context == "once" else gang
        self.toy.call(name, context=context, run_s=run_s, priority=priority, raises=raises, gang=gang, step_s=0.5)
        return name

    @rule(context=st.sampled_from(CONTEXTS), count=st.integers(2, 30))
    def submit_many(self, context: str, count: int) -> None:
        names = [f"c{self.count + n + 1}" for n in range(count)]
        self.count += count
        self.toy.call(*names, context=context, run_s=0.001)

    @rule(context=st.sampled_from(CONTEXTS))
    def submit_poison(self, context: str) -> None:
        self.count += 1
        self.toy.call(f"c{self.count}", context=context, run_s=0.1, kills=True)

    @rule(context=st.sampled_from(CONTEXTS), failed_by=st.sampled_from(("node", "device")), saves=st.booleans())
    def submit_what_the_infrastructure_fails(self, context: str, failed_by: str, saves: bool) -> None:
        self.count += 1
        self.toy.call(f"c{self.count}", context=context, run_s=0.1, failed_by=failed_by, step_s=0.04 * saves)

    @rule(call=consumes(calls), running=st.booleans(), ignored=st.booleans())
    def cancel(self, call: str, running: bool, ignored: bool) -> None:
        self.toy.ignore_stops = ignored
        self.toy.tell(say.Cancel([self.toy.ids[call]], running))  # type: ignore[list-item]

    @rule(acknowledged=st.floats(0, 1))
    def client_comes_back(self, acknowledged: float) -> None:
        had = int(len(self.toy.ended) * acknowledged)
        self.toy.tell(say.ClientHello(wire.VERSION, SESSION, had), numbered=False)
        self.toy.tell(say.Received(had))

    # ---- time and pilots
    @rule(seconds=times)
    def wait(self, seconds: float) -> None:
        self.toy.run(until=self.toy.now + seconds)

    @precondition(lambda self: len(self.toy.core.state.pilots) < 4)
    @rule(devices=st.integers(1, 2), block=st.sampled_from(("", "b1")))
    def pilot_joins(self, devices: int, block: str) -> None:
        self.toy.pilot(f"p{len(self.toy.pilots)}", devices=devices, block=block)

    @precondition(lambda self: self.toy.core.state.pilots)
    @rule(chance=st.randoms(use_true_random=False), gap=times)
    def pilot_is_cut(self, chance: Any, gap: float) -> None:
        name = chance.choice(sorted(self.toy.core.state.pilots))
        if self.toy.links[name]:
            self.toy.cut(name, back_after=gap + 0.001)

    @precondition(lambda self: self.toy.core.state.pilots)
    @rule(chance=st.randoms(use_true_random=False))
    def pilot_dies(self, chance: Any) -> None:
        self.toy.kill(chance.choice(sorted(self.toy.core.state.pilots)))

    @rule()
    def block_is_released(self) -> None:
        self.toy.tell(say.ReleaseBlock("b1"))

    @rule()
    def manager_restarts(self) -> None:
        """Restart the manager: lose messages in transit and reconnect all peers."""
        for name in [name for name in self.toy.core.state.pilots if self.toy.links[name]]:
            self.toy.links[name] = 0
            self.toy.after(0.1, lambda name=name: self.toy._connect(self.toy.pilots[name]))  # type: ignore[misc]
        self.toy._event(ManagerRestarted())
        self.toy.tell(say.ClientHello(wire.VERSION, SESSION, len(self.toy.ended)), numbered=False)

    # ---- noise
    @precondition(lambda self: any(event.sequence for event in self.frames()))
    @rule(chance=st.randoms(use_true_random=False), skip=st.integers(0, 3))
    def a_frame_comes_again_or_too_early(self, chance: Any, skip: int) -> None:
        event = chance.choice([event for event in self.frames() if event.sequence])
        early = type(event)(_sender(event), event.sequence + 1000 * skip, event.messages)
        self.changes_nothing(early)

    @rule(library=st.integers(0, 40), call=st.integers(0, 40), which=st.integers(0, 7))
    def a_strange_message(self, library: int, call: int, which: int) -> None:
        strange: Any = (
            say.CallsEnded(library, [CallEnd(call + 10_000, True)]),  # type: ignore[arg-type]
            say.CallsReturned(library + 999_500, (call,)),  # type: ignore[arg-type]
            say.LibraryReady(library + 999_500, 1.0, 1.0),  # type: ignore[arg-type]
            say.LibraryGone(library + 999_500),  # type: ignore[arg-type]
            say.CallsProgress(library, [CallProgress(call + 10_000)]),  # type: ignore[arg-type]
            say.CallEvicted(library + 999_500, CallProgress(call)),  # type: ignore[arg-type]
            say.LibraryResized(library, 2**60),  # type: ignore[arg-type]
            say.Heartbeat(),
        )[which]
        here = sorted(self.toy.core.state.pilots)
        if here and which not in (0, 4):
            self.changes_nothing(FromPilot(here[0], 0, [strange]))  # type: ignore[arg-type]
        self.changes_nothing(FromPilot("nobody", 0, [strange]))  # type: ignore[arg-type]

    @rule(key=st.sampled_from(("residency/nothing", "nobody/x", "dispatch/x")))
    def a_timer_that_nobody_set(self, key: str) -> None:
        self.changes_nothing(TimerFired(key))

    def frames(self) -> list[FromPilot | FromClient]:
        return [event for _, event in self.toy.past if isinstance(event, FromPilot | FromClient)]

    def changes_nothing(self, event: Any) -> None:
        before = picture(self.toy.core)
        self.toy._carry_out(self.toy.give(event))
        after = picture(self.toy.core)
        before["counts"], after["counts"] = before["counts"][:-1], after["counts"][:-1]
        assert before == after

    # ---- invariants
    @invariant()
    def every_open_call_is_known(self) -> None:
        open_calls = {self.toy.names[id] for id in self.toy.core.state.calls}
        assert open_calls | set(self.toy.ended) == set(self.toy.ids)
        assert not open_calls & set(self.toy.ended)

    def teardown(self) -> None:
        self.toy.pilot("last", devices=2)
        self.toy.run(limit_s=5000)
        assert set(self.toy.ended) == set(self.toy.ids)
        self.toy.check()


def _sender(event: FromPilot | FromClient) -> Any:
    return event.pilot if isinstance(event, FromPilot) else event.client


TestManager = Manager.TestCase
TestManager.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
