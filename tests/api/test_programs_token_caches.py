"""Contexts with token caches share a device under `slinfer`: model folders, a hub model and a user-defined context."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from polling import PATIENCE_S, polls
from tiny_model import write_tiny_model

import stoker
from stoker.contexts.inference.adapter import TokenCache
from stoker.errors import CallDroppedError
from stoker.manager.executor.apps import StokerApp
from stoker.manager.executor.options import parse_call_specification
from stoker.protocol.to_client import Status

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")),
        reason="needs torch and transformers",
    ),
]
HUB_NAME = "somebody/tiny"
TOKENS = 30


class OwnCache:
    """A user-defined context with a cache of 30 tokens."""

    def token_cache(self) -> TokenCache:
        return TokenCache(weights_bytes=50_000_000, token_bytes=1000, tokens=TOKENS)


@stoker.context(slots=8)
def own_cache():
    return OwnCache()


@stoker.app(ttft="60 s", tpot="20 s", features={"input_length": 10, "expected_output": 10})
def write(model, tokens):
    return len(model.generate(["x" * 10], max_new_tokens=tokens)[0])


def reply(model, ready):
    import time

    while not os.path.exists(ready):
        time.sleep(0.01)
    return type(model).__name__


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("hub") / "hub" / f"models--{HUB_NAME.replace('/', '--')}"
    for part in ("refs", "snapshots"):
        (folder / part).mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    write_tiny_model(folder / "snapshots" / ("0" * 40))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(folder.parent.parent))
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


@pytest.fixture(scope="module")
def session(hub: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("session")
    (folder / "site.toml").write_text('[pilot]\ndevices = "cpu:1"\n[policy]\nname = "slinfer"\n')
    with stoker.load(site=str(folder / "site.toml"), run_dir=str(folder / "runs")) as session:
        yield session


# ---- two engines on one device


def new_prompt():
    """Return a prompt of 100 characters. Prompts share no prefix, so the engine reads every prompt whole."""
    from uuid import uuid4

    return (uuid4().hex * 4)[:100]


def write_text(model, tokens):
    return model.generate([new_prompt()], max_new_tokens=tokens)[0]


def write_on(model, tokens, begun):
    """Generate `tokens` tokens. Create the file `begun` after the first token."""
    for _ in model.stream(new_prompt(), max_new_tokens=tokens):
        Path(begun).touch()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, stoker.contexts.Recipe]:
    folder = tmp_path_factory.mktemp("models")
    longest = {"three": "1792", "four": "1280"}  # two equal models would be the same context
    for name, tokens in longest.items():
        write_tiny_model(folder / name, ends=False, ascii_only=True)  # a text of 60 tokens has 60 characters
        config = folder / name / "config.json"
        config.write_text(config.read_text().replace("2048", tokens))
    return {name: stoker.causal_lm(str(folder / name), memory="700 MB", threads=1) for name in longest}


def test_pilot_refuses_a_request_that_would_miss_its_latency_limit(
    session: Any, models: dict[str, Any], tmp_path: Path, until: Callable[..., Any]
) -> None:
    assert all(model.needs.token_bytes for model in models.values())

    def ask(name: str, *words: Any, function: Callable[..., Any] = write_text, **wishes: Any) -> Any:
        wants = parse_call_specification({"context": models[name], **wishes}, takes_context=True)
        return StokerApp(function, wants, {})(*words)

    # All prompts have one length and are read alone. A tiny model reads 200 tokens about as fast as 10 tokens.
    # Measurements of both lengths could therefore give a forecast below one second for 200,000 tokens.
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


# ---- token caches


def promised(status: Status) -> int:
    return sum(device.promised_bytes for pilot in status.pilots for device in pilot.devices)


def test_hub_model_reports_its_token_cache_after_its_first_load(session: Any) -> None:
    model = stoker.causal_lm(HUB_NAME, threads=1, min_libraries=1)
    assert model.needs.token_bytes == 0
    asked = write.with_options(context=model)
    assert asked(20).result(PATIENCE_S) > 0
    # The load reserved all memory of the device.
    assert any(0 < promised(session.status()) < 2_000_000_000 for _ in polls(PATIENCE_S))
    assert asked(1900).result(PATIENCE_S) > 0
    assert promised(session.status()) < 2_000_000_000


def test_concurrent_calls_fit_into_the_token_cache_of_a_user_context(session: Any, tmp_path: Path) -> None:
    lengths = {"input_length": 10, "expected_output": 1}
    asked = stoker.app(context=own_cache(), ttft="60 s", tpot="20 s", features=lengths)(reply)
    first = asked(str(tmp_path / "ready"))
    calls = [first, *(asked(str(tmp_path / "ready")) for _ in range(3))]
    running = 0
    for _ in polls(PATIENCE_S):
        [context] = [each for each in session.status().contexts if each.name.startswith("own_cache")]
        running = max(running, context.running)
        if context.running == 2:
            break
    assert (running, context.queued) == (2, 2)  # the cache of 30 tokens fits 22 tokens but not 33
    (tmp_path / "ready").touch()
    assert [call.result(PATIENCE_S) for call in calls] == ["OwnCache"] * 4
