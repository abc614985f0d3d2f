"""Every pilot gets its objects while pilots join, leave, fail, report wrongly and disconnect in any order.

`validate` checks the plan after every event: no pilot fetches from itself, one pilot reads the origin of each object,
every waiting pilot is queued. At the end every remaining pilot has its objects if any pilot can read their origin.
"""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
from core.swarm import PART_BYTES, Swarm, SwarmPilot
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from stoker.contexts.recipe import ObjectRef
from stoker.protocol import to_manager as say

REFS = tuple(ObjectRef(f"file-{n}", (1, 3, 9, 30)[n] * PART_BYTES, f"/models/{n}") for n in range(4))
MOST_PILOTS = 24
MOST_BLIND = 7  # Failed pilots after which the manager orders no other pilot to read an origin

chances = st.randoms(use_true_random=False)


class Transfers(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.swarm = Swarm(rate=40e6, fail_s=0.3)
        self.count = self.blind = 0

    @initialize()
    def world(self) -> None:
        self.pilots_join(count=3, serves=True)

    def here(self) -> list[str]:
        return sorted(name for name in self.swarm.pilots if name not in self.swarm.unsaid)

    # ---- actions of pilots
    @precondition(lambda self: len(self.swarm.pilots) < MOST_PILOTS)
    @rule(count=st.integers(1, 4), serves=st.booleans() | st.just(True), cache=st.sampled_from(("", "", "h1", "h2")))
    def pilots_join(self, count: int, serves: bool, cache: str = "") -> None:
        names = [f"p{self.count + n}" for n in range(count)]
        self.count += count
        self.swarm.join(*names, serves=serves, cache=cache)

    @rule(chance=chances, count=st.integers(1, 8), refs=st.sets(st.sampled_from(REFS), min_size=1))
    def pilots_want(self, chance: Any, count: int, refs: set[ObjectRef]) -> None:
        for name in chance.sample(self.here(), min(count, len(self.here()))):
            self.swarm.want(name, refs=[ref for ref in REFS if ref in refs])

    @precondition(lambda self: self.here())
    @rule(chance=chances, ref=st.sampled_from(REFS))
    def pilot_evicts(self, chance: Any, ref: ObjectRef) -> None:
        self.swarm.evict(chance.choice(self.here()), ref)

    # ---- losses
    @precondition(lambda self: self.here())
    @rule(chance=chances)
    def pilot_dies(self, chance: Any) -> None:
        self.swarm.kill(chance.choice(self.here()))

    @precondition(lambda self: len(self.here()) > 1)
    @rule(chance=chances, busy_s=st.sampled_from((0.0, 3.0, 300.0)))
    def pilot_leaves(self, chance: Any, busy_s: float) -> None:
        self.swarm.drain(chance.choice(self.here()), busy_s=busy_s)

    @precondition(lambda self: self.here())
    @rule(chance=chances)
    def pilot_is_cut(self, chance: Any) -> None:
        self.swarm.cut(chance.choice(self.here()))

    @precondition(lambda self: self.swarm.unsaid)
    @rule(chance=chances)
    def pilot_comes_back(self, chance: Any) -> None:
        self.swarm.join(chance.choice(sorted(self.swarm.unsaid)))

    @precondition(lambda self: self.here())
    @rule(chance=chances)
    def pilot_turns_bad(self, chance: Any) -> None:
        self.swarm.pilots[chance.choice(self.here())].corrupt = True

    @precondition(lambda self: self.here() and self.blind < MOST_BLIND)
    @rule(chance=chances)
    def pilot_turns_blind(self, chance: Any) -> None:
        self.blind += 1
        self.swarm.pilots[chance.choice(self.here())].blind = True

    @precondition(lambda self: len(self.here()) > 1)
    @rule(chance=chances, alone=st.booleans())
    def a_wall_is_built(self, chance: Any, alone: bool) -> None:
        self.swarm.wall(*chance.sample(self.here(), 1 if alone else 2))

    @rule(seconds=st.sampled_from((0.05, 0.2, 1.0, 5.0)))
    def wait(self, seconds: float) -> None:
        self.swarm.run(until=self.swarm.now + seconds)

    @precondition(lambda self: self.here())
    @rule(chance=chances, ref=st.sampled_from(REFS), which=st.integers(0, 3))
    def noise(self, chance: Any, ref: ObjectRef, which: int) -> None:
        name, other = chance.choice(self.here()), chance.choice([*self.here(), "nobody"])
        if ref.name in self.swarm.pilots[name].getting:
            return
        strange: Any = (
            say.FetchFailed(ref.name, (other,), reason="late"),
            say.FetchFailed("file-never", (), True, "late"),
            say.ObjectsGone(("file-never",)),
            say.WantObjects(()),
        )[which]
        self.swarm.report(name, strange)

    @precondition(lambda self: self.near())
    @rule(chance=chances)
    def does_not_find_it_in_its_cache(self, chance: Any) -> None:
        """Report that a source in the same cache failed, even if a later order does not name this source."""
        name, near = chance.choice(self.near())
        ref = chance.choice(sorted(self.swarm.pilots[name].getting))
        self.swarm.report(name, say.FetchFailed(ref, (near,), reason="it is not there"))

    def near(self) -> list[tuple[str, Any]]:
        """Return pairs of a pilot that fetches an object and another pilot of the same cache."""
        pilots = [self.swarm.pilots[name] for name in self.here()]
        pairs = ((one, other) for one in pilots for other in pilots if one is not other and one.getting)
        return [(one.name, other.name) for one, other in pairs if one.parts is other.parts]

    # ---- the end
    def teardown(self) -> None:
        if not self.swarm.pilots:
            return
        self.swarm.join(*sorted(self.swarm.unsaid))
        self.swarm.run()
        stuck = self.swarm.waiting()
        assert not stuck, f"{stuck} were never served"
        for pilot in self.swarm.pilots.values():
            for name in pilot.gave_up:
                assert pilot.blind or name in pilot.done, f"{pilot.name} was told that nobody can give it {name}"
        self.everybody_is_served_in_the_end()
        self.swarm.check()

    def everybody_is_served_in_the_end(self) -> None:
        fresh: list[SwarmPilot] = []
        for n in range(3):
            self.swarm.join(f"last{n}")
            fresh.append(self.swarm.pilots[f"last{n}"])
        self.swarm.want(*(pilot.name for pilot in fresh), refs=REFS).run()
        assert all(pilot.complete(ref) for pilot in fresh for ref in REFS)


TestTransfers = Transfers.TestCase
TestTransfers.settings = settings(
    max_examples=30, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
