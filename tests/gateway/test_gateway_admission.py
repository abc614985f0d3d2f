from __future__ import annotations

import asyncio
import heapq
import random

import msgspec
import pytest

pytest.importorskip("starlette")

from gateway.test_gateway_notes import STATUS

from stoker.apps.common.models_file import ModelSettings
from stoker.apps.common.openai_requests import RequestRefused
from stoker.apps.gateway.answering import admit
from stoker.apps.gateway.served import FirstTokens, ModelFacts, ServedModels, SessionWatch, forecast

HOT = ModelFacts(hot=1)


def after_traffic(*, servers, service_s, gap_s, count=200, seed=1):
    """Return measurements of streams that arrived at random and were served in order by `servers` servers."""
    draw, first, free, waiting, now = random.Random(seed), FirstTokens(), [0.0] * servers, [], 0.0
    for _ in range(count):
        now += draw.expovariate(1 / gap_s)
        while waiting and waiting[0][0] <= now:
            at, came, before = heapq.heappop(waiting)
            first.end(before, at - came)
        begun = max(now, heapq.heappop(free))
        heapq.heappush(free, begun + service_s)
        heapq.heappush(waiting, (begun + service_s, now, first.begin()))
    for at, came, before in sorted(waiting):
        first.end(before, at - came)
    assert first.waiting == 0
    return first


def test_first_token_forecast_equals_the_waiting_time_in_the_queue():
    first = after_traffic(servers=1, service_s=0.5, gap_s=0.55)
    for before in (0, 2, 5):  # each request takes 0.5 s, and the running request has already begun
        assert first.expected_s(before) == pytest.approx((before + 0.75) * 0.5, abs=0.3)


def test_parallel_streams_do_not_raise_the_first_token_forecast():
    first = after_traffic(servers=100, service_s=1.0, gap_s=0.2)
    assert first.expected_s(10) == pytest.approx(1.0, abs=0.01)


def test_forecast_needs_eight_streams_and_has_an_upper_bound():
    first = FirstTokens()
    for before in range(7):
        first.begin()
        first.end(before, 1.0 + before)
    assert first.expected_s(50) == 0.0
    first.begin()
    first.end(7, 8.0)
    assert first.expected_s(10) == pytest.approx(11.0)
    assert first.expected_s(50) == pytest.approx(16.0)
    assert first.expected_s(500) == pytest.approx(16.0)


def test_streams_without_a_first_token_are_not_measured():
    first = FirstTokens()
    for _ in range(20):
        first.begin()
        first.end(0, None)
    assert (first.waiting, first.expected_s(3)) == (0, 0.0)


def test_forecast_of_an_unloaded_model_is_its_load_time():
    measured = forecast(ModelFacts(loading=1, load_s=40.0, loading_s=15.0), FirstTokens())
    assert measured.first_token_s == 25.0
    assert measured.later_s(1.0) == 24.0
    assert "loading; a load took 40" in measured.because
    asleep = ModelFacts(asleep=1, wake_s=2.5, load_s=40.0)
    assert (asleep.state, asleep.seconds_until_loaded) == ("asleep", 2.5)
    assert ModelFacts(loading=1, loading_s=5.0, load_s=40.0).seconds_until_loaded == 35.0
    assert "no load has been measured" in forecast(ModelFacts(), FirstTokens()).because


def test_forecast_includes_the_sessions_queue():
    expected = forecast(ModelFacts(hot=2, queued=30, running=10, run_s=2.0), FirstTokens())
    assert (expected.first_token_s, expected.later_s(1.0)) == (6.0, 5.0)
    assert expected.because == "30 calls wait, 10 run, and a call takes 2.0 s"
    assert forecast(HOT, FirstTokens()).later_s(0.001) == 0.0


def test_objective_below_the_idle_time_refuses_no_request():
    first = after_traffic(servers=1, service_s=0.5, gap_s=0.55)
    for _ in range(4):
        first.begin()
    expected = forecast(HOT, first)
    assert expected.later_s(1.0) == pytest.approx(expected.first_token_s - 1.0)
    assert expected.later_s(0.1) == 0.0


def test_requests_are_refused_while_the_journal_is_unwritable():
    models = ServedModels({"m": ModelSettings(path="m")})
    watch = SessionWatch(None, models)
    watch._asked_at = float("inf")  # the watch sends no query, and treats its last answer as recent
    why = "the journal cannot be written (No space left on device)"
    for trouble in ({"journal": why}, {}):
        watch.status = msgspec.structs.replace(STATUS, trouble=trouble)
        asked = admit(watch, models["m"], ttft_s=0.0, waits_s=None)
        if not trouble:
            asyncio.run(asked)
            continue
        with pytest.raises(RequestRefused, match="accepts no requests now: its journal cannot be written") as refused:
            asyncio.run(asked)
        assert (refused.value.error.status, refused.value.error.code) == (503, "session_unavailable")
        assert refused.value.error.retry_after_s > 0
