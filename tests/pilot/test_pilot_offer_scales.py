"""The agent reads the work of the engines on a device from the turn board, and reports it to the core."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from core.pilot_shell import GIB, CoreShell

from stoker.contexts.inference.adapter import EngineLoad, EngineWork, TokenCache
from stoker.contexts.recipe import Needs, Recipe
from stoker.contexts.step_times import StepSample, group_samples
from stoker.manager.core.nouns import Context
from stoker.manager.policies.where_to_load import required_bytes_if_known
from stoker.pilot.agent.offers import OfferInspector
from stoker.pilot.core import commands
from stoker.pilot.core.events import OfferInspected
from stoker.pilot.core.state import Stage
from stoker.pilot.core.turns import EngineOutlook, UnreadPrompt
from stoker.pilot.library.library_turns import LibraryTurns
from stoker.protocol import to_agent, to_library
from stoker.protocol import to_manager as told
from stoker.protocol.calls import CallOptions, CallSpec, Features, Objective
from stoker.protocol.ids import CallId, DeviceId, FunctionKey, LibraryId
from stoker.protocol.to_manager import DeviceFacts
from stoker.protocol.to_pilot import RunCalls, StopLibrary

GPU = (DeviceId("gpu:0"),)
NEEDS = Needs(device_memory_bytes=8 * GIB, token_bytes=1000, cache_tokens=1000)
MODELS = [Recipe(name, name, needs=NEEDS) for name in ("one", "two")]
SAMPLES = [StepSample(True, 100, 50, 0.1), StepSample(True, 1000, 500, 1.0), StepSample(False, 1, 100, 0.05)]
TIMES = group_samples(SAMPLES)


class Pilot:
    """A pilot core with two libraries on one device, and the `OfferInspector` of its agent."""

    def __init__(self, board: Path) -> None:
        self.board = board
        self.shell = CoreShell().join()
        for number, model in enumerate(MODELS, start=1):
            self.shell.ready(number, model, device_memory_bytes=8 * GIB)
        self.shell.forget()
        self.inspector = OfferInspector(self.shell.core.state, board=board, clock=lambda: self.shell.now)
        self.engines = [LibraryTurns(board, LibraryId(number), GPU) for number in (1, 2)]

    def offer(self, call: int = 1, *, ttft_s: float = 5.0, tokens: int = 100, waited_s: float = 0.0) -> OfferInspected:
        """Offer library 1 a call; pass the estimate of the agent to the core and return the estimate."""
        spec = CallSpec(CallId(call), b"x", Features(input_length=tokens, expected_output=50))
        options = CallOptions(objective=Objective(ttft_s=ttft_s, tpot_s=0.25))
        order = RunCalls(LibraryId(1), FunctionKey("f"), [spec], options, offer=True, waited_s=waited_s)
        self.shell.hear(order)
        found = self.inspector.inspect(self.shell.take(commands.InspectOffer).order)
        self.shell.give(found)
        return found

    def prompts(self, call: int, **more: Any) -> tuple[UnreadPrompt, ...]:
        """Offer library 1 a call; return the prompts that the agent had counted for the library."""
        return outlook(self.offer(call, **more), 1).prompts


def outlook(weighed: OfferInspected, library: int) -> EngineOutlook:
    [found] = [each for each in weighed.engines if each.library == library]
    return found


@pytest.fixture
def unmeasured(tmp_path: Path) -> Iterator[Pilot]:
    made = Pilot(tmp_path / "turns")
    yield made
    for engine in made.engines:
        engine.close()


@pytest.fixture
def pilot(unmeasured: Pilot) -> Pilot:
    """A pilot whose libraries have reported the times of their steps."""
    for number in (1, 2):
        unmeasured.shell.say(number, to_agent.BatchReport(EngineLoad(), TIMES))
    unmeasured.shell.forget()
    return unmeasured


def test_calls_are_accepted_while_steps_are_not_measured(unmeasured: Pilot) -> None:
    found = unmeasured.offer(ttft_s=0.01, tokens=1000)
    assert (found.new, found.engines) == (None, ())
    assert unmeasured.shell.take(to_library.Run)


def test_step_times_of_the_manager_count_until_steps_are_measured(tmp_path: Path) -> None:
    shell = CoreShell().join().start(1, MODELS[0], steps=TIMES)
    assert shell.core.state.step_times["one", "A10"] == TIMES
    wrong = msgspec.structs.replace(TIMES, decode=(msgspec.structs.replace(TIMES.decode[0], seconds=math.nan),))
    shell.start(2, MODELS[1], steps=wrong)
    assert ("two", "A10") not in shell.core.state.step_times
    shell.start(3, MODELS[0], steps=group_samples(SAMPLES * 2))
    assert shell.core.state.step_times["one", "A10"] == TIMES


def test_engines_are_modelled_with_their_open_work(pilot: Pilot) -> None:
    prompts = [(300, 103.0, 0.25, 0)]
    pilot.engines[1].publish(EngineWork(2, 150.0, 100.4, 0.25, 99.0, prompts, 3, 500))
    found = pilot.offer()
    assert found.new == UnreadPrompt(100, 105.0, 0.25)
    other = outlook(found, 2)
    assert (other.rows, other.length, other.due_at, other.tpot_s, other.late_at) == (2, 150.0, 100.4, 0.25, 99.0)
    assert other.prompts == (UnreadPrompt(300, 103.0, 0.25),)
    assert other.cost.prefill_s(1000, 500) == pytest.approx(1.0)
    assert (outlook(found, 1).rows, outlook(found, 1).prompts) == (0, ())


def test_call_is_refused_for_the_tokens_of_another_engine(pilot: Pilot) -> None:
    pilot.engines[1].publish(EngineWork(1, 150.0, 100.3, 0.06, math.inf, [], 1, 200))
    pilot.offer(tokens=1000)
    why = "one decode step of every engine would take 110 ms, and tpot is 60.0 ms"
    assert pilot.shell.take(told.CallsReturned).refused == why
    pilot.engines[1].publish(EngineWork(accepted_requests=1))
    pilot.offer(2, tokens=1000)
    assert pilot.shell.take(to_library.Run)


def test_recently_accepted_calls_count_until_an_engine_has_them(pilot: Pilot) -> None:
    assert pilot.prompts(1, ttft_s=5.0, tokens=100) == ()
    second = pilot.offer(2, ttft_s=1.5, tokens=1000)
    assert outlook(second, 1).prompts == (UnreadPrompt(100, 105.0, 0.25),)
    assert [spec.call for run in pilot.shell.all(to_library.Run) for spec in run.calls] == [1, 2]
    # the refused call 3 does not count
    assert len(pilot.prompts(3, ttft_s=0.5, tokens=1000)) == 2
    pilot.engines[0].publish(EngineWork(prompts=[(1000, 101.5, 0.25, 0), (100, 105.0, 0.25, 0)], accepted_requests=2))
    assert len(pilot.prompts(4, ttft_s=0.5, tokens=1000)) == 2


def test_request_of_an_ended_call_represents_no_other_call(pilot: Pilot) -> None:
    pilot.offer(1, tokens=100)
    pilot.offer(2, tokens=200)
    # the engine accepted and read the prompt of the first call
    pilot.engines[0].publish(EngineWork(accepted_requests=1))
    pilot.shell.end(1)
    assert [each.tokens for each in pilot.prompts(3, ttft_s=0.01)] == [200]
    pilot.engines[0].publish(EngineWork(accepted_requests=2))
    assert pilot.prompts(4, ttft_s=0.01) == ()


def test_library_about_to_end_is_modelled_without_new_requests(pilot: Pilot) -> None:
    pilot.shell.start(3, MODELS[1])
    assert outlook(pilot.offer(1), 3).rows == 1  # library 3 loads for a request that already counts
    pilot.shell.run(7, library=2)
    for number in (2, 3):
        pilot.shell.hear(StopLibrary(LibraryId(number), "enough"))
    assert pilot.shell.library(2).stage is Stage.DRAINING
    assert {each.library: each.rows for each in pilot.offer(2).engines} == {1: 0, 2: 0, 3: 0}
    pilot.engines[1].publish(EngineWork(1, 150.0, 100.4, 0.25, accepted_requests=1))
    assert outlook(pilot.offer(3), 2).rows == 1  # the remaining work of the draining library 2 counts


@pytest.mark.parametrize("kind", ["A10", "cpu"])
@pytest.mark.parametrize("processes", [0, 1])
@pytest.mark.parametrize("process_bytes", [0, GIB // 2, 3 * GIB])
@pytest.mark.parametrize("declared", [0, 8 * GIB, 22 * GIB, 24 * GIB])
def test_pilot_requests_no_more_memory_than_the_manager_reserves(
    tmp_path: Path, kind: str, processes: int, process_bytes: int, declared: int
) -> None:
    facts = DeviceFacts(GPU[0], kind, 24 * GIB, processes=processes, process_bytes=process_bytes)
    model = Recipe("k", "model", needs=msgspec.structs.replace(NEEDS, device_memory_bytes=declared))
    reserved = required_bytes_if_known(Context(model), facts) if declared else 0
    shell = CoreShell((facts,)).join().ready(1, model, device_memory_bytes=reserved)
    with contextlib.closing(LibraryTurns(tmp_path / "turns", LibraryId(1), GPU)) as engine:
        engine.publish(EngineWork(2, 100.0, accepted_requests=2, peak_tokens=300))
        spec = CallSpec(CallId(1), b"x", Features(input_length=100, expected_output=50))
        found = OfferInspector(shell.core.state, board=tmp_path / "turns", clock=lambda: shell.now).inspect(
            RunCalls(LibraryId(1), FunctionKey("f"), [spec], offer=True)
        )
    unused = NEEDS.token_bytes * (NEEDS.cache_tokens - 450)
    assert found.required_bytes == (reserved - unused if declared else 0)
    assert reserved <= facts.memory_bytes


@pytest.mark.parametrize("declared", [0, 8 * GIB])
def test_reported_cache_size_sets_the_required_memory(tmp_path: Path, declared: int) -> None:
    cache = TokenCache(weights_bytes=6 * GIB, token_bytes=GIB // 100, tokens=400)
    shell = loaded(cache, declared)
    assert weigh(shell, tmp_path, tokens=400).required_bytes == 6 * GIB + 750 * (GIB // 100)


def test_fixed_cache_refuses_requests_that_exceed_it(tmp_path: Path) -> None:
    shell = loaded(TokenCache(6 * GIB, GIB // 100, tokens=750, is_fixed=True), 0)
    assert weigh(shell, tmp_path, tokens=400) == OfferInspected(order(400))
    found = weigh(shell, tmp_path, tokens=401)
    shell.hear(found.order)
    shell.give(found)
    why = "the cache of lib-1 holds 750 tokens and cannot be resized; with this call it would need 751"
    assert shell.take(told.CallsReturned).refused == why
    assert not shell.all(to_library.Resize)


def loaded(cache: TokenCache, declared: int) -> CoreShell:
    facts = DeviceFacts(GPU[0], "A10", 24 * GIB)
    model = Recipe("k", "model", loader=b"x", needs=Needs(device_memory_bytes=declared))
    shell = CoreShell((facts,)).join().start(1, model, device_memory_bytes=12 * GIB)
    return shell.say(1, to_agent.Hello(1, 1001), to_agent.Loaded(1.0, GIB, GIB, 5 * GIB, cache=cache)).forget()


def order(tokens: int) -> RunCalls:
    spec = CallSpec(CallId(1), b"x", Features(input_length=tokens - 50, expected_output=50))
    return RunCalls(LibraryId(1), FunctionKey("f"), [spec], offer=True)


def weigh(shell: CoreShell, tmp_path: Path, *, tokens: int) -> OfferInspected:
    """Offer a call of `tokens` tokens to a library whose engine has requests of 350 tokens."""
    with contextlib.closing(LibraryTurns(tmp_path / "turns", LibraryId(1), GPU)) as engine:
        engine.publish(EngineWork(2, 100.0, accepted_requests=2, peak_tokens=350))
        inspector = OfferInspector(shell.core.state, board=tmp_path / "turns", clock=lambda: shell.now)
        return inspector.inspect(order(tokens))


def test_time_already_waited_shortens_the_deadline_of_a_call(pilot: Pilot) -> None:
    found = pilot.offer(ttft_s=5.0, waited_s=2.0)
    assert found.new.due_at == 103.0
    assert pilot.shell.take(to_library.Run).waited_s == 2.0


def test_token_late_since_the_start_of_a_step_refuses_no_call(pilot: Pilot) -> None:
    pilot.engines[1].publish(EngineWork(1, 150.0, 99.5, 0.25, math.inf, [], 1, 200))
    other = outlook(pilot.offer(), 2)
    assert (other.due_at, other.late_at) == (math.inf, 99.5)


def test_offer_requests_the_memory_of_an_underestimated_cache(unmeasured: Pilot) -> None:
    unmeasured.engines[0].publish(EngineWork(4, 500.0, accepted_requests=4, peak_tokens=2000))
    own = unmeasured.shell.core.state.devices[GPU[0]].process_bytes
    assert unmeasured.offer(tokens=100).required_bytes == NEEDS.device_memory_bytes + own + 1000 * (2000 + 150 - 1000)
    assert "of device memory for the call" in unmeasured.shell.take(told.CallsReturned).refused


def test_prompts_beyond_the_first_31_are_merged_into_one_prompt(pilot: Pilot) -> None:
    prompts = [(10, 110.0 + number, 0.25, 64) for number in range(40)]
    pilot.engines[1].publish(EngineWork(prompts=prompts, accepted_requests=40))
    found = outlook(pilot.offer(), 2).prompts
    assert len(found) == 32
    assert found[-1] == UnreadPrompt(90, 149.0, 0.25)


def test_damaged_bytes_on_the_shared_board_do_not_break_offers(pilot: Pilot) -> None:
    chance = random.Random(3)
    for number in range(300):
        for engine in pilot.engines:
            engine.publish(EngineWork(1, 150.0, 100.3, 0.25, math.inf, [(7, 103.0, 0.25, 0)], 1, 200))
        with pilot.board.open("r+b") as file:
            for _ in range(chance.randrange(1, 60)):
                file.seek(chance.randrange(pilot.board.stat().st_size))
                file.write(bytes([chance.randrange(256)]))
        pilot.offer(number + 1)
    while pilot.engines:
        pilot.engines.pop().close()
    for cut in (100, 0):
        pilot.board.write_bytes(b"x" * cut)
        pilot.offer(1000 + cut)
    pilot.board.unlink()
    assert pilot.offer(2000).new is not None
