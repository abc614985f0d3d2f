"""Test the policy `slinfer` in small cases with known answers. The test acts as the pilot."""

from __future__ import annotations

import msgspec
import pytest
from core.builders import devices, recipe
from policies.slinfer_lab import GB, SOON, STEPS, SlinferLab

from stoker.contexts.inference.adapter import EngineLoad
from stoker.contexts.recipe import LibraryLimits
from stoker.manager.core.libraries import MAX_FAILED_LOADS
from stoker.manager.core.report import build_session_status
from stoker.manager.core.seams import PolicyError, Send
from stoker.protocol import to_manager as say
from stoker.protocol import to_pilot
from stoker.protocol.calls import CallProgress, Objective, RefusalCase


class Lab(SlinferLab):
    def started(self, pilot: str) -> tuple[str, float]:
        start = self.hears(pilot, to_pilot.StartLibrary)
        self.report(pilot, say.LibraryReady(start.library, 0.1, 1.0, GB, GB, slots=64))
        return start.recipe.key, start.device_memory_bytes / GB

    def serves(self, pilot: str) -> Lab:
        """Load an instance and receive the offer of a call."""
        self.started(pilot)
        self.offered(pilot)
        return self

    def refuse(
        self, pilot: str, name: str, *, required: int = 0, over_s: float = 0.0, case: RefusalCase | None = None
    ) -> Lab:
        [library] = self.holders(name)
        call = (self.ids[name],)
        self.report(pilot, say.CallsReturned(library.id, call, "late", False, required, over_s, case))
        return self


@pytest.fixture
def lab() -> Lab:
    return Lab().models("a", "b", "c").pilot_of("gpu", "gpu").pilot_of("cpu", "cpu")


def test_call_is_not_sent_to_a_cpu_that_reads_prompts_too_slowly(lab: Lab) -> None:
    lab.ask("x", prompt=950)  # reading takes 0.95 s, or 1.045 s with a margin of a tenth, but only 1 s is left
    lab.nothing_else_was_said()
    assert lab.wait(1.2).ended["x"].failure.message.startswith("its first token would be more than")


def test_refused_call_goes_to_another_instance_then_to_a_new_instance(lab: Lab) -> None:
    lab.ask("x")
    assert lab.started("cpu")[0] == "a"
    assert lab.offered("cpu") == ("x", 0.0)
    lab.refuse("cpu", "x")
    assert lab.started("gpu") == ("a", 5.25)
    assert lab.offered("gpu") == ("x", 0.0)
    lab.ask("y")
    assert lab.offered("cpu") == ("y", 0.0)
    lab.refuse("cpu", "y")
    assert lab.offered("gpu") == ("y", 0.0)


def test_offer_contains_step_times_and_the_wait_of_the_call(lab: Lab) -> None:
    lab.ask("x", objective=Objective(ttft_s=60.0))
    start = lab.hears("cpu", to_pilot.StartLibrary)
    assert start.steps == STEPS
    lab.wait(3.0)
    lab.report("cpu", say.LibraryReady(start.library, 0.1, 2.9, GB, GB, slots=64))
    assert lab.hears("cpu", to_pilot.RunCalls).waited_s == 0.0  # the time of the load does not count as a wait
    lab.wait(0.5)
    lab.ask("y", objective=Objective(ttft_s=60.0))
    assert lab.hears("cpu", to_pilot.RunCalls).waited_s == 0.0
    lab.wait(0.25)
    lab.refuse("cpu", "y")
    lab.hears("gpu", to_pilot.StartLibrary)
    lab.wait(2.0)
    order = lab.hears("cpu", to_pilot.RunCalls)
    assert order.offer
    assert 0.25 < order.waited_s <= 2.5


def test_instance_grows_to_the_size_reported_by_its_pilot(lab: Lab) -> None:
    lab.ask("x")
    lab.serves("cpu")
    lab.refuse("cpu", "x", required=6 * GB)
    assert lab.offered("cpu") == ("x", pytest.approx(4 + 2 * 1.25))
    lab.refuse("cpu", "x", required=9 * GB)  # one refusal is enough: 9 GB do not fit on the device
    assert lab.started("gpu")[0] == "a"


def neighbours(
    *, others: int, memory: str = "10.6 GB", tokens: int = 100, objective: Objective = SOON, elsewhere: str = ""
) -> Lab:
    """Return a cluster with a full device. A library of `a` has two calls; a library of `b` has `others` calls.

    Calls of `a` have no objective, so only calls of `b` and later calls must be in time. `elsewhere`: memory of
    a device with a second library of `b`.
    """
    lab = Lab().models("a", "b")
    if elsewhere:
        lab.pilot_of("cpu2", "cpu", memory=elsewhere).ask("w", context="b", prompt=10, output=10)
        lab.serves("cpu2")
    lab.pilot_of("cpu", "cpu", memory=memory).ask("a0", "a1", prompt=400, output=100, objective=Objective())
    lab.started("cpu")
    lab.forget()
    for name in [f"b{n}" for n in range(others)]:
        lab.ask(name, context="b", prompt=tokens, objective=objective)
        if elsewhere:
            lab.offered("cpu2")
            lab.refuse("cpu2", name)
    lab.started("cpu")
    lab.forget()
    return lab


def accept(lab: Lab, pilot: str, name: str) -> to_pilot.RunCalls:
    """Accept the offer of a call, provided that the preempted libraries end."""
    order = lab.hears(pilot, to_pilot.RunCalls)
    assert lab.names[order.calls[0].call] == name
    lab.report(pilot, say.OfferAccepted(order.library, order.calls[0].call, order.preempts, order.reserve_bytes))
    return order


def test_smaller_neighbour_is_preempted_once_the_pilot_accepts() -> None:
    lab = neighbours(others=1).pilot_of("cpu2", "cpu", memory="6 GB").ask("3", prompt=400, output=100)
    victim, grower = lab.library("cpu", "b"), lab.library("cpu", "a")
    order = accept(lab, "cpu", "3")
    assert order.preempts == (victim.id,)
    assert order.reserve_bytes == pytest.approx((4 + 1.5 * 1.25) * GB)
    assert lab.hears("cpu", to_pilot.EvictCall).call == lab.ids["b0"]
    assert lab.hears("cpu", to_pilot.StopLibrary).reason == "a grows on the same device"
    assert grower.promised_bytes == order.reserve_bytes
    lab.report("cpu", say.LibraryResized(grower.id, order.reserve_bytes, ordered_bytes=order.reserve_bytes))
    assert not grower.unanswered_resizes
    assert not lab.refused


def test_only_an_offer_may_preempt_and_only_on_a_shared_device() -> None:
    lab = neighbours(others=1).ask("3", prompt=400, output=100)
    call, mine, other = lab.ids["3"], lab.library("cpu", "a").id, lab.library("cpu", "b").id
    lab.by_hand = True
    with pytest.raises(PolicyError, match="only an offer may set reserve_bytes or preempts"):
        lab.apply((Send(call, mine, preempts=(other,)),), seam="dispatch")
    with pytest.raises(PolicyError, match="they share no device"):
        lab.apply((Send(call, mine, offer=True, preempts=(mine,)),), seam="dispatch")


@pytest.mark.parametrize("cancelled", [True, False])
def test_cancelled_or_refused_call_preempts_no_instance(cancelled: bool) -> None:
    lab = neighbours(others=1).pilot_of("cpu2", "cpu", memory="6 GB").ask("3", prompt=400, output=100)
    grower, promised = lab.library("cpu", "a"), lab.library("cpu", "a").promised_bytes
    if cancelled:
        lab.tell("ana", say.Cancel([lab.ids["3"]]))
        accept(lab, "cpu", "3")
        resized = [order for order in lab.mail["cpu"] if isinstance(order, to_pilot.ResizeLibrary)]
        assert [order.device_memory_bytes for order in resized] == [promised]
    else:
        assert lab.offered("cpu")[0] == "3"
        lab.refuse("cpu", "3")
        assert not lab.mail.get("cpu")
        assert grower.unanswered_resizes == []
    assert lab.held("cpu", "b") == ["b0"]
    assert grower.promised_bytes == promised


def test_calls_of_contexts_without_a_token_cache_are_not_evicted() -> None:
    lab = Lab().models("a").pilot_of("cpu", "cpu", memory="10.3 GB").define(recipe("plain", memory="5 GB"))
    lab.ask("1", "2", prompt=400, output=100, objective=Objective())
    lab.started("cpu")
    lab.call("p", context="plain").ready()
    lab.pilot_of("cpu2", "cpu", memory="5 GB").forget()
    lab.ask("3", prompt=400, output=100, objective=Objective())
    assert not lab.mail.get("cpu")


@pytest.mark.parametrize(("memory", "fit"), [("5.3 GB", True), ("5.1 GB", False)])
def test_calls_are_evicted_only_if_all_of_them_fit_elsewhere(memory: str, fit: bool) -> None:
    lab = neighbours(others=3, tokens=300, memory="11 GB", objective=Objective())  # 400 MB of cache per call of b
    lab.pilot_of("cpu2", "cpu", memory=memory)
    lab.ask("3", prompt=900, output=300, objective=Objective())
    assert bool(lab.mail.get("cpu")) == fit


@pytest.mark.parametrize("elsewhere", ["", "6 GB"])
@pytest.mark.parametrize("late", [False, True])
def test_calls_that_would_be_late_elsewhere_are_not_evicted(elsewhere: str, late: bool) -> None:
    lab = neighbours(others=1, elsewhere=elsewhere)
    if not elsewhere:
        lab.pilot_of("cpu2", "cpu", memory="6 GB")
    lab.wait(1.5 if late else 0.0).forget()
    lab.ask("3", prompt=400, output=100)
    assert bool(lab.mail.get("cpu")) != late


def test_neighbour_is_preempted_if_that_saves_enough_decode_time() -> None:
    lab = neighbours(others=1, memory="20 GB").pilot_of("cpu2", "cpu", memory="6 GB").ask("3", prompt=10, output=10)
    assert lab.offered("cpu") == ("3", 0.0)
    lab.refuse("cpu", "3", over_s=0.04)
    order = lab.hears("cpu", to_pilot.RunCalls)
    assert (order.preempts, order.reserve_bytes) == ((lab.library("cpu", "b").id,), 0)
    lab = neighbours(others=1, memory="20 GB").pilot_of("cpu2", "cpu", memory="6 GB").ask("3", prompt=10, output=10)
    assert lab.offered("cpu") == ("3", 0.0)
    lab.refuse("cpu", "3", over_s=0.07)  # a step of `b` takes 0.055 s
    assert not lab.mail.get("cpu")


def test_evicted_call_gets_another_library_even_if_late() -> None:
    lab = neighbours(others=1).pilot_of("cpu2", "cpu", memory="6 GB").ask("3", prompt=400, output=100)
    accept(lab, "cpu", "3")
    victim = lab.hears("cpu", to_pilot.EvictCall)
    evicted = say.CallEvicted(victim.library, CallProgress(victim.call))
    lab.lose("cpu2").report("cpu", evicted).wait(5.0)
    lab.forget()
    lab.pilot_of("cpu3", "cpu", memory="6 GB").wait(0.2)
    assert lab.started("cpu3")[0] == "b"
    assert lab.offered("cpu3")[0] == "b0"


@pytest.mark.parametrize(("others", "elsewhere"), [(1, False), (4, True)])
def test_neighbour_with_more_calls_or_without_another_place_stays(others: int, elsewhere: bool) -> None:
    lab = neighbours(others=others)
    if elsewhere:
        lab.pilot_of("cpu2", "cpu", memory="7 GB")
    lab.ask("3", prompt=400, output=100)
    assert [type(message) for message in lab.mail.get("cpu", ())] == []
    if elsewhere:
        assert lab.started("cpu2")[0] == "a"


# ---- new instances


def test_instance_is_not_loaded_if_its_prompt_would_delay_other_calls() -> None:
    lab = (
        Lab().models("a", "b").pilot_of("cpu", "cpu").ask("x", prompt=400, objective=Objective(ttft_s=0.5, tpot_s=0.25))
    )
    lab.started("cpu")
    lab.offered("cpu")
    lab.ask("y", context="b", prompt=300, objective=Objective(ttft_s=0.4, tpot_s=0.25))  # y would be read before x
    lab.nothing_else_was_said()
    lab.ask("z", context="b", prompt=10, objective=Objective(ttft_s=9.0, tpot_s=0.25))
    assert lab.started("cpu")[0] == "b"


def test_calls_wait_for_a_loading_instance_if_it_serves_in_time() -> None:
    lab = Lab().models("a").pilot_of("cpu", "cpu").pilot_of("cpu2", "cpu")
    lab.ask(*(f"x{n}" for n in range(6)), prompt=100)  # reading takes 0.11 s per prompt
    assert sum(len(lab.mail.get(name, ())) for name in ("cpu", "cpu2")) == 1
    lab.ask(*(f"y{n}" for n in range(4)), prompt=100)  # the tenth prompt would be read after 1.1 s
    assert sorted(len(lab.mail.get(name, ())) for name in ("cpu", "cpu2")) == [1, 1]


def test_call_waits_for_a_loading_instance_despite_refusals() -> None:
    lab = Lab().models("a").pilot_of("cpu", "cpu").pilot_of("gpu", "gpu").ask("x", prompt=10)
    lab.serves("cpu")
    lab.ask("y", prompt=10)
    lab.offered("cpu")
    lab.refuse("cpu", "y")
    start = lab.hears("gpu", to_pilot.StartLibrary)
    for _ in range(9):
        lab.wait(0.11)
        if lab.mail.get("cpu"):
            lab.offered("cpu")
            lab.refuse("cpu", "y")
    lab.wait(0.3).nothing_else_was_said()
    lab.report("gpu", say.LibraryReady(start.library, 0.1, 1.2, GB, GB, slots=64))
    assert lab.offered("gpu")[0] == "y"


# ---- requests that outgrow their estimates


def short(lab: Lab, pilot: str, *, peak: int, waiting: int = 0) -> Lab:
    library = lab.library(pilot, "a")
    load = EngineLoad(running=1, waiting=waiting, steps=int(lab.now), cache_tokens=1000, peak_tokens=peak)
    return lab.wait(0.01).report(pilot, say.LibraryEngineReport(library.id, load)).wait(0.2)


def test_instance_grows_when_its_requests_outgrow_their_estimates(lab: Lab) -> None:
    lab.ask("x", objective=Objective())
    lab.serves("cpu")
    short(lab, "cpu", peak=2000)
    assert lab.hears("cpu", to_pilot.ResizeLibrary).device_memory_bytes == pytest.approx((4 + 2 * 1.25) * GB)
    lab.report("cpu", say.LibraryResized(lab.library("cpu", "a").id, int(6.5 * GB)))
    lab.wait(1.0).nothing_else_was_said()  # no shrink, although the calls that the manager knows need less memory


def test_call_without_remaining_memory_moves_to_another_device() -> None:
    lab = Lab().models("a").pilot_of("cpu", "cpu", memory="5.3 GB").ask("x", "y", objective=Objective())
    lab.started("cpu")
    assert [lab.offered("cpu")[0] for _ in range(2)] == ["x", "y"]
    short(lab, "cpu", peak=2000, waiting=1).nothing_else_was_said()  # no other device exists
    lab.pilot_of("cpu2", "cpu")
    short(lab, "cpu", peak=2000).nothing_else_was_said()  # no request waits for memory yet
    short(lab, "cpu", peak=2000, waiting=1)
    assert lab.hears("cpu", to_pilot.EvictCall).call == lab.ids["x"]


def test_idle_instance_is_unloaded_after_a_second(lab: Lab) -> None:
    lab.ask("x")
    lab.serves("cpu")
    lab.end("x").wait(0.9).nothing_else_was_said()
    lab.wait(0.3)
    assert lab.hears("cpu", to_pilot.StopLibrary).reason == "it was idle for 1 s"


def test_minimum_number_of_instances_is_loaded_and_stays() -> None:
    lab = Lab().models("a", limits=LibraryLimits(least=2)).pilot_of("gpu", "gpu").pilot_of("cpu", "cpu").ask("x")
    assert lab.started("cpu")[0] == "a"
    assert lab.offered("cpu") == ("x", 0.0)
    lab.wait(0.2)
    assert lab.started("gpu") == ("a", 5.25)
    lab.end("x").wait(100).nothing_else_was_said()
    lab.define(msgspec.structs.replace(lab.context("a").recipe, limits=LibraryLimits(least=1))).ask("y")
    assert lab.offered("cpu") == ("y", 0.0)
    lab.end("y").wait(30)
    assert [type(message) for pilot in ("cpu", "gpu") for message in lab.mail.get(pilot, ())] == [to_pilot.StopLibrary]


def places(lab: Lab) -> dict[str, tuple[str, str]]:
    return {
        str(each.context.recipe.key): (str(each.pilot.id), str(each.devices[0].id))
        for each in lab.core.state.libraries.values()
    }


def test_new_instances_are_spread_over_all_free_devices() -> None:
    limits = LibraryLimits(least=1)
    lab = Lab().models("a", "b", "c", "d", limits=limits)
    for pilot, memory in (("wide", "12 GB"), ("small", "6 GB")):
        lab.join(pilot, of=devices(2, kind="cpu", memory=memory))
    lab.wait(0.2)
    found = places(lab)
    assert sorted(found.values()) == [("small", "cpu:0"), ("small", "cpu:1"), ("wide", "cpu:0"), ("wide", "cpu:1")]


@pytest.mark.parametrize(("load_s", "loads"), [(0.1, True), (0.5, False)])
def test_second_load_does_not_slow_running_calls(load_s: float, loads: bool) -> None:
    lab = Lab().models("a", "b").pilot_of("p", "cpu").pilot_of("q", "cpu")
    lab.ask("x")
    start = lab.hears("p", to_pilot.StartLibrary)
    lab.wait(load_s)
    lab.report("p", say.LibraryReady(start.library, 0.0, load_s, GB, GB, slots=64))
    lab.offered("p")
    lab.ask("y", context="b")
    assert lab.started("p")[0] == "b"  # the first instance of b
    lab.offered("p")
    lab.ask("z", context="b", objective=Objective(ttft_s=60.0, tpot_s=0.25)).offered("p")
    lab.refuse("p", "z")
    assert lab.started("q")[0] == "b"  # b loads on q, because no call runs there
    lab.offered("q")
    lab.ask("w", objective=Objective(ttft_s=60.0, tpot_s=0.25)).offered("p")
    lab.refuse("p", "w")
    assert bool(lab.mail.get("q")) is loads


def test_model_that_fails_to_load_is_tried_again_only_for_calls() -> None:
    lab = Lab().models("a", limits=LibraryLimits(least=1)).pilot_of("gpu", "gpu").pilot_of("cpu", "cpu")
    lab.ask("x", objective=Objective())
    loads = 0
    for _ in range(8):
        for library in list(lab.context("a").libraries.values()):
            loads += 1
            lab.fail_load(library)
        lab.wait(60)
    assert "FileNotFoundError" in lab.ended["x"].failure.message
    assert loads == MAX_FAILED_LOADS
    lab.ask("y", objective=Objective()).ready()
    assert lab.context("a").last_failure is None


def test_idle_instance_is_evicted_at_once_for_space() -> None:
    lab = Lab().models("a", "b").pilot_of("cpu", "cpu", memory="6 GB").ask("x")
    lab.serves("cpu")
    lab.end("x").ask("y", context="b")
    assert lab.hears("cpu", to_pilot.StopLibrary).reason == "b needs the memory, and this library runs no call"
    assert lab.started("cpu")[0] == "b"


def test_cache_shrinks_when_it_is_far_too_large(lab: Lab) -> None:
    lab.ask("1", "2", prompt=2000, output=500, objective=Objective(ttft_s=9.0, tpot_s=0.25))
    assert lab.started("cpu") == ("a", pytest.approx(4 + 2.5 * 1.25))
    assert lab.offered("cpu") == ("1", 0.0)
    assert lab.offered("cpu") == ("2", pytest.approx(4 + 5 * 1.25))
    lab.report("cpu", say.LibraryResized(lab.library("cpu", "a").id, int(10.25 * GB)))
    lab.wait(0.3).nothing_else_was_said()
    lab.end("2").wait(0.3)
    assert lab.hears("cpu", to_pilot.ResizeLibrary).device_memory_bytes == pytest.approx((4 + 2.5 * 1.25) * GB)


def test_waiting_call_is_dropped_once_its_first_token_would_be_late() -> None:
    lab = Lab().models("a", "b").pilot_of("cpu", "cpu", memory="6 GB").ask("x").ask("y", context="b")
    lab.started("cpu")
    lab.wait(0.9)
    assert "y" not in lab.ended
    lab.wait(0.3)
    assert not lab.ended["y"].ok
    assert lab.ended["y"].failure.message.startswith("its first token would be more than 0.")


def test_refusals_of_a_dropped_call_are_counted_by_reason() -> None:
    lab = Lab().models("a", limits=LibraryLimits(most=1)).pilot_of("cpu", "cpu").ask("x")
    lab.serves("cpu")
    cases = [RefusalCase.DECODE_ROUND] * 3 + [RefusalCase.MEMORY]
    for case in cases:
        lab.ask("y" + str(lab.now)).offered("cpu")
        lab.refuse("cpu", f"y{lab.now}", case=case)
        lab.wait(0.01)
    while len(lab.ended) < len(cases):
        lab.wait(0.1)
        while lab.mail.get("cpu"):
            lab.refuse("cpu", lab.offered("cpu")[0])
    counts = {"decode-round": 3, "memory": 1}
    found = {status.name: status.refused_offers for status in build_session_status(lab.core.state).contexts}
    assert found["a"] == counts
    assert "offers that pilots refused: 3 decode-round, 1 memory" in lab.story("a")
    for end in lab.ended.values():
        assert end.failure.message.endswith("; no library accepted the call: late")


def test_gang_of_a_language_model_is_refused(lab: Lab) -> None:
    lab.call("x", context="a", gang=(2, 2))
    assert "leave gang out" in lab.ended["x"].failure.message


def test_context_without_a_cache_uses_the_default_policy(lab: Lab) -> None:
    lab.define(recipe("plain", memory="1 GB")).call("x", context="plain")
    assert lab.mail["gpu"] or lab.mail["cpu"]
