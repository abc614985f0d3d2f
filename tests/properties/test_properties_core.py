"""Invariants of the core hold under random events, and equal events give equal commands.

Rules act on the toy cluster. Noise is repeated or early frames, and messages about unknown objects. `check_state` runs
after every rule. At the end every accepted call has ended once, and the test replays the events.
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
from stoker.manager.policies.arlo import arlo
from stoker.manager.policies.prompt_tuner import prompt_tuner
from stoker.manager.policies.provisioning import ExternalPilots
from stoker.manager.sim.validate import check_state
from stoker.protocol import to_manager as say
from stoker.protocol import wire
from stoker.protocol.calls import CallEnd, CallProgress, Objective

CONTEXTS = ("bare", "small", "large", "once", "slots", "sleepy", "drowsy")
LENGTHS = (10, 20, 40, 80)
TUNER = st.fixed_dictionaries(
    {},
    optional={
        "delay": st.booleans(), "together": st.booleans(), "reuse": st.booleans(), "early": st.booleans(),
        "window_s": st.sampled_from((0.5, 60.0)),
    },
)  # fmt: skip
"""Settings of `prompt_tuner`."""
HARMS: tuple[dict[str, Any], ...] = (
    {}, {}, {}, {"raises": True}, {"kills": True}, {"failed_by": "node"}, {"failed_by": "device"},
)  # fmt: skip
times = st.sampled_from((0.0, 0.001, 0.01, 0.3, 2.0, 7.0))
counts = st.one_of(st.just(1), st.integers(1, 30))


def make_policies(name: str, how: dict[str, Any]) -> Policies:
    match name:
        case "preempt":
            return stubs.policies(dispatch=stubs.Preempt())
        case "arlo":
            return arlo(provisioning=ExternalPilots(), period_s=4.0, latency_s=0.5)
        case _:
            return stubs.fewer_rounds(prompt_tuner(provisioning=ExternalPilots(), **how))


class Pilots(RuleBasedStateMachine):
    """Pilots that join, disconnect and die."""

    toy: Toy

    @rule(seconds=times)
    def wait(self, seconds: float) -> None:
        self.toy.run(until=max(1e-6, self.toy.now + seconds))

    @precondition(lambda self: sum(pilot.alive for pilot in self.toy.pilots.values()) < 3)
    @rule(devices=st.integers(1, 2), block=st.sampled_from(("", "b1")))
    def pilot_joins(self, devices: int, block: str) -> None:
        self.toy.pilot(f"p{len(self.toy.pilots)}", devices=devices, block=block)

    @precondition(lambda self: self.toy.core.state.pilots)
    @rule(chance=st.randoms(use_true_random=False), gap=st.sampled_from((0.0, 0.01, 1.0, 30.0)))
    def pilot_is_cut(self, chance: Any, gap: float) -> None:
        name = chance.choice(sorted(self.toy.core.state.pilots))
        if self.toy.links.get(name):
            self.toy.cut(name, back_after=gap + 0.001)

    @precondition(lambda self: self.toy.core.state.pilots)
    @rule(chance=st.randoms(use_true_random=False))
    def pilot_dies(self, chance: Any) -> None:
        self.toy.kill(chance.choice(sorted(self.toy.core.state.pilots)))

    @invariant()
    def state_is_valid(self) -> None:
        check_state(self.toy.core.state)


class Manager(Pilots):
    calls: Bundle[str] = Bundle("calls")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    @initialize(
        name=st.sampled_from(("preempt", "arlo", "tuner")), how=TUNER, broken=st.sampled_from((0, 0, *LENGTHS[:3])),
        takes_s=times,
    )  # fmt: skip
    def world(self, name: str, how: dict[str, Any], broken: int, takes_s: float) -> None:
        """Make contexts; under `arlo` also a family, of which one runtime may fail to load."""
        self.has_family = name == "arlo"
        self.toy = Toy(policies=lambda: make_policies(name, how), resize_s=0.2, validates=False)
        self.toy.context("small", load_s=0.5, memory="2 GB").context("large", load_s=2.0, declares="7 GB")
        for context in ("sleepy", "drowsy"):  # a device holds both contexts only if one of them sleeps
            self.toy.context(context, load_s=1.0, memory="1 GB", declares="6 GB", sleeps=True)
        self.toy.context("once", load_s=0.2, calls_per_library=1).context("slots", load_s=0.5, slots=3)
        for tokens in LENGTHS if self.has_family else ():
            self.toy.context(
                f"r{tokens}", load_s=0.4, declares="3 GB" if tokens == LENGTHS[-1] else "2 GB",
                broken="it does not compile" if tokens == broken else "", runs_s=takes_s * tokens / 80,
                longest_input=tokens,
            )  # fmt: skip
        self.toy.pilot("p0", devices=2)

    # ---- clients
    def submitted(self, count: int, **how: Any) -> str:
        names = [f"c{self.count + n + 1}" for n in range(count)]
        self.count += count
        self.toy.call(*names, **how)
        return names[0]

    @rule(
        target=calls, count=counts, context=st.sampled_from(CONTEXTS), run_s=times, priority=st.integers(0, 2),
        gang=st.sampled_from(((1, 1), (1, 1), (1, 2), (2, 2), (2, 4))), harm=st.sampled_from(HARMS),
        saves=st.booleans(), due_in_s=st.sampled_from((None, None, 1.0, 8.0)), drop_late=st.booleans(),
    )  # fmt: skip
    def submit(
        self, count: int, context: str, run_s: float, priority: int, gang: tuple[int, int], harm: dict[str, Any],
        saves: bool, due_in_s: float | None, drop_late: bool,
    ) -> str:  # fmt: skip
        gang = (1, 1) if context == "once" or count > 1 else gang
        run_s = run_s if count == 1 else 0.001
        due = {} if due_in_s is None else {"deadline_at": self.toy.now + due_in_s, "drop_late": drop_late}
        how = {"run_s": run_s, "priority": priority, "gang": gang, "step_s": 0.04 * saves, **harm}
        return self.submitted(count, context=context, objective=Objective(**due), shared=gang[1] > 1, **how)

    @precondition(lambda self: self.has_family)
    @rule(
        target=calls, count=counts, tokens=st.sampled_from(LENGTHS), priority=st.integers(0, 1),
        latency_s=st.sampled_from((0.0, 0.2, 5.0)), harm=st.sampled_from(HARMS),
    )  # fmt: skip
    def submit_to_family(self, count: int, tokens: int, priority: int, latency_s: float, harm: dict[str, Any]) -> str:
        serving = tuple(f"r{length}" for length in LENGTHS if length >= tokens)
        how = {"variants": serving[1:], "priority": priority, "objective": Objective(latency_s=latency_s), **harm}
        return self.submitted(count, context=serving[0], **how)

    @rule(call=consumes(calls), running=st.booleans(), ignored=st.booleans())
    def cancel(self, call: str, running: bool, ignored: bool) -> None:
        self.toy.ignore_stops = ignored
        self.toy.tell(say.Cancel([self.toy.ids[call]], running))

    @rule(acknowledged=st.floats(0, 1))
    def client_comes_back(self, acknowledged: float) -> None:
        had = int(len(self.toy.ended) * acknowledged)
        self.toy.tell(say.ClientHello(wire.VERSION, SESSION, had), numbered=False)
        self.toy.tell(say.Received(had))

    @rule()
    def block_is_released(self) -> None:
        self.toy.tell(say.ReleaseBlock("b1"))

    @rule()
    def manager_restarts(self) -> None:
        """Restart the manager: lose messages in transit and reconnect all peers."""
        for name in [name for name in self.toy.core.state.pilots if self.toy.links[name]]:
            self.toy.links[name] = 0
            self.toy.after(0.1, lambda name=name: self.toy._connect(self.toy.pilots[name]))
        self.toy._event(ManagerRestarted())
        self.toy.tell(say.ClientHello(wire.VERSION, SESSION, len(self.toy.ended)), numbered=False)

    # ---- noise
    @precondition(lambda self: any(event.sequence for event in self.frames()))
    @rule(chance=st.randoms(use_true_random=False), skip=st.integers(0, 3))
    def a_frame_comes_again_or_too_early(self, chance: Any, skip: int) -> None:
        event = chance.choice([event for event in self.frames() if event.sequence])
        sender = event.pilot if isinstance(event, FromPilot) else event.client
        self.changes_nothing(type(event)(sender, event.sequence + 1000 * skip, event.messages))

    @rule(library=st.integers(0, 40), call=st.integers(0, 40), which=st.integers(0, 7))
    def a_strange_message(self, library: int, call: int, which: int) -> None:
        strange: Any = (
            say.CallsEnded(library, [CallEnd(call + 10_000, True)]),
            say.CallsReturned(library + 999_500, (call,)),
            say.LibraryReady(library + 999_500, 1.0, 1.0),
            say.LibraryGone(library + 999_500),
            say.CallsProgress(library, [CallProgress(call + 10_000)]),
            say.CallEvicted(library + 999_500, CallProgress(call)),
            say.LibraryResized(library, 2**60),
            say.Heartbeat(),
        )[which]
        here = sorted(self.toy.core.state.pilots)
        if here and which not in (0, 4):
            self.changes_nothing(FromPilot(here[0], 0, [strange]))
        self.changes_nothing(FromPilot("nobody", 0, [strange]))

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


TestManager = Manager.TestCase
TestManager.settings = settings(
    max_examples=120, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
