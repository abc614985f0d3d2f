"""Test the engine contract with captured decode steps and a recording backend. Tokens are read one step late."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from engine_contract import EngineContract
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lazily import lazily
from own_driver import PROMPTS, GraphDriver

from stoker.contexts.inference.adapter import NewToken

torch, decoder_module, recorded = lazily(
    "torch", "stoker.contexts.inference.decoder", "recorded_graphs", needs="transformers"
)  # fmt: skip

CACHE_BYTES = 3_000_000
Found = dict[int, list[NewToken]]


def make_driver(*, backend: Any = None, cache_bytes: int = CACHE_BYTES, **options: Any) -> GraphDriver:
    return GraphDriver(backend or recorded.RecordedGraphs(), cache_bytes=cache_bytes, **options)


@pytest.fixture(scope="module")
def eager(one_thread: None) -> Any:
    return make_driver(captures=False)


pytestmark = pytest.mark.usefixtures("one_thread")


class TestContractOverGraphs(EngineContract):
    @pytest.fixture
    def driver(self) -> Any:
        return make_driver()

    @pytest.fixture(autouse=True)
    def _captured(self, driver: Any) -> Iterator[None]:
        assert driver.at_load > 0  # the check of captured steps at load passed
        yield
        assert not driver.ahead.graphs.failed


def test_greedy_tokens_are_computed_by_graph_replays() -> None:
    driver = make_driver()
    before = driver.backend.replays
    ids = [driver.ask(prompt, max_new_tokens=20) for prompt in PROMPTS]
    found = driver.run()
    assert [[token.token for token in found[id]] for id in ids] == [
        driver.own_tokens(prompt, most=20) for prompt in PROMPTS
    ]
    assert driver.backend.replays - before >= 18
    assert driver.engine.get_load().steps == driver.engine.get_load().decode_steps + 1


def test_step_is_launched_before_the_last_tokens_are_read() -> None:
    driver = make_driver()
    driver.ask(PROMPTS[0], max_new_tokens=30, engine_options=(("ignore_eos", True),))
    driver.run(steps=3)  # the engine reads the prompt, launches two steps and reads the token of the first step
    replays, waits = driver.backend.replays, driver.backend.waits
    uploads: list[int] = []
    driver.backend.upload = lambda values, into: uploads.append(len(values))
    for number in range(1, 6):
        tokens = driver.engine.step()
        assert len(tokens) == 1
        assert (driver.backend.replays, driver.backend.waits) == (replays + number, waits + number)
    assert not uploads  # an unchanged batch copies nothing to the device


def test_new_request_joins_the_batch_in_the_next_step() -> None:
    driver = make_driver()
    first = driver.ask(PROMPTS[0], max_new_tokens=30, engine_options=(("ignore_eos", True),))
    found = driver.run(steps=6)
    assert driver.ahead.has_launched_step
    second = driver.ask(PROMPTS[1], max_new_tokens=3)
    before = len(found[first])
    driver.run(found, steps=1)  # the engine reads the token of the launched step, then the second prompt
    assert len(found[first]) == before + 2
    assert len(found[second]) == 1


def test_graphs_are_captured_after_repeated_uses_of_a_batch_shape(eager: Any) -> None:
    driver = make_driver(uses=3)
    one = driver.ask(PROMPTS[0], max_new_tokens=100, engine_options=(("ignore_eos", True),))
    found = driver.run(steps=4)
    assert driver.backend.captures == driver.at_load
    driver.run(found, steps=3)
    assert driver.backend.captures == driver.at_load + 1
    more = [driver.ask(PROMPTS[0], max_new_tokens=40, engine_options=(("ignore_eos", True),)) for _ in range(6)]
    driver.run(found)  # the cache grows from 4 to 8 rows, and the requests move to longer rows
    assert driver.backend.captures >= driver.at_load + 3
    expected = eager.tokens(PROMPTS[0], max_new_tokens=100, engine_options=(("ignore_eos", True),))
    assert [token.token for token in found[one]] == expected
    assert all([token.token for token in found[id]] == expected[:40] for id in more)


def test_invalid_logits_fail_only_their_request(eager: Any) -> None:
    driver = make_driver()
    expected = eager.tokens(PROMPTS[0], max_new_tokens=12, temperature=1.0, seed=(1, 1), top_p=0.8)
    good = driver.ask(PROMPTS[0], max_new_tokens=12, temperature=1.0, seed=(1, 1), top_p=0.8)
    wrong = driver.ask(PROMPTS[2], max_new_tokens=12, temperature=1.0, seed=(2, 1), top_p=0.8)
    found = driver.run(steps=3)
    array, row = driver.engine._store.find_row(wrong)
    with torch.inference_mode():
        array.keys[0][row, :, 0] = float("nan")
    driver.run(found)
    assert [token.token for token in found[good]] == expected
    assert "not finite" in found[wrong][-1].error


def test_failed_capture_leaves_the_engine_eager(eager: Any, caplog: pytest.LogCaptureFixture) -> None:
    driver = make_driver()
    driver.backend.error = error = MemoryError("out of memory")
    with caplog.at_level(logging.WARNING):
        found = driver.tokens(PROMPTS[0], max_new_tokens=9, temperature=1.0, seed=(3, 0))
    assert found == eager.tokens(PROMPTS[0], max_new_tokens=9, temperature=1.0, seed=(3, 0))
    assert [str(error) in line for line in caplog.messages] == [True]
    assert driver.backend.held_bytes == 0


@pytest.mark.parametrize("why", ["standard deviations", "no graphs here"])
def test_graph_backend_that_fails_its_check_is_not_used(why: str, caplog: pytest.LogCaptureFixture) -> None:
    class Wrong(recorded.RecordedGraphs):  # type: ignore[misc, name-defined]
        def upload(self, values: Any, into: Any) -> None:
            super().upload(values + (into.dtype == torch.int64), into)  # shift every token and position by one

    backend = Wrong() if why == "standard deviations" else recorded.RecordedGraphs(error=RuntimeError(why))
    with caplog.at_level(logging.WARNING):
        driver = make_driver(backend=backend)
    assert driver.ahead is None
    assert [why in line for line in caplog.messages] == [True]
    assert driver.tokens(PROMPTS[0], max_new_tokens=5) == driver.own_tokens(PROMPTS[0], most=5)


def test_memory_of_graphs_is_counted_limited_and_freed(caplog: pytest.LogCaptureFixture) -> None:
    driver = make_driver(backend=recorded.RecordedGraphs(pool_bytes=150_000))
    driver.tokens(PROMPTS[0], max_new_tokens=5)
    with_graphs = driver.engine.get_memory().held_bytes
    assert driver.backend.held_bytes == 150_000
    driver.engine.sleep()
    assert driver.backend.held_bytes == 0
    assert driver.engine.get_memory().held_bytes <= with_graphs - 150_000
    driver.engine.wake()
    driver.tokens(PROMPTS[0], max_new_tokens=5)
    assert driver.backend.held_bytes == 150_000
    driver.engine.resize(CACHE_BYTES)
    assert driver.backend.held_bytes == 0
    with caplog.at_level(logging.WARNING):  # graphs may use an eighth of the budget: enough for two graphs
        for rows in range(1, 6):
            ids = [driver.ask(PROMPTS[0], max_new_tokens=5) for _ in range(rows)]
            found = driver.run()
            expected = driver.own_tokens(PROMPTS[0], most=5)
            assert all([token.token for token in found[id]] == expected for id in ids)
    assert any("run without graphs" in line for line in caplog.messages)
    driver.engine.stop()
    assert driver.backend.held_bytes == 0


SAMPLINGS = [
    {}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.7}, {"engine_options": (("ignore_eos", True),)},
    {"logprobs": 2}, {"stop": ("AB", "\x50")},
]  # fmt: skip
ACTIONS = st.one_of(
    st.tuples(st.just("add"), st.integers(0, 5), st.integers(0, 5), st.integers(1, 40)),
    st.tuples(st.just("abort"), st.integers(0, 9), st.just(0), st.just(0)),
    st.tuples(st.just("steps"), st.integers(1, 9), st.just(0), st.just(0)),
    st.tuples(st.just("resize"), st.sampled_from([200_000, 350_000, 700_000]), st.just(0), st.just(0)),
)


@pytest.fixture(scope="module")
def drivers() -> tuple[Any, Any]:
    return make_driver(cache_bytes=350_000), make_driver(captures=False, cache_bytes=350_000)


@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(st.lists(ACTIONS, min_size=3, max_size=14))
def test_any_schedule_gives_the_tokens_of_the_eager_engine(drivers, schedule):
    driver, eager = drivers
    asked: dict[int, tuple[Any, dict[str, Any]]] = {}
    gone: set[int] = set()
    found: Found = {}
    for action, number, which, most in schedule:
        if action == "add":
            options = {"max_new_tokens": most, "seed": (number, len(asked)), **SAMPLINGS[which]}
            asked[driver.ask(PROMPTS[number], **options)] = PROMPTS[number], options
        elif action == "abort" and asked:
            gone.add(list(asked)[number % len(asked)])
            driver.engine.abort(list(asked)[number % len(asked)])
        elif action == "steps":
            driver.run(found, steps=number)
        elif action == "resize":
            try:
                driver.engine.resize(number)
                driver.cache_bytes = number
            except ValueError:
                continue  # the new size is too small for an open request
    driver.run(found)
    driver.engine.resize(350_000)
    driver.cache_bytes = 350_000
    assert not driver.ahead.graphs.failed
    for id, (prompt, options) in asked.items():
        expected = eager.tokens(prompt, **options)
        tokens = [token.token for token in found.get(id, [])]
        if id in gone:
            assert tokens == expected[: len(tokens)]
        else:
            assert tokens == expected
            assert found[id][-1].finish is not None
    assert not driver.engine._store._array_by_request
