from __future__ import annotations

from typing import Any

import msgspec
import pytest
from core.builders import Cluster, devices, recipe

from stoker.contexts.recipe import NO_LIMITS, LibraryLimits
from stoker.contexts.step_times import StepSample, times_of
from stoker.manager.core.events import AdviceArrived, AskAdvice, ContextAdvice, CostAdvice
from stoker.manager.core.nouns import Library, LibraryState
from stoker.manager.policies.provisioning import TakeWhatComes
from stoker.manager.policies.slinfer import slinfer
from stoker.protocol import to_manager as say
from stoker.protocol import to_pilot
from stoker.protocol.calls import Features, Objective

GB = 10**9
STEPS = times_of(
    [StepSample(True, 2**power, 2**power / 2, 0.001 * 2**power) for power in range(12)]
    + [StepSample(False, rows, length, 0.05) for rows in (1, 64) for length in (8, 4096)]
)
"""Step times: 1 ms to read a token, 50 ms for a decode step."""
SOON = Objective(ttft_s=1.0, tpot_s=0.25)


class Lab(Cluster):
    """A GPU with memory for one model of 4 GB, its cache, and 1 GB that a sleeping library keeps."""

    def __init__(self, *, memory: str = "7 GB", sleepers: str = "20 GB", kind: str = "gpu") -> None:
        super().__init__(policies=lambda: slinfer(provisioning=TakeWhatComes()))
        [facts] = devices(1, kind=kind, memory=memory)
        self.join("p1", of=(msgspec.structs.replace(facts, process_bytes=GB),), sleepers=sleepers)

    def models(self, *names: str, limits: LibraryLimits = NO_LIMITS) -> Lab:
        for name in names:
            model = recipe(name, slots=64, device_memory_bytes=5 * GB, token_bytes=1_000_000, cache_tokens=1000)
            self.define(msgspec.structs.replace(model, limits=limits))
        return self

    def ask(self, *names: str, context: str = "a", objective: Objective = SOON) -> Lab:
        for name in names:
            self.call(name, context=context, features=Features(1, 10, 10), objective=objective)
            for command in [each for each in self.others if isinstance(each, AskAdvice)]:
                self.others.remove(command)
                self.event(AdviceArrived(command.about, CostAdvice({"gpu": ContextAdvice(steps=STEPS)})))
        return self

    def loads(self, context: str, *, load_s: float = 10.0, sleeps: bool = True) -> Lab:
        start = self.hears("p1", to_pilot.StartLibrary)
        assert start.recipe.key == context
        ready = say.LibraryReady(start.library, 0.1, load_s, 6 * GB, 6 * GB, 6 * GB, slots=64, sleeps=sleeps)
        self.report("p1", ready)
        return self

    def served(self, name: str, *, context: str = "a", **how: Any) -> Lab:
        self.ask(name, context=context).loads(context, **how)
        assert self.names[self.hears("p1", to_pilot.RunCalls).calls[0].call] == name
        self.end(name)
        return self

    def idle(self, *, seconds: float = 1.5) -> Lab:
        self.wait(seconds)
        return self


def of(lab: Lab, name: str = "a") -> Library:
    return lab.library(context=name)


def test_instance_without_calls_sleeps_on_a_gpu() -> None:
    lab = Lab().models("a").served("x").idle()
    assert lab.hears("p1", to_pilot.SleepLibrary).library == of(lab).id
    assert of(lab).state is LibraryState.ASLEEP


@pytest.mark.parametrize("lacks", ["host memory", "sleep", "a faster wake"])
def test_instance_that_cannot_sleep_ends(lacks: str) -> None:
    lab = Lab(sleepers="1 GB" if lacks == "host memory" else "20 GB").models("a")
    lab.served("x", sleeps=lacks != "sleep")
    if lacks == "a faster wake":
        lab.context("a").wake_s = 20.0
    lab.idle()
    assert lab.hears("p1", to_pilot.StopLibrary).library == of(lab).id


def test_sleeping_instance_wakes_for_a_call_and_gets_it() -> None:
    lab = Lab().models("a").served("x").idle()
    lab.asleep(of(lab), keeps="1 GB", host="5 GB").forget()
    lab.ask("y")
    assert lab.hears("p1", to_pilot.WakeLibrary).library == of(lab).id
    lab.ask("z").wait(0.3).nothing_else_was_said()  # both calls wait for the instance that wakes
    lab.awake(of(lab), wake_s=0.3)
    assert [lab.names[lab.hears("p1", to_pilot.RunCalls).calls[0].call] for _ in range(2)] == ["y", "z"]
    assert (lab.context("a").loads, lab.context("a").wake_s) == (1, 0.3)


def test_time_of_a_wake_counts_as_load_time_of_its_calls() -> None:
    lab = Lab().models("a").served("x").idle()
    lab.asleep(of(lab), keeps="1 GB", host="5 GB").forget()
    lab.ask("y").hears("p1", to_pilot.WakeLibrary)
    lab.wait(3.0)  # three times the objective for the first token
    assert "y" not in lab.ended
    lab.awake(of(lab), wake_s=3.0)
    assert lab.hears("p1", to_pilot.RunCalls).waited_s == pytest.approx(0.0, abs=0.2)
    lab.end("y").idle().asleep(of(lab), keeps="1 GB", host="5 GB").forget()
    lab.ask("z").wait(4.5)  # the last load took 10 s, and the last wake 3 s
    assert "z" not in lab.ended, "as long as the wake takes, its calls have time"


def test_idle_instance_sleeps_to_free_memory() -> None:
    lab = Lab(memory="8 GB").models("a", "b").served("x").ask("y", context="b")
    assert lab.hears("p1", to_pilot.SleepLibrary).library == of(lab).id
    lab.asleep(of(lab), keeps="1 GB", host="5 GB").loads("b").hears("p1", to_pilot.RunCalls)
    lab.end("y").ask("z")
    assert lab.hears("p1", to_pilot.SleepLibrary).library == of(lab, "b").id
    assert lab.hears("p1", to_pilot.WakeLibrary).library == of(lab).id


def test_sleeping_instance_ends_if_its_remaining_memory_is_needed() -> None:
    lab = Lab(memory="5.9 GB").models("a", "b").served("x").idle()
    lab.asleep(of(lab), keeps="1 GB", host="5 GB").forget()
    lab.ask("y", context="b")
    assert lab.hears("p1", to_pilot.StopLibrary).library == of(lab).id
    lab.loads("b")


def test_sleeping_instance_on_a_busy_gpu_stays_asleep_for_late_calls() -> None:
    lab = Lab(memory="20 GB").models("a", "b").served("x").idle()
    lab.asleep(of(lab), keeps="1 GB", host="5 GB").forget()
    hurried = Objective(ttft_s=0.2, tpot_s=0.08)
    lab.ask("y", context="b", objective=hurried).loads("b").hears("p1", to_pilot.RunCalls)
    lab.ask("z", objective=hurried)  # a decode step of both takes 110 ms
    assert not lab.mail.get("p1")
    lab.end("y").wait(0.15)
    assert lab.hears("p1", to_pilot.WakeLibrary).library == of(lab).id


def test_minimum_number_of_instances_is_woken_first() -> None:
    lab = Lab().models("a").served("x").idle()
    lab.asleep(of(lab), keeps="1 GB", host="5 GB").forget()
    lab.define(msgspec.structs.replace(lab.context("a").recipe, limits=LibraryLimits(least=1))).wait(0.3)
    assert lab.hears("p1", to_pilot.WakeLibrary).library == of(lab).id
    lab.awake(of(lab)).wait(30)
    lab.nothing_else_was_said()


def test_own_keep_alive_puts_an_instance_to_sleep() -> None:
    lab = Lab().models("a", limits=LibraryLimits(keep_alive_s=20.0)).served("x").idle(seconds=19)
    lab.nothing_else_was_said()
    lab.wait(2)
    assert lab.hears("p1", to_pilot.SleepLibrary).library == of(lab).id


def test_model_that_only_sleeps_is_not_reported_as_too_large() -> None:
    lab = Lab().models("a").served("x").idle()
    lab.forget().ask("y").wait(0.5)  # the instance falls asleep: its pilot has not answered yet
    assert "y" not in lab.ended
    lab.asleep(of(lab), keeps="1 GB", host="5 GB").wait(0.2)
    assert lab.hears("p1", to_pilot.WakeLibrary).library == of(lab).id
