from __future__ import annotations

from typing import Any

import msgspec
import pytest
from core.builders import devices
from policies.slinfer_lab import GB, SlinferLab

from stoker.contexts.recipe import LibraryLimits
from stoker.manager.core.nouns import LibraryState
from stoker.protocol import to_manager as say
from stoker.protocol import to_pilot
from stoker.protocol.calls import Objective


class Lab(SlinferLab):
    """A GPU with memory for one model of 4 GB, its cache, and 1 GB that a sleeping library keeps."""

    def __init__(self, *, memory: str = "7 GB", sleepers: str = "20 GB") -> None:
        super().__init__()
        [facts] = devices(1, kind="gpu", memory=memory)
        self.join("p1", of=(msgspec.structs.replace(facts, process_bytes=GB),), sleepers=sleepers)

    def ask(self, *names: str, **how: Any) -> Lab:
        super().ask(*names, prompt=10, output=10, **how)
        return self

    def loads(self, context: str, *, load_s: float = 10.0, sleeps: bool = True) -> Lab:
        start = self.hears("p1", to_pilot.StartLibrary)
        assert start.recipe.key == context
        ready = say.LibraryReady(start.library, 0.1, load_s, 6 * GB, 6 * GB, 6 * GB, slots=64, sleeps=sleeps)
        self.report("p1", ready)
        return self

    def served(self, name: str, *, context: str = "a", **how: Any) -> Lab:
        self.ask(name, context=context).loads(context, **how)
        assert self.offered()[0] == name
        self.end(name)
        return self

    def idle(self, *, seconds: float = 1.5) -> Lab:
        self.wait(seconds)
        return self


def test_instance_without_calls_sleeps_on_a_gpu() -> None:
    lab = Lab().models("a").served("x").idle()
    assert lab.hears("p1", to_pilot.SleepLibrary).library == lab.of().id
    assert lab.of().state is LibraryState.ASLEEP


def test_sleeping_instance_wakes_for_a_call_and_receives_the_call() -> None:
    lab = Lab().models("a").served("x").idle()
    lab.asleep(lab.of(), keeps="1 GB", host="5 GB").forget()
    lab.ask("y")
    assert lab.hears("p1", to_pilot.WakeLibrary).library == lab.of().id
    lab.ask("z").wait(0.3).nothing_else_was_said()  # both calls wait for the instance that wakes
    lab.awake(lab.of(), wake_s=0.3)
    assert [lab.offered()[0] for _ in range(2)] == ["y", "z"]
    assert (lab.context("a").loads, lab.context("a").wake_s) == (1, 0.3)


def test_wake_time_counts_as_load_time_of_the_waiting_calls() -> None:
    lab = Lab().models("a").served("x").idle()
    lab.asleep(lab.of(), keeps="1 GB", host="5 GB").forget()
    lab.ask("y").hears("p1", to_pilot.WakeLibrary)
    lab.wait(3.0)  # 3 s is three times the objective for the first token
    assert "y" not in lab.ended
    lab.awake(lab.of(), wake_s=3.0)
    assert lab.hears("p1", to_pilot.RunCalls).waited_s == pytest.approx(0.0, abs=0.2)
    lab.end("y").idle().asleep(lab.of(), keeps="1 GB", host="5 GB").forget()
    lab.ask("z").wait(4.5)  # the last load took 10 s, and the last wake 3 s
    assert "z" not in lab.ended, "as long as the wake takes, its calls have time"


def test_idle_instance_sleeps_to_free_memory() -> None:
    lab = Lab(memory="8 GB").models("a", "b").served("x").ask("y", context="b")
    assert lab.hears("p1", to_pilot.SleepLibrary).library == lab.of().id
    lab.asleep(lab.of(), keeps="1 GB", host="5 GB").loads("b").hears("p1", to_pilot.RunCalls)
    lab.end("y").ask("z")
    assert lab.hears("p1", to_pilot.SleepLibrary).library == lab.of("b").id
    assert lab.hears("p1", to_pilot.WakeLibrary).library == lab.of().id


def test_sleeping_instance_ends_if_its_remaining_memory_is_needed() -> None:
    lab = Lab(memory="5.9 GB").models("a", "b").served("x").idle()
    lab.asleep(lab.of(), keeps="1 GB", host="5 GB").forget()
    lab.ask("y", context="b")
    assert lab.hears("p1", to_pilot.StopLibrary).library == lab.of().id
    lab.loads("b")


def test_instance_is_not_woken_on_a_busy_gpu_if_calls_would_be_late() -> None:
    lab = Lab(memory="20 GB").models("a", "b").served("x").idle()
    lab.asleep(lab.of(), keeps="1 GB", host="5 GB").forget()
    hurried = Objective(ttft_s=0.2, tpot_s=0.08)
    lab.ask("y", context="b", objective=hurried).loads("b").hears("p1", to_pilot.RunCalls)
    lab.ask("z", objective=hurried)  # a decode step of both models takes 110 ms
    assert not lab.mail.get("p1")
    lab.end("y").wait(0.15)
    assert lab.hears("p1", to_pilot.WakeLibrary).library == lab.of().id


def test_sleeping_instance_wakes_to_reach_the_minimum_number() -> None:
    lab = Lab().models("a").served("x").idle()
    lab.asleep(lab.of(), keeps="1 GB", host="5 GB").forget()
    lab.define(msgspec.structs.replace(lab.context("a").recipe, limits=LibraryLimits(least=1))).wait(0.3)
    assert lab.hears("p1", to_pilot.WakeLibrary).library == lab.of().id
    lab.awake(lab.of()).wait(30)
    lab.nothing_else_was_said()


def test_instance_sleeps_after_the_keep_alive_of_its_context() -> None:
    lab = Lab().models("a", limits=LibraryLimits(keep_alive_s=20.0)).served("x").idle(seconds=19)
    lab.nothing_else_was_said()
    lab.wait(2)
    assert lab.hears("p1", to_pilot.SleepLibrary).library == lab.of().id
