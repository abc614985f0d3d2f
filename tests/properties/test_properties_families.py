"""Random events under the policy `arlo`: calls to families in which some runtimes fail to load."""

from __future__ import annotations

import hypothesis.strategies as st
from core.toy import Toy
from hypothesis import HealthCheck, settings
from hypothesis.stateful import Bundle, initialize, rule
from properties.test_properties_core import Manager, times

from stoker.manager.core.seams import Policies
from stoker.manager.policies.arlo import arlo
from stoker.manager.policies.provisioning import TakeWhatComes
from stoker.protocol.calls import Objective

LENGTHS = (10, 20, 40, 80)


def make_policies() -> Policies:
    return arlo(provisioning=TakeWhatComes(), period_s=4.0, latency_s=0.5)


class Families(Manager):
    calls: Bundle[str] = Bundle("calls")

    def __init__(self) -> None:
        super().__init__()
        self.toy = Toy(policies=make_policies, resize_s=0.2)

    @initialize(broken=st.sampled_from((0, 0, 10, 20, 40)), takes_s=times)
    def runtimes(self, broken: int, takes_s: float) -> None:
        for tokens in LENGTHS:
            why = "it does not compile" if tokens == broken else ""
            declares = "3 GB" if tokens == 80 else "2 GB"
            runs_s = takes_s * tokens / 80
            self.toy.context(
                f"r{tokens}", load_s=0.4, declares=declares, broken=why, runs_s=runs_s, longest_input=tokens
            )

    @rule(
        target=calls, tokens=st.sampled_from(LENGTHS), priority=st.integers(0, 1), raises=st.booleans(),
        latency_s=st.sampled_from((0.0, 0.2, 5.0)),
    )  # fmt: skip
    def submit_to_family(self, tokens: int, priority: int, raises: bool, latency_s: float) -> str:
        self.count += 1
        name = f"c{self.count}"
        self._ask(name, tokens=tokens, priority=priority, raises=raises, objective=Objective(latency_s=latency_s))
        return name

    @rule(tokens=st.sampled_from(LENGTHS), count=st.integers(2, 40))
    def submit_many_to_family(self, tokens: int, count: int) -> None:
        names = [f"c{self.count + n + 1}" for n in range(count)]
        self.count += count
        self._ask(*names, tokens=tokens)

    @rule(tokens=st.sampled_from(LENGTHS))
    def submit_poison_to_family(self, tokens: int) -> None:
        self.count += 1
        self._ask(f"c{self.count}", tokens=tokens, kills=True)

    @rule(tokens=st.sampled_from(LENGTHS), failed_by=st.sampled_from(("node", "device")))
    def submit_to_family_what_the_infrastructure_fails(self, tokens: int, failed_by: str) -> None:
        self.count += 1
        self._ask(f"c{self.count}", tokens=tokens, failed_by=failed_by)

    def _ask(self, *names: str, tokens: int, **how: object) -> None:
        serving = tuple(f"r{length}" for length in LENGTHS if length >= tokens)
        self.toy.call(*names, context=serving[0], variants=serving[1:], **how)  # type: ignore[arg-type]


TestFamilies = Families.TestCase
TestFamilies.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
