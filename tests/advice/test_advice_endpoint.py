"""Test the client of a language model: token limits, masked secrets and JSON schemas."""

from __future__ import annotations

import pytest
from advice.fake_endpoint import FakeEndpoint

from stoker.manager.advice.endpoint import (
    Conversation,
    EndpointError,
    ModelEndpoint,
    parse_first_json_object,
)
from stoker.manager.cli.doctor_machine import FindingLevel
from stoker.manager.cli.doctor_site import check_advice_endpoint
from stoker.site import Advice, Site

pytest.importorskip("httpx", reason="the endpoint is asked through httpx")

SCHEMA = {"type": "object"}


def test_all_conversations_of_a_session_share_its_token_budget(endpoint: FakeEndpoint):
    endpoint.answer = lambda request, number: "{}"
    endpoint.tokens = 400
    asking = ModelEndpoint(Advice(endpoint.url, "fake", session_tokens=1_000))
    assert [asking.ask("Say it.", "?", schema=SCHEMA) for _ in range(3)] == [{}, {}, {}]
    with pytest.raises(EndpointError, match="session's budget of 1,000 tokens is spent"):
        asking.ask("Say it.", "?", schema=SCHEMA)
    with pytest.raises(EndpointError, match="session's budget"):
        Conversation(asking).ask([{"role": "user", "content": "?"}])
    assert len(endpoint.asked) == 3
    assert asking.tokens_left == 0


def test_schema_is_not_sent_again_after_the_endpoint_rejects_it(endpoint: FakeEndpoint):
    def answer(request: dict, number: int) -> str:
        endpoint.status = 400 if "response_format" in request else 200
        return '{"a": 1}'

    endpoint.answer = answer
    asking = ModelEndpoint(Advice(endpoint.url, "fake"))
    assert asking.ask("Say it.", "?", schema=SCHEMA) == asking.ask("Say it.", "?", schema=SCHEMA) == {"a": 1}
    assert ["response_format" in each for each in endpoint.asked] == [True, False, False]


def test_answer_without_a_json_object_is_an_error(endpoint: FakeEndpoint):
    for text in ("no braces", "{not JSON", "[1]"):
        endpoint.answer = lambda request, number, text=text: text
        with pytest.raises(EndpointError, match="not a JSON object"):
            ModelEndpoint(Advice(endpoint.url, "fake")).ask("Say it.", "?", schema=SCHEMA)
    assert parse_first_json_object('Sure: ```json\n{"a": {"b": 2}}\n``` as you wished {') == {"a": {"b": 2}}


# ---- stoker doctor


def site(url: str, **settings: str) -> Site:
    return Site(name="lab", advice=Advice(url=url, **{"model": "fake", **settings}))


def test_doctor_reports_whether_the_endpoint_has_the_model(endpoint: FakeEndpoint):
    assert list(check_advice_endpoint(Site())) == []
    (well,) = check_advice_endpoint(site(endpoint.url))
    assert (well.level, well.text) == (FindingLevel.OK, f"advice may ask fake at {endpoint.url}")
    (other,) = check_advice_endpoint(site(endpoint.url, model="large"))
    assert (other.level, other.fix) == (FindingLevel.WARN, "fix [advice] model: the endpoint serves fake")


def test_doctor_reports_that_an_endpoint_does_not_answer(endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("THE_KEY", raising=False)
    endpoint.status = 404
    (found,) = check_advice_endpoint(site(endpoint.url))
    assert found.level is FindingLevel.WARN
    assert "advice comes from rules: the endpoint answered with status 404" in found.text
    unset, down = check_advice_endpoint(site("http://127.0.0.1:9/v1", key_variable="THE_KEY"))
    assert unset.fix == "export THE_KEY=KEY, where `stoker up` runs"
    assert "ConnectError" in down.text
