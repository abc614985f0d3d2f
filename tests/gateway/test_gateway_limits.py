"""`max` and `keep_alive` of a model, with spare devices."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import pytest

if not all(map(find_spec, ("openai", "httpx", "starlette", "uvicorn", "prometheus_client", "torch", "transformers"))):
    pytest.skip("needs the extras serve, models and test", allow_module_level=True)

import httpx
import openai
from faults.world import kill
from gateway.running import LIMIT_S, RunningGateway, until

pytestmark = pytest.mark.slow
QUESTION = [{"role": "user", "content": "What is two plus two?"}]


def shown(gateway):
    models = httpx.get(f"{gateway.url}/status", timeout=LIMIT_S).json()["models"]
    return next(model for model in models if model["name"] == "fleeting")


def ask(gateway, tokens=8):
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", timeout=LIMIT_S, max_retries=0) as client:
        return client.chat.completions.create(
            model="fleeting", messages=QUESTION, max_tokens=tokens, temperature=0, seed=1
        )


def test_no_second_library_is_loaded_however_many_requests_wait(gateway):
    [pilot] = until(lambda: httpx.get(f"{gateway.url}/status", timeout=LIMIT_S).json()["pilots"], why="a pilot is here")
    assert len(pilot["devices"]) == 3
    seen = []
    with ThreadPoolExecutor(40) as threads:
        asked = [threads.submit(ask, gateway, 200) for _ in range(40)]
        while not all(one.done() for one in asked):
            model = shown(gateway)
            seen.append(model["hot"] + model["loading"])
    assert all(one.result().choices for one in asked)
    assert max(seen) == 1


@pytest.mark.long
def test_an_idle_model_goes_cold_and_the_next_request_wakes_it(gateway, world):
    assert ask(gateway).choices
    until(lambda: shown(gateway)["state"] == "cold", why="a second of idling is over")
    assert ask(gateway).choices
    kill([world.manager()])
    assert ask(gateway).choices
    until(lambda: shown(gateway)["state"] == "cold", why="a manager that was started again counts on")
    assert ask(gateway).choices


def test_a_policy_that_does_not_honour_it_is_named_at_the_start(world):
    other = RunningGateway(world.path / "other", "other.toml", "models.toml")
    site = (other.folder / "site.toml").read_text().replace('"here"', '"other"')
    (other.folder / "other.toml").write_text(f'{site}[policy]\nname = "prompt-tuner"\n')
    with pytest.raises(
        AssertionError, match=r"\[models.fleeting\] max: the policy prompt-tuner of session \S+ does not"
    ):
        other.start()
    other.end()
