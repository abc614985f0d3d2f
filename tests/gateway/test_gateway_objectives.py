"""Requests are admitted by their objectives in models.toml and request headers: by the gateway, or by a session under
the policy `slinfer`.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import random
import time

import msgspec
import pytest

pytest.importorskip("starlette")

import httpx
from gateway.asking import CHAT, answer_of, client_at
from gateway.running import LIMIT_S, SITE, until
from gateway.test_gateway_notes import STATUS
from tiny_model import write_tiny_model

from stoker.apps.common.models_file import ModelSettings, parse_models
from stoker.apps.common.openai_requests import ApiRequest, ChatMessage, Endpoint, RequestRefused, SamplingOptions
from stoker.apps.gateway.answering import refuse_long_wait
from stoker.apps.gateway.failures import error_for_client
from stoker.apps.gateway.figures import GatewayMetrics, RunningRequest
from stoker.apps.gateway.objectives import LatencyObjectives, RequestLengths, read_objective_headers, refuse_objectives
from stoker.apps.gateway.served import (
    FirstTokenWaits,
    ModelFacts,
    ServedModel,
    ServedModels,
    SessionWatch,
    forecast_first_token,
)
from stoker.apps.gateway.usage import UsageFile, UsageRecorder
from stoker.errors import CallDroppedError, ConfigError

IDLE_S = 2.5
"""`slinfer` unloads a model that was idle for a second."""
SLINFER = frozenset({"ttft_s", "tpot_s", "expected_output"})
MODELS = """
[models.small]
path = "models/tiny"
ttft = "60 s"
tpot = "20 s"
min = 1
"""


@pytest.fixture(scope="module")
def write_models():
    def write(folder):
        (folder / "site.toml").write_text(SITE + '[policy]\nname = "slinfer"\n')
        (folder / "models.toml").write_text(MODELS)

    return write


@pytest.fixture(scope="module")
def socket_path(world):
    return str(world.path / "s")


@pytest.fixture(scope="module")
def serve_options(socket_path):
    return ["--uds", socket_path]


@pytest.fixture
def http(gateway, socket_path):
    transport = httpx.HTTPTransport(uds=socket_path)
    with httpx.Client(base_url="http://stoker", transport=transport, timeout=LIMIT_S) as client:
        yield client


def request(text: str = "one two three", *, most: int = 0) -> ApiRequest:
    asked = (ChatMessage("user", text),)
    return ApiRequest("id", 0, Endpoint.CHAT, "small", asked, sampling=SamplingOptions(max_new_tokens=most))


# ---- what the policy is told


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "model"
    write_tiny_model(path)  # every token is one letter
    return path


def test_call_has_the_objectives_and_lengths_of_its_request(folder):
    settings = ModelSettings(path=str(folder), ttft=0.5, tpot=0.1)
    model = ServedModel("small", settings, honoured=SLINFER)
    model.lengths.record_answer_length(40)
    model.lengths.record_answer_length(20)
    wants = asyncio.run(model.choose_app(request(), {"tpot": 0.3}, in_pieces=True)).specification.requirements
    assert (wants.options.objective.ttft_s, wants.options.objective.tpot_s, wants.options.stream) == (0.5, 0.3, True)
    assert wants.features.expected_output == 30
    assert wants.features.input_length == len("one two three") + 4


def test_call_has_no_objectives_if_its_policy_ignores_them(folder):
    model = ServedModel("small", ModelSettings(path=str(folder), ttft=0.5, tpot=0.1))
    wants = asyncio.run(model.choose_app(request(), {})).specification.requirements
    assert (wants.options.objective.ttft_s, wants.features) == (0.0, None)


def test_expected_answer_length_follows_earlier_answers(folder):
    lengths = RequestLengths(str(folder))
    assert [lengths.estimate_answer_tokens(most) for most in (0, 64)] == [0, 64]
    lengths.record_answer_length(100)
    assert [lengths.estimate_answer_tokens(most) for most in (0, 64, 500)] == [100, 64, 100]


def test_length_of_a_long_prompt_is_estimated_from_a_part(folder):
    lengths = RequestLengths(str(folder))
    short, long = (
        asyncio.run(lengths.make_features(request("one two " * n)))["input_length"] for n in (2_000, 200_000)
    )
    assert (short, long) == (16_004, 1_600_004)


@pytest.mark.parametrize(
    ("tokenizer", "model", "said"),
    [
        (None, "somebody/model", "estimated at 4 characters per token"),
        ("{", "", "the tokenizer of {folder} cannot be read"),
        ('{"version": "1.0"}', "", "the tokenizer of {folder} cannot be read"),
    ],
)
def test_prompt_is_estimated_without_a_usable_tokenizer(tmp_path, caplog, tokenizer, model, said):
    if tokenizer is not None:
        (tmp_path / "tokenizer.json").write_text(tokenizer)
    lengths = RequestLengths(model or str(tmp_path))
    for _ in range(2):
        assert asyncio.run(lengths.make_features(request("x" * 400)))["input_length"] == 104
    [record] = caplog.records
    assert said.format(folder=tmp_path) in record.getMessage()


@pytest.mark.parametrize(
    "setting", ['ttft = "0 s"', "ttft = 0", 'tpot = "0 ms"', 'ttft = "2 d"', 'kind = "embedding"\ntpot = "1 s"']
)
def test_impossible_objective_in_the_models_file_is_refused(tmp_path, setting):
    with pytest.raises(
        ConfigError, match=r"models.toml: .*\[models.m\].* (more than 0 and at most a day|models that generate text)"
    ):
        parse_models(f'[models.m]\npath = "x"\n{setting}', file="models.toml", folder=tmp_path)


@pytest.mark.parametrize(
    ("ttft_s", "comes_at_s", "in_time"),
    [
        (1.0, [0.1, 1.05, 1.15], True),  # these tokens are due at 1.0, 1.1 and 1.2 s
        (1.0, [0.1, 1.15, 1.16], False),  # late: the second token was due at 1.1 s
        (0.0, [0.5, 0.59, 0.69], True),  # without a TTFT objective, later tokens are due after the first token
        (0.0, [0.5, 0.65, 0.66], False),
    ],
)
def test_deadline_of_a_later_token_follows_from_its_position(tmp_path, monkeypatch, ttft_s, comes_at_s, in_time):
    metrics, now = GatewayMetrics(UsageRecorder(UsageFile(tmp_path))), [0.0]
    models = ServedModels({"small": ModelSettings(path="m")}, honoured=SLINFER)
    monkeypatch.setattr("stoker.apps.gateway.figures.time.monotonic", lambda: now[0])
    figures = RunningRequest(
        metrics, models["small"], Endpoint.CHAT, begun=100.0, wanted=LatencyObjectives(ttft_s, 0.1)
    )
    for at_s in comes_at_s:
        now[0] = 100.0 + at_s
        figures.count_written_tokens(1, streamed=True)
    figures.end_request(None)
    said = "yes" if in_time else "no"
    line = f'stoker_gateway_objectives_total{{met="{said}",model_name="small",objective="tpot"}} 1.0'
    assert line in metrics.render_text(models, None).decode()


def test_metrics_count_met_objectives_and_refused_requests(tmp_path):
    metrics = GatewayMetrics(UsageRecorder(UsageFile(tmp_path)))
    models = ServedModels({"small": ModelSettings(path="m", ttft=60.0)}, honoured=SLINFER)
    model = models["small"]
    for wanted in (LatencyObjectives(0.001, 60.0), LatencyObjectives(60.0, 60.0), LatencyObjectives()):
        figures = RunningRequest(metrics, model, Endpoint.CHAT, begun=time.monotonic() - 1.0, wanted=wanted)
        for _ in range(2):
            figures.count_written_tokens(1, streamed=True)
        figures.end_request(None)
    dropped = CallDroppedError("call c-1: ...", call="c-1", reason="late", retry_after_s=2.5)
    RunningRequest(metrics, model, Endpoint.CHAT, begun=0.0, wanted=LatencyObjectives(1.0)).end_request(dropped)
    assert (model.meter.objectives_met_share, model.meter.refused, model.meter.failed) == (0.5, 1, 0)
    lines = metrics.render_text(models, None).decode()
    for expected in (
        'stoker_gateway_objectives_total{met="no",model_name="small",objective="ttft"} 1.0',
        'stoker_gateway_objectives_total{met="yes",model_name="small",objective="ttft"} 1.0',
        'stoker_gateway_objectives_total{met="yes",model_name="small",objective="tpot"} 2.0',
        'stoker_gateway_refused_total{model_name="small"} 1.0',
    ):
        assert expected in lines


def test_objectives_are_refused_for_batches_and_tpot_for_embeddings():
    with pytest.raises(RequestRefused, match="stoker-ttft is for requests that are answered at once, not for a batch"):
        refuse_objectives({"stoker-ttft": "1 s"})
    refuse_objectives({"prefer": "wait=1"})
    with pytest.raises(RequestRefused, match="stoker-tpot is for models that generate text"):
        read_objective_headers({"stoker-tpot": "1 s"}, honoured=SLINFER, writes=False)


@pytest.mark.parametrize("value", ["soon", "0 s", "-1 s", "2 days", "inf", ""])
def test_objective_header_that_is_not_a_time_is_refused(value):
    with pytest.raises(RequestRefused, match="stoker-ttft must be a time"):
        read_objective_headers({"stoker-ttft": value}, honoured=SLINFER)


def test_objective_headers_are_refused_if_the_policy_ignores_them():
    asked = {"stoker-ttft": "250 ms", "stoker-tpot": "0.05 s"}
    assert read_objective_headers(asked, honoured=SLINFER) == {"ttft": 0.25, "tpot": 0.05}
    with pytest.raises(RequestRefused, match="stoker-tpot needs a session whose policy honours it"):
        read_objective_headers(asked, honoured=frozenset())


def test_error_of_a_dropped_call_says_when_to_retry():
    error = CallDroppedError("call c-1: ...", call="c-1", reason="its first token would be late", retry_after_s=2.5)
    refusal = error_for_client(error)
    assert (refusal.retry_after_s, refusal.status, refusal.code) == (2.5, 503, "objective_unreachable")
    assert "c-1" not in refusal.message


# ---- admission by the gateway

HOT = ModelFacts(hot=1)


def after_traffic(*, servers, service_s, gap_s, count=200, seed=1):
    """Return measurements of streams that arrived at random and were served in order by `servers` servers."""
    draw, first, free, waiting, now = random.Random(seed), FirstTokenWaits(), [0.0] * servers, [], 0.0
    for _ in range(count):
        now += draw.expovariate(1 / gap_s)
        while waiting and waiting[0][0] <= now:
            at, came, before = heapq.heappop(waiting)
            first.end_wait(before, at - came)
        begun = max(now, heapq.heappop(free))
        heapq.heappush(free, begun + service_s)
        heapq.heappush(waiting, (begun + service_s, now, first.begin_wait()))
    for at, came, before in sorted(waiting):
        first.end_wait(before, at - came)
    assert first.waiting == 0
    return first


def test_first_token_forecast_equals_the_waiting_time_in_the_queue():
    first = after_traffic(servers=1, service_s=0.5, gap_s=0.55)
    for before in (0, 2, 5):  # each request takes 0.5 s, and the running request has already begun
        assert first.forecast_s(before) == pytest.approx((before + 0.75) * 0.5, abs=0.3)


def test_parallel_streams_do_not_raise_the_first_token_forecast():
    first = after_traffic(servers=100, service_s=1.0, gap_s=0.2)
    assert first.forecast_s(10) == pytest.approx(1.0, abs=0.01)


def test_forecast_needs_eight_streams_and_has_an_upper_bound():
    first = FirstTokenWaits()
    for before in range(7):
        first.begin_wait()
        first.end_wait(before, 1.0 + before)
    assert first.forecast_s(50) == 0.0
    first.begin_wait()
    first.end_wait(7, 8.0)
    assert first.forecast_s(10) == pytest.approx(11.0)
    assert first.forecast_s(50) == pytest.approx(16.0)
    assert first.forecast_s(500) == pytest.approx(16.0)


def test_streams_without_a_first_token_are_not_measured():
    first = FirstTokenWaits()
    for _ in range(20):
        first.begin_wait()
        first.end_wait(0, None)
    assert (first.waiting, first.forecast_s(3)) == (0, 0.0)


def test_forecast_of_an_unloaded_model_is_its_load_time():
    measured = forecast_first_token(ModelFacts(loading=1, load_s=40.0, loading_s=15.0), FirstTokenWaits())
    assert measured.first_token_s == 25.0
    assert measured.retry_delay_s(1.0) == 24.0
    assert "loading; a load took 40" in measured.because
    asleep = ModelFacts(asleep=1, wake_s=2.5, load_s=40.0)
    assert (asleep.state, asleep.seconds_until_loaded) == ("asleep", 2.5)
    assert ModelFacts(loading=1, loading_s=5.0, load_s=40.0).seconds_until_loaded == 35.0
    assert "no load has been measured" in forecast_first_token(ModelFacts(), FirstTokenWaits()).because


def test_forecast_includes_the_sessions_queue():
    expected = forecast_first_token(ModelFacts(hot=2, queued=30, running=10, run_s=2.0), FirstTokenWaits())
    assert (expected.first_token_s, expected.retry_delay_s(1.0)) == (6.0, 5.0)
    assert expected.because == "30 calls wait, 10 run, and a call takes 2.0 s"
    assert forecast_first_token(HOT, FirstTokenWaits()).retry_delay_s(0.001) == 0.0


def test_objective_below_the_idle_time_refuses_no_request():
    first = after_traffic(servers=1, service_s=0.5, gap_s=0.55)
    for _ in range(4):
        first.begin_wait()
    expected = forecast_first_token(HOT, first)
    assert expected.retry_delay_s(1.0) == pytest.approx(expected.first_token_s - 1.0)
    assert expected.retry_delay_s(0.1) == 0.0


def test_requests_are_refused_while_the_journal_is_unwritable():
    models = ServedModels({"m": ModelSettings(path="m")})
    watch = SessionWatch(None, models)
    watch._asked_at = float("inf")  # the watch sends no query, and treats its last answer as recent
    why = "the journal cannot be written (No space left on device)"
    for trouble in ({"journal": why}, {}):
        watch.status = msgspec.structs.replace(STATUS, trouble=trouble)
        asked = refuse_long_wait(watch, models["m"], ttft_s=0.0, waits_s=None)
        if not trouble:
            asyncio.run(asked)
            continue
        with pytest.raises(RequestRefused, match="accepts no requests now: its journal cannot be written") as refused:
            asyncio.run(asked)
        assert (refused.value.error.status, refused.value.error.code) == (503, "session_unavailable")
        assert refused.value.error.retry_after_s > 0


# ---- a gateway


@pytest.mark.slow
def test_request_that_would_be_late_is_refused_and_others_served(gateway, http):
    def ask(**headers: str) -> httpx.Response:
        body = {"model": "small", "messages": [{"role": "user", "content": "?"}], "max_tokens": 8}
        return http.post(CHAT, json=body, headers=headers, timeout=LIMIT_S)

    assert ask().status_code == 200

    def refused() -> httpx.Response | None:  # ask repeatedly: the pilot refuses only after it has measured steps
        answer = ask(**{"Stoker-TTFT": "1 ms"})
        return answer if answer.status_code == 503 else None

    answer = until(refused, why="a request that would be late is refused")
    error = json.loads(answer.text)["error"]
    assert error["code"] == "objective_unreachable"
    assert "its first token would be more than" in error["message"]
    assert int(answer.headers["retry-after"]) >= 1
    assert ask().status_code == 200
    assert ask(**{"Stoker-TTFT": "30 s", "Stoker-TPOT": "10 s"}).status_code == 200
    assert http.post(CHAT, json={}, headers={"Stoker-TTFT": "soon"}).status_code == 400
    assert http.post("/v1/batches", json={}, headers={"Stoker-TTFT": "1 s"}).json()["error"]["param"] == "stoker-ttft"
    time.sleep(IDLE_S)
    small = next(model for model in http.get("/status").json()["models"] if model["name"] == "small")
    assert small["state"] == "hot", "min = 1 keeps it loaded"
    assert small["refused"] >= 1
    assert "stoker_gateway_refused_total" in http.get("/metrics").text


@pytest.mark.slow
def test_gateway_on_a_unix_socket_streams_the_same_answer(gateway, http, socket_path):
    assert f"curl --unix-socket {socket_path}" in "".join(gateway.said)
    with client_at("http://stoker", http_client=http) as client:
        assert answer_of(client)
