"""A cluster under the policy `slinfer`; the test acts as the pilots."""

from __future__ import annotations

from typing import Any

import msgspec
from core.builders import Cluster, devices, recipe

from stoker.contexts.recipe import NO_LIMITS, LibraryLimits
from stoker.contexts.step_times import StepSample, group_samples
from stoker.manager.core.events import AdviceArrived, AskAdvice, ContextAdvice, CostAdvice
from stoker.manager.core.nouns import Library
from stoker.manager.policies.provisioning import ExternalPilots
from stoker.manager.policies.slinfer import slinfer
from stoker.protocol import to_pilot
from stoker.protocol.calls import Features, Objective

GB = 1_000_000_000
SOON = Objective(ttft_s=1.0, tpot_s=0.25)
STEPS = group_samples(
    [StepSample(True, 2**power, 2**power / 2, 0.001 * 2**power) for power in range(12)]
    + [StepSample(False, rows, length, 0.05) for rows in (1, 64) for length in (8, 4096)]
)
"""Step times: 1 ms to read a token, 50 ms for a decode step."""


class SlinferLab(Cluster):
    """A cluster with models `a`, `b`, ... of 4 GB, each with a cache of 1 GB for 1,000 tokens."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(policies=lambda: slinfer(provisioning=ExternalPilots(), **settings))

    def models(self, *names: str, limits: LibraryLimits = NO_LIMITS) -> Any:
        for name in names:
            model = recipe(name, slots=64, device_memory_bytes=5 * GB, token_bytes=1_000_000, cache_tokens=1000)
            self.define(msgspec.structs.replace(model, limits=limits))
        return self

    def pilot_of(self, name: str, kind: str, memory: str = "20 GB") -> Any:
        return self.join(name, of=devices(1, kind=kind, memory=memory))

    def ask(
        self, *names: str, context: str = "a", prompt: int = 100, output: int = 100, objective: Objective = SOON
    ) -> Any:  # fmt: skip
        """Submit calls one after the other; step times are known for every kind of device."""
        for name in names:
            self.call(name, context=context, features=Features(1, prompt, output, 0.0), objective=objective)
            for command in [each for each in self.others if isinstance(each, AskAdvice)]:
                self.others.remove(command)
                kinds = {kind: ContextAdvice(steps=STEPS) for kind in ("cpu", "gpu")}
                self.event(AdviceArrived(command.about, CostAdvice(kinds)))
        return self

    def offered(self, pilot: str = "p1") -> tuple[str, float]:
        order = self.hears(pilot, to_pilot.RunCalls)
        assert order.offer
        return self.names[order.calls[0].call], order.reserve_bytes / GB

    def of(self, context: str = "a") -> Library:
        return self.library(context=context)
