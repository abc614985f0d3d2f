"""Restarts of the gateway, a pilot and a session; keys that change while a gateway runs."""

from __future__ import annotations

import json
import re
import subprocess
from importlib.util import find_spec

import pytest

if not all(map(find_spec, ("openai", "httpx", "starlette", "uvicorn", "prometheus_client", "torch", "transformers"))):
    pytest.skip("needs the extras serve, models and test", allow_module_level=True)

import httpx
import openai
from faults.world import kill
from gateway.running import LIMIT_S, SERVE, RunningGateway, keys, until

pytestmark = pytest.mark.slow
QUESTION = [{"role": "user", "content": "What is two plus two?"}]


def client_of(gateway, key="none"):
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=key, timeout=LIMIT_S, max_retries=0)


def chat(client, **options):
    return client.chat.completions.create(
        **{"model": "small", "messages": QUESTION, "max_tokens": 8, "temperature": 0, **options}
    )


def text_of(chunks):
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def loads(gateway):
    return httpx.get(f"{gateway.url}/status", timeout=LIMIT_S).json()


def status_of(gateway, *options):
    command = [*SERVE, "status", gateway.session, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True).stdout


def test_status_shows_the_models_that_are_served(gateway):
    with client_of(gateway) as client:
        assert text_of(chat(client, stream=True))
    shown = until(lambda: re.search(r"^  models    small .*$", status_of(gateway), re.MULTILINE), why="a row")
    assert "1 hot" in shown[0]
    said = status_of(gateway)
    assert f"served at {gateway.url} (pid " in said
    assert re.search(r"gone +cannot be used: ", said)

    def models():
        """The gateway's record of them, once it includes the stream's end."""
        (note,) = json.loads(status_of(gateway, "--json"))["gateways"]
        return note["models"] if note["models"][0]["ttft_s"] is not None else None

    small, vectors, *_ = until(models, why="the next note")
    assert (small["name"], vectors["name"]) == ("small", "vectors")
    assert small["ttft_s"] > 0


def test_a_killed_gateway_keeps_its_address_and_hot_models(gateway):
    with client_of(gateway) as client:
        text = text_of(chat(client, stream=True))
        url, session = gateway.url, gateway.session
        body = {"model": "small", "messages": QUESTION, "max_tokens": 1900, "temperature": 0, "stream": True}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=LIMIT_S) as half:
            lines = half.iter_lines()
            next(lines)
            gateway.kill()
            with pytest.raises(httpx.HTTPError):
                list(lines)
    gateway.start()
    assert (gateway.url, gateway.session) == (url, session)
    assert "which was up for this site" in "".join(gateway.said)
    with client_of(gateway) as client:
        assert text_of(chat(client, stream=True)) == text
        until(lambda: loads(gateway)["models"][0]["hot"] == 1, why="the one library is shown")
    until(lambda: loads(gateway)["calls"]["running"] == 0, why="the calls of the killed gateway end")


@pytest.mark.long
def test_a_stream_goes_on_when_its_pilot_is_killed(gateway, world):
    with client_of(gateway) as client:
        whole = text_of(chat(client, stream=True, max_tokens=700))
        stream = iter(chat(client, stream=True, max_tokens=700))
        before = [next(stream) for _ in range(10)]
        kill([world.pilot()])
        assert text_of([*before, *stream]) == whole
        assert chat(client).choices


def test_a_gateway_survives_the_manager(gateway, world):
    with client_of(gateway) as client:
        stream = iter(chat(client, stream=True, max_tokens=700))
        before = [next(stream) for _ in range(10)]
        kill([world.manager()])
        assert [*before, *stream][-1].choices[0].finish_reason
        assert chat(client).choices


@pytest.mark.long
def test_a_gateway_ends_with_its_session_and_serves_again(gateway, world):
    url, session = gateway.url, gateway.session
    subprocess.run([*SERVE, "down", session], cwd=gateway.folder, capture_output=True, timeout=LIMIT_S, check=True)
    until(lambda: gateway.has_ended, why="the end of the gateway")
    said = "".join(gateway.said)
    assert f"the gateway ends: session {session} is over: stoker down" in said
    assert "the same command serves again, at the same address" in said
    gateway.start()
    assert (gateway.url, gateway.session == session) == (url, False)
    with client_of(gateway) as client:
        assert chat(client).choices


def test_a_second_gateway_of_the_same_files_is_told(gateway, world):
    second = RunningGateway(gateway.folder)
    with pytest.raises(AssertionError, match="a gateway for these files runs already at port"):
        second.start()


@pytest.mark.long
def test_keys_and_their_limits(gateway, world):
    key = keys(world, "add", "ana", "--requests-per-minute", "1", "--concurrent", "1")
    try:
        with client_of(gateway) as nobody, pytest.raises(openai.AuthenticationError) as refused:
            chat(nobody)
        assert refused.value.code == "invalid_api_key"
        assert httpx.get(f"{gateway.url}/health", timeout=LIMIT_S).status_code == 200
        assert httpx.get(f"{gateway.url}/metrics", timeout=LIMIT_S).status_code == 401
        with client_of(gateway, key) as ana:
            stream = chat(ana, stream=True, max_tokens=1500)
            next(iter(stream))
            with pytest.raises(openai.RateLimitError) as limited:
                chat(ana)
            assert limited.value.code == "concurrent_requests"
            stream.close()
            limited = until(lambda: _refused_for(ana, "requests_per_minute"), why="the stream's place is free again")
            assert 1 <= int(limited.response.headers["retry-after"]) <= 60
        assert "1 requests a minute, 1 at a time" in keys(world, "list")
        keys(world, "remove", "ana")
        with client_of(gateway, key) as ana, pytest.raises(openai.AuthenticationError):
            chat(ana)
    finally:
        (world.home / "serve" / "keys.json").unlink()
    with client_of(gateway) as client:
        assert chat(client).choices


def _refused_for(client, code):
    """The error, once a request is refused for this reason."""
    try:
        chat(client)
    except openai.RateLimitError as error:
        return error if error.code == code else None
    return None


@pytest.mark.long
def test_another_interface_wants_keys(gateway, world):
    other = RunningGateway(gateway.folder)
    with pytest.raises(AssertionError, match="stoker serve keys add NAME"):
        other.start("--host", "0.0.0.0")
