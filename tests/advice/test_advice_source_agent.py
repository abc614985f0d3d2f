"""Facts from the optional language model must match the source code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from advice.fake_endpoint import DRIP, FakeEndpoint

from stoker.manager.advice.endpoint import ModelEndpoint
from stoker.manager.advice.source.agent import add_facts_from_model
from stoker.manager.advice.source.extractor import SourceText, extract_facts
from stoker.manager.advice.source.facts import WorkloadFacts
from stoker.site import Advice

pytest.importorskip("httpx", reason="the endpoint is asked through httpx")

MAIN = "import registry\nmodel = registry.best('bert-base', rows=4096)\nDataLoader(d, batch_size=16)\n"
REGISTRY = "# corpus: wiki-small\napi_key = 'abcd1234efgh5678'\ndef best(name, rows): return LOADERS[name](rows)\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    own = tmp_path / "own"
    own.mkdir()
    (own / "train.py").write_text(MAIN)
    (own / "registry.py").write_text(REGISTRY)
    (tmp_path / "secret.txt").write_text("gpt2-secret")
    return own


def asked(endpoint: FakeEndpoint, folder: Path, **settings: Any) -> tuple[WorkloadFacts, WorkloadFacts]:
    source = SourceText(MAIN, file=str(folder / "train.py"))
    facts = extract_facts(source, folders=[folder])
    model = Advice(**{"url": endpoint.url, "model": "fake", "time_limit_s": 5.0, **settings})
    return facts, add_facts_from_model(source, facts, folders=[folder], model=ModelEndpoint(model))


def without_notes(facts: WorkloadFacts) -> WorkloadFacts:
    return msgspec.structs.replace(facts, notes=())


def test_agent_uses_its_tools_and_fills_missing_facts(endpoint: FakeEndpoint, folder: Path):
    turns = [
        "Thought: what is there?\nAction: file_tree\nAction Input:",
        "Action: file_read\nAction Input: registry.py",
        'Final Answer: ```json\n{"model": "bert-base", "data": "wiki-small", "items": "4096", "batch_size": 99}\n```',
    ]
    endpoint.answer = lambda request, number: turns[number - 1]
    before, after = asked(endpoint, folder)
    assert before.items is None
    assert after.data.value == "wiki-small"
    assert after.items.value == 4096
    assert after.batch_size == before.batch_size, "certain facts of the extractor are kept"
    tree, text = (endpoint.asked[number]["messages"][-1]["content"] for number in (1, 2))
    assert tree == "Observation: registry.py\ntrain.py"
    assert "corpus" in text
    assert endpoint.asked[0]["path"] == "/v1/chat/completions"


def test_secrets_are_masked_before_anything_is_sent(endpoint: FakeEndpoint, folder: Path):
    turns = ["Action: file_read\nAction Input: registry.py", "Final Answer: {}"]
    endpoint.answer = lambda request, number: turns[number - 1]
    asked(endpoint, folder)
    assert "abcd1234efgh5678" not in json.dumps(endpoint.asked)
    assert "***" in json.dumps(endpoint.asked)


@pytest.mark.parametrize(
    "path", ["../secret.txt", "/etc/passwd", "{}", '{"path": "../secret.txt"}', "", "x\0", "a:9999"]
)
def test_file_outside_the_folders_is_not_shown(endpoint: FakeEndpoint, folder: Path, path: str):
    turns = [f"Action: file_read\nAction Input: {each}" for each in (path, folder.parent / "secret.txt")]
    endpoint.answer = lambda request, number: [*turns, "Final Answer: {}"][number - 1]
    asked(endpoint, folder)
    sent = json.dumps([each["messages"][2:] for each in endpoint.asked])
    assert "not read" in sent
    assert "root:" not in sent
    assert "gpt2-secret" not in sent.replace(str(folder.parent), "")


def test_language_model_values_absent_from_the_source_are_ignored(endpoint: FakeEndpoint, folder: Path):
    made_up = {"model": "gpt-17", "data": "imagenet", "items": 77, "precision": "float16"}
    made_up |= {"epochs": -3, "steps": True, "task": ["x"]}
    endpoint.answer = lambda request, number: "Final Answer: " + json.dumps(made_up)
    before, after = asked(endpoint, folder)
    assert without_notes(after) == without_notes(before)
    assert sum("which the source does not contain" in note for note in after.notes) == 4


def says(answer: object) -> Callable[[FakeEndpoint], None]:
    return lambda server: setattr(server, "answer", lambda request, number: answer)


ENDLESS_TOOLS = "Action: file_tree\nAction Input: "
ENDPOINTS = {
    "hangs": (lambda server: setattr(server, "answer", lambda *_: server.released.wait() and ""), "time|Timeout"),
    "drips": (says(DRIP), "time limit of 2 s has passed"),
    "nonsense": (says("The answer is blowing in the wind."), "neither an action nor an answer"),
    "odd JSON": (says(b'{"choices": [{"message": {"content": 7}}], "usage": 3}'), "not a chat completion"),
    "endless tools": (says(ENDLESS_TOOLS), "within its turns"),
    "spends": (lambda server: setattr(server, "tokens", 10**9), "30,000 tokens is spent: 1,000,000,000 were used"),
    "floods": (says(b"x" * 3_000_000), "longer than"),
    "refuses": (lambda server: setattr(server, "status", 503), "status 503"),
}


@pytest.mark.parametrize("name", ENDPOINTS)
def test_facts_are_unchanged_if_the_language_model_misbehaves(endpoint: FakeEndpoint, folder: Path, name: str):
    misbehave, why = ENDPOINTS[name]
    misbehave(endpoint)
    limit_s = {"hangs": 0.4, "drips": 2.0}.get(name, 5.0)  # 2 s: `drips` starts to answer before the limit
    before, after = asked(endpoint, folder, time_limit_s=limit_s)
    assert without_notes(after) == without_notes(before)
    assert any(part in after.notes[-1] for part in why.split("|")), after.notes


def test_conversation_with_the_model_stops_at_its_token_budget(endpoint: FakeEndpoint, folder: Path):
    says(ENDLESS_TOOLS)(endpoint)
    _, after = asked(endpoint, folder, tokens=1_500)
    assert "budget of 1,500 tokens is spent" in after.notes[-1]
    assert len(endpoint.asked) < 10


def test_no_request_is_sent_if_no_language_model_is_configured(endpoint: FakeEndpoint, folder: Path):
    facts = extract_facts(SourceText(MAIN))
    assert add_facts_from_model(SourceText(MAIN), facts, folders=[folder], model=None) is facts
    assert endpoint.asked == []


def test_api_key_is_read_from_the_environment(endpoint: FakeEndpoint, folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("THE_KEY", "k-123")
    _, after = asked(endpoint, folder, key_variable="THE_KEY")
    assert after.notes == ()
    assert "k-123" not in repr(Advice("http://u", "m", key_variable="THE_KEY"))
