"""A language model judges uncertain failures. A verdict counts only if it quotes a log line."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from advice.fake_endpoint import KILLED, FakeEndpoint

from stoker.manager.advice.endpoint import ModelEndpoint
from stoker.manager.advice.judging import diagnose_failed_call
from stoker.manager.advice.logs import Fault, FaultKind, LocatedFailure, LogLine, classify_failure, locate_failure
from stoker.manager.advice.logs.opinion import (
    BLAMED_BY_MODEL,
    OPINION_BELOW,
    SURE_IF_CONTRADICTED,
    ask_second_opinion,
    choose_excerpt_lines,
)
from stoker.manager.policies.reactions import LEAST_CERTAINTY
from stoker.site import Advice

pytest.importorskip("httpx", reason="the endpoint is asked through httpx")

ODD = "storaged: a lease failed"
LOG = "epoch 1\nepoch 2\n" + ODD + "\n"
INFRASTRUCTURE = {"line": ODD, "cause": "infrastructure", "component": "network"}


def doubted() -> tuple[LocatedFailure, Fault]:
    located = locate_failure(LOG)
    assert located is not None
    fault = classify_failure(located)
    assert fault.sure < OPINION_BELOW, "these tests need a failure that the rules doubt"
    return located, fault


def asked(endpoint: FakeEndpoint, **settings: Any) -> Fault:
    located, fault = doubted()
    model = Advice(**{"url": endpoint.url, "model": "fake", "time_limit_s": 5.0, **settings})
    return ask_second_opinion(located, fault, ModelEndpoint(model))


def says(answer: object) -> Callable[[dict[str, Any], int], object]:
    return lambda request, number: answer if not isinstance(answer, dict) else json.dumps(answer)


def test_language_model_decides_the_cause_if_it_quotes_a_log_line(endpoint: FakeEndpoint):
    for kind, component in (("infrastructure", "network"), ("framework", "versions"), ("user", "code")):
        endpoint.answer = says({"line": "storaged: a lease", "cause": kind, "component": "network"})
        found = asked(endpoint)
        assert (found.kind, found.component) == (FaultKind(kind), component)
        assert found.means == f"{BLAMED_BY_MODEL}: {ODD}"
        assert LogLine(3, ODD) in found.proof


def test_language_model_alone_cannot_quarantine_a_pilot(endpoint: FakeEndpoint):
    _, fault = doubted()
    sure = {}
    for kind in FaultKind:
        endpoint.answer = says({**INFRASTRUCTURE, "cause": kind.value})
        sure[kind] = asked(endpoint).sure
    assert sure[fault.kind] >= LEAST_CERTAINTY, "the rules and the model agree"
    assert {sure[kind] for kind in FaultKind if kind is not fault.kind} == {SURE_IF_CONTRADICTED}
    assert SURE_IF_CONTRADICTED < LEAST_CERTAINTY


@pytest.mark.parametrize(
    "answer",
    [
        {**INFRASTRUCTURE, "line": "CUDA error: uncorrectable ECC error"},  # this line is not in the log
        {**INFRASTRUCTURE, "line": "e"},
        {**INFRASTRUCTURE, "line": 3},
        {**INFRASTRUCTURE, "cause": "gremlins"},
        {"cause": "infrastructure"},
        KILLED,
    ],
    ids=lambda answer: "killed" if answer is KILLED else str(answer),
)
def test_language_model_answer_without_evidence_is_ignored(endpoint: FakeEndpoint, answer: object):
    endpoint.answer = says(answer)
    assert asked(endpoint) == doubted()[1]
    assert endpoint.asked


def test_verdict_is_unchanged_if_the_language_model_fails(endpoint: FakeEndpoint):
    endpoint.answer = says(INFRASTRUCTURE)
    endpoint.status = 500
    assert asked(endpoint) == doubted()[1]
    endpoint.status = 200
    endpoint.answer = lambda request, number: endpoint.released.wait(20) or ""
    assert asked(endpoint, time_limit_s=0.3) == doubted()[1]
    assert asked(endpoint, url="http://127.0.0.1:9/v1") == doubted()[1]
    count = len(endpoint.asked)
    assert asked(endpoint, session_tokens=10) == doubted()[1]
    assert len(endpoint.asked) == count


def test_only_uncertain_call_failures_are_sent_to_the_model():
    heard: list[Fault] = []

    def opinion(located: LocatedFailure, fault: Fault) -> Fault:
        heard.append(fault)
        return fault

    assert diagnose_failed_call("OSError: [Errno 28] No space left on device", opinion=opinion).sure >= OPINION_BELOW
    assert heard == []
    assert diagnose_failed_call(ODD, opinion=opinion) == diagnose_failed_call(ODD)
    assert len(heard) == 1


def test_log_excerpt_is_short_and_masks_secrets():
    noise = "".join(f"storaged {'abcdefghij'[at]}: it failed; password=hunter{at}22 {'x' * 500}\n" for at in range(10))
    located = locate_failure(LOG + noise)
    assert located is not None
    lines = choose_excerpt_lines(located)
    text = "\n".join(line.text for line in lines)
    assert ODD in text
    assert "hunter" not in text
    assert len(text) < 3_200
    assert [line.number for line in lines] == sorted({line.number for line in lines})
