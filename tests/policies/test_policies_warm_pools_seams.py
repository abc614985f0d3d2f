from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from core.toy import Toy
from policies.stubs import fewer_rounds

from stoker.manager.core.events import ToClient
from stoker.manager.core.nouns import LibraryState
from stoker.manager.policies.prompt_tuner import prompt_tuner
from stoker.manager.policies.provisioning import ExternalPilots
from stoker.protocol import to_client
from stoker.protocol.calls import FailureKind, Objective
from stoker.protocol.to_manager import Cancel

Make = Callable[..., Toy]

LOAD_S, MEET_S = 10.0, 2.0


@pytest.fixture
def lab(toy: Make) -> Make:
    """Pilots with one replica per device; contexts `a` and `b` load in 10 s. An item takes 1 s on one replica,
    0.5 s on two replicas; connecting takes 2 s. The core knows these values if `told`.
    """

    def make(*, pilots: int = 1, devices: int = 4, told: bool = True, **how: Any) -> Toy:
        t = toy(policies=lambda: fewer_rounds(prompt_tuner(provisioning=ExternalPilots(), **how)))
        for n in range(pilots):
            t.pilot(f"p{n + 1}", devices=devices)
        for key in ("a", "b"):
            t.context(key, load_s=LOAD_S, declares="8 GB")
            if told:
                t.by_hand = True  # the test sets values that the core has not measured
                t.core.state.contexts[key].load_s = LOAD_S
                t.core.state.contexts[key].paces.use_advised_paces({n: 1.0 / n for n in range(1, 9)}, meet_s=MEET_S)
        return t

    return make


def job(
    t: Toy, *names: str, items: int = 100, due_in: float = 0.0, gang: tuple[int, int] = (1, 8), drop_late: bool = False,
    **how: Any,
) -> Toy:  # fmt: skip
    objective = Objective(deadline_at=t.now + due_in if due_in else 0.0, drop_late=drop_late)
    how = {"context": "a", "run_s": float(items), "shared": True, "meet_s": MEET_S, **how}
    return t.call(*names, items=items, gang=gang, objective=objective, **how)


def starts(t: Toy, name: str) -> list[tuple[float, int]]:
    return sorted((at, size) for p in t.pilots.values() for at, call, _, size in p.began if call == t.ids[name])


def size(t: Toy, name: str) -> int:
    return starts(t, name)[-1][1]


def libraries(t: Toy, key: str = "a", *, ready: bool = False) -> int:
    states = (LibraryState.READY,) if ready else (LibraryState.READY, LibraryState.LOADING)
    return sum(x.state in states for x in t.core.state.contexts[key].libraries.values())


def forecasts(t: Toy, name: str) -> list[tuple[float, bool]]:
    said = [c.message for commands in t.did for c in commands if isinstance(c, ToClient)]
    told = [one for message in said if isinstance(message, to_client.Forecasts) for one in message.forecasts]
    return [(one.ends_at, one.in_time) for one in told if one.call == t.ids[name]]


def warm(t: Toy, count: int, key: str = "a") -> Toy:
    job(t, *(f"w{key}{n}" for n in range(count)), items=4, due_in=LOAD_S + 4.5, context=key).run()
    assert libraries(t, key, ready=True) == count
    return t


# ---- as many as the deadline needs


@pytest.mark.parametrize(("due_in", "replicas"), [(130.0, 1), (70.0, 2), (50.0, 3), (42.0, 4)])
def test_job_starts_on_as_many_replicas_as_its_deadline_needs(lab: Make, due_in: float, replicas: int) -> None:
    t = job(lab(), "j", due_in=due_in).run()
    assert {n for _, n in starts(t, "j")} == {replicas}
    assert len({at for at, _ in starts(t, "j")}) == 1
    assert t.ended_at["j"] <= due_in
    assert libraries(t) == replicas


def test_promised_replica_is_not_given_to_a_later_job(lab: Make) -> None:
    t = warm(lab(), 1)
    began = t.now
    job(t, "j", due_in=70.0).run(until=t.now + 5.0)  # the job needs two replicas: the idle one, and one that loads
    job(t, "k", items=50, due_in=500.0).run()
    assert size(t, "j") == 2
    assert t.ended_at["j"] <= began + 70.0
    assert starts(t, "k")[0][0] > starts(t, "j")[0][0]


@pytest.mark.parametrize("delay", [True, False])
def test_job_with_a_late_deadline_waits_for_devices_by_default(lab: Make, delay: bool) -> None:
    t = warm(lab(delay=delay), 2)
    job(t, "j", items=40, due_in=60.0, gang=(2, 2)).run(until=t.now + 1.0)
    job(t, "k", items=40, due_in=120.0).run()
    assert libraries(t) == (2 if delay else 3)
    assert (starts(t, "k")[0][0] >= t.ended_at["j"]) is delay


def test_job_with_the_nearest_deadline_gets_its_devices_first(lab: Make) -> None:
    t = warm(lab(devices=2), 2)
    job(t, "busy", items=20, due_in=30.0, gang=(2, 2)).run(until=t.now + 1.0)
    job(t, "late", items=20, due_in=300.0, gang=(2, 2))
    job(t, "soon", items=20, due_in=60.0, gang=(2, 2)).run()
    assert starts(t, "soon")[0][0] < starts(t, "late")[0][0]


def test_fixed_work_of_a_job_is_part_of_its_expected_duration(lab: Make) -> None:
    t = job(lab(), "j", due_in=130.0, fixed_s=40.0).run(until=1.0)
    assert libraries(t) == 2


# ---- late jobs


def test_late_job_gets_its_forecast_at_once_and_runs_last(lab: Make) -> None:
    t = warm(lab(devices=2), 2)
    began = t.now
    job(t, "busy", items=60, due_in=40.0, gang=(2, 2)).run(until=t.now + 1.0)
    job(t, "lost", items=400, due_in=20.0)
    job(t, "good", items=40, due_in=80.0, gang=(2, 2)).run()
    first_said, in_time = forecasts(t, "lost")[0]
    assert not in_time
    assert first_said > began + 400.0
    assert forecasts(t, "good")[0][1]
    assert starts(t, "lost")[0][0] > starts(t, "good")[0][0]
    assert size(t, "lost") == 1
    assert t.ended["lost"].ok


def test_late_job_with_drop_late_is_dropped_with_its_best_time(lab: Make) -> None:
    t = job(lab(), "lost", due_in=20.0, drop_late=True).run()
    failure = t.ended["lost"].failure
    assert failure.kind is FailureKind.DROPPED
    assert "deadline is in 20 s" in failure.message
    assert "sooner than in 37 s" in failure.message, "10 s to load on four, 2 to meet, 25 to run"
    assert t.ended_at["lost"] < 1.0


def test_job_with_a_past_deadline_is_an_ordinary_late_job(lab: Make) -> None:
    t = lab().run(until=50.0)
    job(t, "j", due_in=-10.0)
    job(t, "k", due_in=-10.0, drop_late=True).run()
    assert t.ended["j"].ok
    assert "dropped: 10 s past its deadline" in t.ended["k"].failure.message


def test_slow_job_is_forecast_to_be_late_while_it_runs(lab: Make) -> None:
    t = job(lab(), "j", items=60, due_in=80.0, run_s=120.0, step_s=1.0).run()
    assert forecasts(t, "j")[0][1]
    assert not forecasts(t, "j")[-1][1]
    assert t.ended_at["j"] > 80.0


def test_jobs_without_deadlines_run_on_the_fewest_replicas(lab: Make) -> None:
    t = job(lab(), "j", "k", items=30, gang=(2, 4)).run()
    assert {n for _, n in starts(t, "j") + starts(t, "k")} == {2}


# ---- unused libraries


def test_library_idle_for_the_whole_window_is_unloaded(lab: Make) -> None:
    t = warm(lab(), 2)
    idle_since = t.now
    job(t, "j", items=100, due_in=105.0).run(until=idle_since + 59.0)
    assert libraries(t) == 2
    t.run(until=idle_since + 62.0)
    assert libraries(t) == 1
    t.run(until=t.ended_at.get("j", idle_since + 101.0) + 59.0)
    assert libraries(t) == 1
    t.run(until=t.ended_at["j"] + 62.0)
    assert libraries(t) == 0


def test_idle_session_runs_no_policy_rounds(lab: Make) -> None:
    t = warm(lab(window_s=5.0), 1)
    assert any(key.startswith("round/") for key in t.core.state.timers)
    t.run(until=t.now + 10.0)
    assert t.core.state.timers == {}
    job(t, "j", items=20, due_in=40.0).run()
    assert t.ended["j"].ok


def test_every_job_has_its_own_libraries_without_reuse(lab: Make) -> None:
    t = job(lab(reuse=False), "j", items=10, due_in=30.0).run()
    job(t, "k", items=10, due_in=30.0).run()
    assert t.core.state.contexts["a"].loads == 2
    t.run(until=t.now + 1.0)
    assert libraries(t) == 0


def test_early_option_unloads_warm_replicas_before_their_window_ends(lab: Make) -> None:
    def second(*, early: bool) -> tuple[bool, float]:
        t = warm(lab(devices=2, early=early), 2)
        due_at = t.now + 40.0
        job(t, "j", items=20, due_in=40.0, context="b").run()
        return t.ended_at["j"] <= due_at, t.now

    assert second(early=True)[0]
    assert not second(early=False)[0]


# ---- failures


def test_gang_that_loses_a_pilot_resumes_from_its_checkpoint(lab: Make) -> None:
    t = job(lab(pilots=2, devices=2), "j", due_in=50.0, step_s=1.0)
    t.run(until=25.0)
    assert size(t, "j") == 3
    t.kill("p2")
    t.run()
    assert t.ended["j"].ok
    assert size(t, "j") <= 2
    assert (t.ended_at["j"] - starts(t, "j")[-1][0]) * size(t, "j") < 75.0, "a third of it had been done"


def test_lost_promised_replica_is_ordered_again(lab: Make) -> None:
    t = job(lab(pilots=2, devices=2), "j", due_in=90.0, gang=(2, 2)).run(until=5.0)
    t.kill("p1")
    t.run()
    assert size(t, "j") == 2
    assert t.ended_at["j"] <= 90.0


def test_briefly_disconnected_pilot_causes_no_load(lab: Make) -> None:
    t = job(lab(pilots=2, devices=1), "j", due_in=130.0).run(until=5.0)
    holder = next(iter(t.core.state.contexts["a"].libraries.values())).pilot.id
    t.cut(holder, back_after=1.0)
    t.run()
    assert t.core.state.contexts["a"].loads == 1
    assert t.ended["j"].ok


def test_repeated_failed_loads_fail_the_call_with_their_reason(lab: Make) -> None:
    t = lab(pilots=2)
    t.context("bad", load_s=1.0, declares="8 GB", broken="no such model")
    job(t, "j", due_in=100.0, context="bad").run(limit_s=60.0)
    assert "no such model" in t.ended["j"].failure.message


def test_context_too_large_for_every_device_is_an_error_at_once(lab: Make) -> None:
    t = lab()
    t.context("huge", declares="80 GB")
    job(t, "j", due_in=100.0, context="huge").run(limit_s=60.0)
    assert t.ended["j"].failure.kind is FailureKind.NO_DEVICE


def test_cancelled_job_leaves_its_promised_devices_to_other_jobs(lab: Make) -> None:
    t = job(lab(devices=2), "j", due_in=70.0).run(until=5.0)
    t.tell(Cancel((t.ids["j"],)))
    job(t, "k", items=20, due_in=40.0).run()
    assert t.ended_at["k"] <= 45.0
    assert t.core.state.contexts["a"].loads == 2


# ---- replicas of several devices


def test_replica_may_be_several_devices_of_one_pilot(lab: Make) -> None:
    t = lab(pilots=3, devices=3)
    t.context("big", load_s=LOAD_S, declares="8 GB", devices=2)
    t.core.state.contexts["big"].load_s = LOAD_S
    t.core.state.contexts["big"].paces.use_advised_paces({n: 1.0 / n for n in range(1, 9)})
    job(t, "j", due_in=50.0, context="big").run()
    assert size(t, "j") == 3
    assert all(len({d.pilot.id for d in x.devices}) == 1 for x in t.core.state.contexts["big"].libraries.values())


# ---- before anything was measured


def test_first_job_is_measured_and_the_next_job_is_predicted(lab: Make) -> None:
    t = lab(told=False)
    job(t, "first", items=40, due_in=500.0, gang=(2, 4), step_s=1.0).run()
    assert size(t, "first") == 2
    job(t, "next", items=80, due_in=39.0, gang=(1, 4)).run()
    assert size(t, "next") == 4
    assert forecasts(t, "next")


@pytest.mark.parametrize(("learn", "replicas"), [(True, 1), (False, 3)])
def test_expected_duration_of_a_job_follows_the_last_jobs(lab: Make, *, learn: bool, replicas: int) -> None:
    t = lab(learn=learn)
    for n in range(8):
        job(t, f"early{n}", items=100, run_s=50.0, step_s=0.5, due_in=300.0).run()
    began = t.now
    job(t, "j", items=100, run_s=50.0, step_s=0.5, due_in=60.0).run()
    assert size(t, "j") == replicas
    assert t.ended_at["j"] <= began + 60.0
    if learn:  # the job starts on the single warm replica; after half of the items its forecast is in time
        assert [(round(at - began), in_time) for at, in_time in forecasts(t, "j")] == [(50, True)]


def test_several_first_jobs_do_not_wait_for_each_other(lab: Make) -> None:
    t = job(lab(told=False), "j", "k", "l", items=40, due_in=500.0).run(until=30.0)
    assert {starts(t, name)[0][0] for name in "jkl"} == {starts(t, "j")[0][0]}
    t.run()


# ---- together with other calls


def test_ordinary_calls_use_devices_that_jobs_leave(lab: Make) -> None:
    t = warm(lab(devices=2), 2)
    job(t, "j", items=20, due_in=30.0, gang=(2, 2)).run(until=t.now + 1.0)
    t.call("c1", "c2", context="a", run_s=3.0)
    job(t, "k", items=20, due_in=60.0, gang=(2, 2)).run()
    assert starts(t, "k")[0][0] < starts(t, "c1")[0][0]
    assert all(end.ok for end in t.ended.values())
    began = t.now
    t.call(*(f"d{n}" for n in range(20)), context="a", run_s=0.01).run()
    assert t.now - began < 0.5, "nobody waited for a round"


def test_single_calls_with_a_deadline_are_sent_without_a_gang(lab: Make) -> None:
    t = job(lab(), "c", items=20, due_in=60.0, gang=(1, 1)).run()
    assert t.ended_at["c"] <= 60.0
    assert size(t, "c") == 1


def test_context_without_deadlines_is_evicted_at_once_for_a_job(lab: Make) -> None:
    t = lab(devices=2)
    t.context("plain", load_s=1.0, declares="8 GB").call("c1", "c2", context="plain").run()
    assert libraries(t, "plain") == 2
    began = t.now
    job(t, "j", items=20, due_in=50.0).run()
    assert t.ended_at["j"] <= began + 50.0


def test_small_idle_libraries_are_unloaded_for_a_waiting_gang(lab: Make) -> None:
    t = lab(devices=2)
    t.context("small", load_s=1.0, declares="2 GB").call("c1", "c2", context="small", run_s=2.0).run()
    t.context("slim", load_s=1.0, declares="4 GB")
    job(t, "late", items=10, due_in=0.5, gang=(2, 2), context="slim").run(limit_s=60.0)
    assert t.ended["late"].ok


def test_late_gangs_of_two_models_do_not_deadlock(lab: Make) -> None:
    t = warm(warm(lab(), 2), 2, "b")
    job(t, "one", items=4, due_in=1.0, gang=(3, 3))
    job(t, "two", items=4, due_in=1.0, gang=(3, 3), context="b").run(limit_s=120.0)
    assert t.ended["one"].ok
    assert t.ended["two"].ok


def test_context_without_deadlines_replaces_idle_replicas_at_once(lab: Make) -> None:
    t = warm(lab(devices=2), 2)
    began = t.now
    t.context("plain", load_s=1.0, declares="8 GB").call("c", context="plain").run()
    assert t.now - began < 10.0


# ---- without the warm allocator (an ablation)


def test_late_job_keeps_its_replicas_without_the_warm_allocator(lab: Make) -> None:
    began: dict[bool, float] = {}
    for together in (True, False):
        t = warm(lab(together=together), 4)
        at = t.now
        job(t, "busy", items=36, due_in=25.0, gang=(2, 2)).run(until=at + 1.0)
        job(t, "wide", items=40, due_in=15.0, gang=(1, 4)).run(until=at + 12.0)
        job(t, "small", items=4, gang=(1, 1), due_in=300.0).run()
        began[together] = starts(t, "small")[0][0] - at
        assert (size(t, "wide") > 1) is not together
    assert began[True] == pytest.approx(12.0, abs=0.5)
    assert began[False] > 20.0, "what the late one holds is nobody else's"


def test_late_jobs_do_not_deadlock_without_the_warm_allocator(lab: Make) -> None:
    t = warm(lab(together=False), 4)
    job(t, "busy", items=36, due_in=25.0, gang=(2, 2)).run(until=t.now + 1.0)
    job(t, "one", "two", items=40, due_in=15.0, gang=(3, 4)).run()
    assert sorted(size(t, name) for name in ("one", "two")) >= [3, 3]


def test_waiting_calls_are_sent_once_when_a_deadline_arrives_again() -> None:
    """Three calls with a deadline of 8 s crash their libraries and run again, while three calls without a deadline
    wait. In strict mode, a second `Send` of a call is an error.
    """
    t = Toy(policies=lambda: fewer_rounds(prompt_tuner(provisioning=ExternalPilots())))
    t.context("sleepy", load_s=1.0, memory="1 GB", declares="6 GB", sleeps=True).pilot("p0", devices=2)
    how = {"context": "sleepy", "run_s": 0.0, "step_s": 0.0}
    t.call("c1", "c2", "c3", objective=Objective(), priority=0, **how)
    due = Objective(deadline_at=t.now + 8.0)
    t.call("c4", "c5", "c6", objective=due, priority=1, failed_by="node", **how)
    t.run(limit_s=5000)
    assert {name: len(starts(t, name)) for name in ("c1", "c2", "c3")} == {"c1": 1, "c2": 1, "c3": 1}
