from __future__ import annotations

from collections import Counter
from statistics import fmean, pstdev
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from sim.worlds import GPU, NOW, calls, model, simulate, source, world

from stoker.chance import Stream
from stoker.contexts.recipe import Awareness
from stoker.manager.core.events import Event
from stoker.manager.core.seams import Load, Policies, Unload
from stoker.manager.policies import HottestFirst, KeepBlocks, LoadWhereWanted, default_policies
from stoker.manager.sim.agenda import Agenda, cancel_entry
from stoker.manager.sim.client import Arrival
from stoker.manager.sim.library import SimLibrary
from stoker.manager.sim.log import LoggedEvent
from stoker.manager.sim.run import Simulation, SimulationError
from stoker.manager.sim.world import Files, Links, Rate
from stoker.protocol import to_agent
from stoker.protocol.ids import LibraryId, RecipeKey
from stoker.site import Duration, Size

GB = 1_000_000_000


def test_slow_device_leaves_the_last_calls_to_a_fast_device() -> None:
    """A GPU call takes 1 s, a CPU call 10 s, so 1.1 calls end per second. The last CPU call may start at 140 s."""
    base = world(source(1), model())
    slow = replace(base.sources[0], name="old", kind="cpu")
    both = replace(base, sources=(*base.sources, slow), devices={"gpu": GPU, "cpu": replace(GPU, speed=0.1)})
    run, outcome = simulate(both, calls(157))
    assert run.core.state.contexts["llm"].speeds.of == {"gpu": 1.0, "cpu": pytest.approx(0.1)}
    began = [pilot for pilot, what in zip(run.log.pilot, run.log.what, strict=True) if what == LoggedEvent.CALL_BEGAN]
    assert sorted(Counter(began).values()) == [14, 143], "with equal speeds the CPU begins its 15th call at 150 s"
    assert outcome.ended_at == pytest.approx(10.0 + 143.0)


def test_first_items_of_a_process_take_longer() -> None:
    _, outcome = simulate(world(source(1), model(warm_items=10, warm_item_s=Duration(0.5))), calls(4, items=4))
    assert outcome.ended_at == pytest.approx(10.0 + 16.0 + 5.0)


def test_walltime_ends_a_block_and_the_next_block_continues() -> None:
    pool = source(1, walltime_s=Duration(100.0), keep_pending=1)
    run, outcome = simulate(world(pool, model()), calls(150))
    counted = Counter(run.log.what)
    assert (outcome.complete, outcome.failed, outcome.rerun_calls) == (True, {}, 0)
    assert counted[LoggedEvent.PILOT_CAME] == 3  # each pilot has 100 s: 10 s to load the context, and 20 s in reserve
    assert counted[LoggedEvent.CALL_BEGAN] == 150


def test_all_pilots_read_the_shared_files_without_awareness() -> None:
    files = (Files("weights", Size(10 * GB), operations=1000),)
    links = Links(shared=Rate(1.0 * GB), shared_operations=10.0)
    context = model(load_s=0.0, files=files, awareness=Awareness.NONE)
    _, outcome = simulate(world(source(2), context, links=links), calls(2))
    # the file operations of both pilots take longer than the transfer of bytes
    assert outcome.ended_at == pytest.approx(200.0 + 1.0)
    _, outcome = simulate(world(source(4), context, links=Links(shared=Rate(1.0 * GB))), calls(4))
    assert outcome.ended_at == pytest.approx(40.0 + 1.0)


def test_simulation_can_be_cut_off_at_a_given_time() -> None:
    _, outcome = simulate(world(source(1), model()), calls(100), until_s=60.5)
    assert (outcome.complete, outcome.calls, outcome.ended_at) == (False, 50, 60.5)


def test_equal_seeds_give_equal_logs_and_other_seeds_other_logs() -> None:
    spread = world(source([(0.0, 4), (40.0, 2)]), model(load_cv=0.3, item_cv=0.5))
    logs = [simulate(spread, calls(200), seed=seed)[0].log.digest() for seed in (1, 1, 2)]
    assert logs[0] == logs[1] != logs[2]


def test_timer_never_fires_a_fraction_of_a_microsecond_early() -> None:
    # No call fits the walltime, so pilots are drained repeatedly at times that are no whole seconds.
    pool = source(1, walltime_s=Duration(7000.0), keep_pending=1, boot_s=Duration(1.0), boot_cv=0.5)
    steps = 0

    def tell(_now: float, _ended: int) -> None:
        nonlocal steps
        steps += 1
        assert steps < 20, "time stands still"

    never_fits = model(load_s=1 / 3, item_s=4000.0, item_cv=0.01)
    simulate(world(pool, never_fits), calls(2, items=2), until_s=30_000.0, tell=tell)


class _Twice(LoadWhereWanted):
    def on_waiting_calls(self, view, context):
        device = next(iter(view.devices()), None)
        if device is None:
            return ()
        load = Load(RecipeKey(context.recipe.key), device.pilot.id, (device.id,), 20 * GB)
        return (load, load)


def test_impossible_policy_action_stops_the_run_and_shows_the_state() -> None:
    provisioning = KeepBlocks()
    policies = Policies(HottestFirst(), _Twice(provisioning=provisioning), provisioning)
    run = Simulation(world(source(1), model()), calls(1), policies)
    with pytest.raises(
        SimulationError, match=r"a policy requested an impossible action[^\n]*\n.*1 pilots.*\n.*pool-0 gpu:0"
    ):
        run.run()


class _Odd(HottestFirst):
    def __init__(self, answer: object) -> None:
        super().__init__()
        self.answer = answer

    def pull(self, view, library):
        return self.answer


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (None, "the policy returned None; return a sequence of actions"),
        (("load it",), "'load it' is not an action"),
        ((Unload(LibraryId(99), "unknown"),), r"no library 99; the dispatch policy returned Unload\(library=99"),
    ],
)
def test_policy_answer_with_unknown_names_stops_the_simulation(answer: object, why: str) -> None:
    provisioning = KeepBlocks()
    policies = Policies(_Odd(answer), LoadWhereWanted(provisioning=provisioning), provisioning)
    with pytest.raises(SimulationError, match=why):
        Simulation(world(source(1), model()), calls(1), policies).run()


def test_unservable_calls_report_what_they_wait_for() -> None:
    run = Simulation(world(source([(0.0, 0)], max_blocks=1, keep_pending=1), model()), calls(1), _without_timers())
    with pytest.raises(SimulationError, match=r"1 calls wait \(no pilot has joined yet \(block b1: pending"):
        run.run()


def _without_timers() -> Policies:
    """Return the default policies without timers, so that no event remains."""

    class Once(LoadWhereWanted):
        def on_waiting_calls(self, view, context):
            return [action for action in super().on_waiting_calls(view, context) if type(action).__name__ != "Timer"]

    class Still(KeepBlocks):
        def demand(self, view):
            return [action for action in super().demand(view) if type(action).__name__ != "Timer"]

    provisioning = Still()
    return Policies(HottestFirst(), Once(provisioning=provisioning), provisioning)


@pytest.mark.parametrize(("keep_alive_s", "least", "loads"), [(30.0, 0, 2), (30.0, 1, 1), (3600.0, 0, 1), (None, 0, 1)])
def test_context_is_loaded_again_after_its_keep_alive(keep_alive_s: float | None, least: int, loads: int) -> None:
    kept = None if keep_alive_s is None else Duration(keep_alive_s)
    context = model(load_s=10.0, keep_alive_s=kept, min_libraries=least)
    run, outcome = simulate(world(source(1), context), [Arrival(0.0, "llm"), Arrival(100.0, "llm")])
    assert run.core.state.contexts["llm"].loads == loads
    assert outcome.ended_at == pytest.approx(101.0 + 10.0 * (loads - 1), abs=0.1)


class Recorded(Simulation):
    def __init__(self, *args: Any, **more: Any) -> None:
        self.records: list[bytes] = []
        super().__init__(*args, **more)

    def handle(self, event: Event) -> None:
        self.records.append(msgspec.msgpack.encode((self.agenda.now, event)))
        super().handle(event)


def test_every_event_can_be_written_and_read_back() -> None:
    files = (Files("weights", Size(10 * GB), operations=3),)
    context = model(files=files, start_s=Duration(1.0), slots=2, load_cv=0.2, item_cv=0.3)
    pool = source(
        [(0.0, 3), (60.0, 1), (70.0, 3)], walltime_s=Duration(150.0), wait_s=Duration(3.0), boot_s=Duration(2.0)
    )
    links = Links(shared=Rate(1.0 * GB), network=Rate(2.0 * GB), shared_operations=10.0)
    run = Recorded(world(pool, context, links=links), calls(300, every_s=0.5), default_policies())
    assert run.run().complete
    decoder = msgspec.msgpack.Decoder(tuple[float, Event])
    read = [decoder.decode(record) for record in run.records]
    assert [msgspec.msgpack.encode(each) for each in read] == run.records
    seen = {type(message).__name__ for _, event in read for message in getattr(event, "messages", ())}
    assert {"ClientHello", "Submit", "PilotHello", "LibraryReady", "CallsEnded", "BlockUpdate", "ObjectsCached"} <= seen


def test_random_numbers_depend_only_on_seed_purpose_and_index() -> None:
    # Every machine, Python version and process must return this number.
    assert Stream(1, "calls").uniform(0) == 0.5600279589820432
    assert [Stream(seed, purpose).uniform(3) for seed, purpose in ((1, "a"), (1, "a"), (2, "a"), (1, "b"))][:2]
    assert len({Stream(seed, purpose).uniform(3) for seed in (1, 2) for purpose in ("a", "b")}) == 4


def test_random_numbers_are_uniform_and_factors_have_their_spread() -> None:
    stream = Stream(5, "x")
    drawn = [stream.uniform(n) for n in range(20_000)]
    assert all(0.0 < number < 1.0 for number in drawn)
    assert fmean(drawn) == pytest.approx(0.5, abs=0.01)
    assert pstdev(drawn) == pytest.approx(12**-0.5, abs=0.01)
    for cv in (0.1, 1.0):
        factors = [stream.lognormal_factor(n, cv=cv) for n in range(20_000)]
        assert (fmean(factors), pstdev(factors)) == (pytest.approx(1.0, abs=0.03), pytest.approx(cv, rel=0.08))
    assert stream.lognormal_factor(9, cv=0.0) == 1.0


def test_events_happen_in_order_of_time_and_then_of_insertion() -> None:
    agenda, happened = Agenda(), list[str]()
    agenda.schedule_at(2.0, happened.append, "late")
    agenda.schedule_at(1.0, happened.append, "first")
    agenda.schedule_at(1.0000000004, happened.append, "in the same microsecond")
    cancel_entry(agenda.schedule_after(1.5, happened.append, "cancelled"))
    while agenda.run_entries(1):
        pass
    assert happened == ["first", "in the same microsecond", "late"]
    assert agenda.now == 2.0
    with pytest.raises(ValueError, match=r"no event can be scheduled at 1\.0 s"):
        agenda.schedule_at(1.0, happened.append, "past")


def test_run_that_ends_in_answer_to_a_report_sends_no_more_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    said = SimLibrary.report_to_pilot

    def say(library: SimLibrary, message: to_agent.ToAgent) -> None:
        said(library, message)
        if isinstance(message, to_agent.Reports) and library.sim.agenda.now < 20.0:
            library.end()

    monkeypatch.setattr(SimLibrary, "report_to_pilot", say)
    reporting = replace(NOW, progress_s=Duration(5.0))
    _, outcome = simulate(world(source(2), model(), delays=reporting), calls(1, items=30))
    assert (outcome.complete, outcome.failed) == (True, {})
