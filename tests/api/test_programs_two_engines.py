"""Under `slinfer` a pilot with two language models on one device accepts or refuses requests by their load."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from polling import PATIENCE_S, polls
from tiny_model import write_tiny_model

import stoker
from stoker.errors import CallDroppedError
from stoker.manager.executor.apps import AppWants, StokerApp
from stoker.manager.executor.options import parse_call_specification

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")),
        reason="needs torch and transformers",
    ),
]


def new_prompt():
    """Return a prompt of 100 characters. Prompts share no prefix, so the engine reads each of them whole."""
    from uuid import uuid4

    return (uuid4().hex * 4)[:100]


def reply(model, tokens):
    return model.generate([new_prompt()], max_new_tokens=tokens)[0]


def write_on(model, tokens, begun):
    """Generate `tokens` tokens. Create the file `begun` after the first token."""
    for _ in model.stream(new_prompt(), max_new_tokens=tokens):
        Path(begun).touch()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, stoker.contexts.Recipe]:
    folder = tmp_path_factory.mktemp("models")
    longest = {"three": "1792", "four": "1280"}  # equal models would be one context
    for name, tokens in longest.items():
        write_tiny_model(folder / name)
        config = folder / name / "config.json"
        config.write_text(config.read_text().replace("2048", tokens))
    return {name: stoker.causal_lm(str(folder / name), memory="700 MB", threads=1) for name in longest}


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("session")
    (folder / "site.toml").write_text('[pilot]\ndevices = "cpu:1"\n[policy]\nname = "slinfer"\n')
    with stoker.load(site=str(folder / "site.toml"), run_dir=str(folder / "runs")) as session:
        yield session


def test_pilot_refuses_a_request_that_would_be_late(
    session: Any, models: dict[str, Any], tmp_path: Path, until: Callable[..., Any]
) -> None:
    assert all(model.needs.token_bytes for model in models.values())

    def ask(name: str, *words: Any, function: Callable[..., Any] = reply, **wishes: Any) -> Any:
        wants = AppWants(parse_call_specification({"context": models[name], **wishes}, takes_context=True))
        others: dict[str, Any] = dict.fromkeys(("batch_size", "ignore_for_cache", "executors"))
        return StokerApp(function, specification=wants, cache=False, **others)(*words)

    # All prompts have one length and are read alone. A tiny model reads 200 tokens about as fast as 10 tokens, so
    # measurements of two lengths could give a forecast below a second for 200,000 tokens.
    beside = [ask(name, 60) for name in ("three", "four")]  # these calls measure the step times
    assert [len(future.result()) for future in beside] == [60, 60]
    begun = {name: tmp_path / f"begun-{name}" for name in ("three", "four")}
    long = [ask(name, tokens, begun[name], function=write_on) for name, tokens in (("three", 1500), ("four", 700))]
    until(lambda: all(path.exists() for path in begun.values()))
    for more in polls(PATIENCE_S):  # wait until the libraries have reported their step times
        dropped = ask("three", 3, ttft_s=1.0, features={"input_length": 200_000}).exception()
        story = str(session.explain(str(dropped.facts["call"]))) if isinstance(dropped, CallDroppedError) else ""
        if "refused by lib-" in story or not more:
            break
    assert "refused by lib-" in story
    assert "its first token would be" in story
    fits = ask("three", 3, ttft_s=120.0, features={"input_length": 100})
    assert len(fits.result()) == 3
    for future in long:
        future.cancel()
