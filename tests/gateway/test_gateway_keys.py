"""Limits of keys for batches and abandoned requests; pages of other sites; request ids."""

from __future__ import annotations

import io
import json
from importlib.util import find_spec

import pytest

if not all(map(find_spec, ("openai", "httpx", "starlette", "uvicorn", "prometheus_client", "torch", "transformers"))):
    pytest.skip("needs the extras serve, models and test", allow_module_level=True)

import httpx
import openai
from gateway.running import LIMIT_S, MODELS, RunningGateway, keys, until
from tiny_model import write_tiny_model

pytestmark = pytest.mark.slow
QUESTION = [{"role": "user", "content": "What is two plus two?"}]
CHAT = "/v1/chat/completions"
BODY = {"model": "small", "messages": QUESTION, "max_tokens": 4}
SITE = "https://lab.example"
BROKEN = """
[models.broken]
path = "models/broken"
min = 1
"""


@pytest.fixture(scope="module")
def gateway(world):
    running = RunningGateway(world.path / "guarded")
    write_tiny_model(running.folder / "models" / "broken")
    (running.folder / "models" / "broken" / "model.safetensors").write_bytes(b"x" * 100)
    (running.folder / "models.toml").write_text(MODELS + BROKEN)
    running.start()
    try:
        yield running
    finally:
        running.end()


@pytest.fixture
def key(world):
    """Makes keys, and takes them all away."""
    made = []

    def make(*limits):
        made.append(f"ana{len(made)}")
        return keys(world, "add", made[-1], *limits)

    yield make
    (world.home / "serve" / "keys.json").unlink(missing_ok=True)


def client_of(gateway, key="none"):
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=key, timeout=LIMIT_S, max_retries=0)


def ask(client, **options):
    return client.chat.completions.create(**{**BODY, **options})


def refused_for(client, code):
    def look():
        try:
            ask(client)
        except openai.RateLimitError as error:
            return error if error.code == code else None
        return None

    return until(look, why=f"a request is refused: {code}")


# ---- limits


def test_a_batch_is_paced_by_the_limits_of_its_key(gateway, key):
    requests = ({"custom_id": f"r{n}", "method": "POST", "url": CHAT, "body": BODY} for n in range(12))
    data = "".join(json.dumps(one) + "\n" for one in requests).encode()
    with client_of(gateway, key("--requests-per-minute", "8", "--concurrent", "2")) as ana:
        file = ana.files.create(file=("r.jsonl", io.BytesIO(data)), purpose="batch")
        batch = ana.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        done = until(
            lambda: (found := ana.batches.retrieve(batch.id).request_counts.completed) >= 6 and found,
            why="the requests that a minute allows are answered",
        )
        assert done == 6  # the batch was counted as a request, and one is left to others
        assert ask(ana).choices
        limited = refused_for(ana, "requests_per_minute")
        assert 1 <= int(limited.response.headers["retry-after"]) <= 60
        with pytest.raises(openai.RateLimitError):
            ana.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        assert ana.batches.retrieve(batch.id).request_counts.completed == 6
        ana.batches.cancel(batch.id)

        def over():
            found = ana.batches.retrieve(batch.id)
            return found if found.status == "cancelled" else None

        found = until(over, why="the batch is cancelled")
        assert len(ana.files.content(found.output_file_id).text.splitlines()) == 6
        assert found.request_counts.completed == 6
        others = [json.loads(line) for line in ana.files.content(found.error_file_id).text.splitlines()]
        assert [line["error"]["code"] for line in others] == ["batch_cancelled"] * 6


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_of_a_request_that_its_client_left_count(gateway, key, stream):
    own = key("--tokens-per-minute", "100")
    with client_of(gateway, own) as ana:
        options = {"max_tokens": 1500, "temperature": 0}
        if stream:
            pieces = ask(ana, stream=True, **options)
            taken = sum(bool(chunk.choices[0].delta.content) for chunk, _ in zip(pieces, range(120), strict=False))
            assert taken > 80
            pieces.close()
        else:
            with pytest.raises(openai.APITimeoutError):
                ask(ana, timeout=0.2, **options)
        refused_for(ana, "tokens_per_minute")


# ---- errors


def test_every_answer_has_an_id_that_the_log_knows(gateway):
    with httpx.Client(base_url=gateway.url, timeout=LIMIT_S) as http:
        answers = [
            http.get("/v1/models"), http.get("/nothing"), http.post(CHAT, content=b"{"), http.get("/health"),
            http.post(CHAT, json=BODY), http.post(CHAT, json={**BODY, "stream": True}), http.options(CHAT),
            http.post(CHAT, json={**BODY, "model": "broken"}), http.post(CHAT, json={**BODY, "model": "gone"}),
        ]  # fmt: skip
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert len(set(ids)) == len(answers)
    *_, broken, gone = answers
    for answer, id, why in ((broken, ids[-2], "SafetensorError"), (gone, ids[-1], "there is no model at")):
        assert answer.status_code == 503
        assert "retry-after" not in answer.headers
        assert answer.headers["x-should-retry"] == "false"
        said = until(lambda id=id: [line for line in gateway.said if id in line], why="a line in the log")
        assert why in "".join(gateway.said[gateway.said.index(said[0]) :])
        for inside in (str(gateway.folder), "c-", "/", "\n"):
            assert inside not in answer.json()["error"]["message"]


def test_a_model_that_cannot_be_loaded_is_not_loaded_forever(gateway):
    said = "broken is not loaded again until a request asks for it"
    until(lambda: said in "".join(gateway.said), why="the gateway leaves the model alone")


def test_the_list_of_models_says_how_much_each_reads(gateway):
    with client_of(gateway) as client:
        longest = {model.id: getattr(model, "max_model_len", None) for model in client.models.list()}
    assert (longest["small"], longest["gone"]) == (2048, None)


# ---- pages of other sites

PREFLIGHT = {
    "Origin": SITE, "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}  # fmt: skip


def test_pages_of_other_sites_may_ask_with_a_key_alone(gateway, key):
    with httpx.Client(base_url=gateway.url, timeout=LIMIT_S) as http:
        refused = http.post(CHAT, json=BODY, headers={"Origin": SITE})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "foreign_page")
        open_preflight = http.options(CHAT, headers=PREFLIGHT)
        assert not any(name.startswith("access-control") for name in (*refused.headers, *open_preflight.headers))
        own = key()
        preflight = http.options(CHAT, headers=PREFLIGHT)
        assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (200, "*")
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        answer = http.post(CHAT, json=BODY, headers={"Origin": SITE, "Authorization": f"Bearer {own}"})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "*")
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        nobody = http.post(CHAT, json=BODY, headers={"Origin": SITE})
        assert (nobody.status_code, nobody.headers["access-control-allow-origin"]) == (401, "*")
        assert http.options(CHAT).status_code == 204


def test_the_sites_that_may_ask_can_be_named(world, gateway, key):
    key()
    gateway.stop()
    gateway.start("--origin", SITE)
    try:
        with httpx.Client(base_url=gateway.url, timeout=LIMIT_S) as http:
            assert http.options(CHAT, headers=PREFLIGHT).headers["access-control-allow-origin"] == SITE
            other = http.options(CHAT, headers={**PREFLIGHT, "Origin": "https://other.example"})
            assert (other.status_code, "access-control-allow-origin" in other.headers) == (400, False)
    finally:
        gateway.stop()
        gateway.start()
