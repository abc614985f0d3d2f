"""Test clients of a gateway: keys, limits, usage, other sites, packages of third parties, wide embeddings, unusual
histories, missing engine options, request ids.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
import textwrap
import time
from importlib.util import find_spec

import httpx
import openai
import pytest
from gateway.asking import (
    BODY,
    CHAT,
    QUESTION,
    SITE,
    batch_lines,
    begin_batch,
    chat,
    client_of,
    is_refused,
    model_of,
    preflight_of,
)
from gateway.running import LIMIT_S, MODELS, keys, stoker, until
from openai.types import CreateEmbeddingResponse
from tiny_model import write_tiny_model

pytestmark = pytest.mark.slow
TEXTS, WIDTH = 2048, 4096
MORE = """
[models.broken]
path = "models/broken"
min = 1

[models.wide]
path = "models/wide"
kind = "embedding"

[models.cold]
path = "models/cold"

[models."gpt-5.5"]
path = "models/short"

[models."gpt-4o"]
path = "models/short"

[models."gpt-4o-mini"]
path = "models/short"
"""


@pytest.fixture(scope="module")
def write_models():
    def write(folder):
        models = folder / "models"
        write_tiny_model(models / "broken")
        (models / "broken" / "model.safetensors").write_bytes(b"x" * 100)
        write_tiny_model(models / "wide", width=WIDTH, layers=1)
        write_tiny_model(models / "cold", seed=1)
        write_tiny_model(models / "short", longest=4096)  # texts end early: openai-agents refuses truncated texts
        (folder / "models.toml").write_text(MODELS + MORE)

    return write


# ---- limits


def test_batch_is_paced_by_the_limits_of_its_key(gateway, key):
    count = 40
    with client_of(gateway, key("--requests-per-minute", "8", "--concurrent", "2")) as ana:
        began = time.monotonic()
        batch = begin_batch(ana, batch_lines(count))

        def check_limit():
            """The limit counts the batch as a request, and leaves one place to requests outside batches."""
            answered = ana.batches.retrieve(batch.id).request_counts.completed
            assert answered == 6 or time.monotonic() - began > 60

        until(
            lambda: ana.batches.retrieve(batch.id).request_counts.completed >= 6,
            why="the requests of the minute's limit are answered",
        )
        check_limit()
        assert chat(ana).choices
        limited = until(lambda: is_refused(ana, "requests_per_minute"), why="the minute's limit is reached")
        assert 1 <= int(limited.response.headers["retry-after"]) <= 60
        with pytest.raises(openai.RateLimitError):
            begin_batch(ana, batch_lines(1))
        ana.batches.cancel(batch.id)

        until(lambda: ana.batches.retrieve(batch.id).status == "cancelled", why="the batch is cancelled")
        found = ana.batches.retrieve(batch.id)
        check_limit()
        answers, errors = (
            ana.files.content(id).text.splitlines() for id in (found.output_file_id, found.error_file_id)
        )
        assert found.request_counts.completed == len(answers)
        assert [json.loads(line)["error"]["code"] for line in errors] == ["batch_cancelled"] * (count - len(answers))


def test_tokens_of_a_request_count_after_its_client_disconnects(gateway, key):
    own = key("--tokens-per-minute", "1000")
    with client_of(gateway, own) as ana:
        with pytest.raises(openai.APITimeoutError):
            chat(ana, timeout=0.2, max_tokens=1500)
        until(lambda: is_refused(ana, "tokens_per_minute"), why="the tokens count")
    [row] = asked(gateway, own).json()["data"]
    assert row["completion_tokens"] >= 1500


# ---- usage


def usage(*options: str) -> dict[tuple[str, str], dict]:
    said = json.loads(stoker("serve", "usage", "--json", *options))
    return {(row["key"], row["model"]): row for row in said["usage"]}


def asked(gateway, own, **filters) -> httpx.Response:
    headers = {"authorization": f"Bearer {own}"}
    return httpx.get(f"{gateway.url}/v1/usage", params=filters, headers=headers, timeout=LIMIT_S)


def test_usage_counts_each_request_with_its_tokens(gateway, key):
    admin, own = key("--admin"), key("--concurrent", "1", name="ana")
    with client_of(gateway, own) as ana:
        left = chat(ana, stream=True, max_tokens=1500)
        taken = sum(bool(chunk.choices[0].delta.content) for chunk, _ in zip(left, range(20), strict=False))
        assert is_refused(ana, "concurrent_requests")
        left.close()
        until(lambda: not is_refused(ana, "concurrent_requests"), why="the place of the stream is free")
        keys("set", "ana")  # remove the limit, because a request counts for a moment after its answer
        answers = [chat(ana).usage, chat(ana, n=2).usage]
        *_, last = chat(ana, stream=True, stream_options={"include_usage": True})
        answers.append(last.usage)
        with pytest.raises(openai.InternalServerError, match="model gone cannot be used"):
            chat(ana, model="gone")
        with pytest.raises(openai.NotFoundError):
            chat(ana, model="unknown")
        vectors = ana.embeddings.create(model="vectors", input=["one", "two"]).usage

    def counted():
        found = {(row["key"], row["model"]): row for row in asked(gateway, admin).json()["data"]}
        small = found["ana", "small"]
        is_whole = small["requests"] - small["refused"] == len(answers) + 2 and ("ana", "vectors") in found
        return found if is_whole else None

    rows = until(counted, why="each request is counted, after its answer was sent")
    small = rows["ana", "small"]
    assert small["refused"] >= 1
    assert small["failed"] == 0
    assert small["completion_tokens"] >= sum(one.completion_tokens for one in answers) + taken
    assert small["prompt_tokens"] >= sum(one.prompt_tokens for one in answers)
    assert rows["ana", "vectors"]["prompt_tokens"] == vectors.prompt_tokens
    assert (rows["ana", "gone"]["requests"], rows["ana", "gone"]["failed"]) == (1, 1)
    assert ("ana", "unknown") not in rows
    assert usage("--key", "ana", "--model", "small") == {("ana", "small"): small}


def test_key_sees_its_own_usage_alone(gateway, key):
    ben, admin = key(name="ben"), key("--admin")
    with client_of(gateway, ben) as client:
        assert chat(client).choices
    [row] = until(lambda: asked(gateway, ben).json()["data"], why="the request is counted")
    assert (row["key"], row["model"], row["requests"]) == ("ben", "small", 1)
    refused = asked(gateway, ben, key="ana")
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_an_admin")
    assert asked(gateway, admin, key="ben", by="day").json()["data"][0]["requests"] == 1
    assert asked(gateway, admin, by="hour").status_code == 400


# ---- errors


def test_answers_have_a_request_id_and_failures_are_logged_with_it(gateway):
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


def test_broken_model_is_not_reloaded_until_a_request_needs_it(gateway):
    said = "broken is not loaded again until a request asks for it"
    until(lambda: said in "".join(gateway.said), why="the gateway sends the model no requests")


# ---- pages of other sites


def test_pages_of_other_sites_need_a_key(gateway, key):
    with httpx.Client(base_url=gateway.url, timeout=LIMIT_S) as http:
        refused = http.post(CHAT, json=BODY, headers={"Origin": SITE})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "foreign_page")
        open_preflight = http.options(CHAT, headers=preflight_of(SITE))
        assert not any(name.startswith("access-control") for name in (*refused.headers, *open_preflight.headers))
        own = key()
        preflight = http.options(CHAT, headers=preflight_of(SITE))
        assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (200, "*")
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        answer = http.post(CHAT, json=BODY, headers={"Origin": SITE, "Authorization": f"Bearer {own}"})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "*")
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        assert [http.get(path).status_code for path in ("/health", "/metrics")] == [200, 401]
        nobody = http.post(CHAT, json=BODY, headers={"Origin": SITE})
        assert (nobody.status_code, nobody.headers["access-control-allow-origin"]) == (401, "*")
        assert http.options(CHAT).status_code == 204


# ---- embeddings


def test_embeddings_of_2048_texts_have_4096_numbers_each(client):
    texts = [f"{number}" for number in range(TEXTS)]
    packed = client.embeddings.create(model="wide", input=texts)  # the client requests base64
    assert [len(one.embedding) for one in packed.data] == [WIDTH] * TEXTS
    assert [one.index for one in packed.data] == list(range(TEXTS))
    assert packed.usage.prompt_tokens == sum(map(len, texts))
    some = client.embeddings.create(model="wide", input=[texts[0], texts[-1]], encoding_format="float")
    CreateEmbeddingResponse.model_validate(some.model_dump(), strict=True)
    assert some.data[1].embedding == pytest.approx(packed.data[-1].embedding, abs=1e-5)


def test_embedding_dimensions_other_than_the_models_are_refused(client):
    [one] = client.embeddings.create(model="wide", input="x", dimensions=WIDTH).data
    assert len(one.embedding) == WIDTH
    with pytest.raises(openai.BadRequestError, match=f"this model's vectors have {WIDTH} numbers") as refused:
        client.embeddings.create(model="wide", input="x", dimensions=256)
    assert refused.value.param == "dimensions"


# ---- histories and fields


def test_answers_are_accepted_as_history_and_ignored_fields_logged(client, gateway):
    messages = [*QUESTION]
    for _ in range(3):
        answer = client.chat.completions.create(
            model="small", messages=messages, max_tokens=4, user="ana", metadata={"run": "7"}, store=True
        )
        history = {**answer.choices[0].message.model_dump(), "annotations": [], "tool_calls": []}
        messages += [history, {**QUESTION[0], "name": "ana", "metadata": {"page": 3}}]
    said = "".join(gateway.said)
    for field in ("user", "metadata", "store", "messages[].annotations", "messages[].metadata"):
        assert said.count(f"the request field {field} does") == 1


def test_bytes_of_the_returned_tokens_join_to_the_text(client):
    """This model's tokens are bytes, mostly parts of characters."""
    options = {"messages": QUESTION, "max_tokens": 60, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    whole = client.chat.completions.create(model="small", **options)
    stream = client.chat.completions.create(model="small", **options, stream=True)
    found = whole.choices[0].logprobs.content
    pieces = [one for chunk in stream if chunk.choices[0].logprobs for one in chunk.choices[0].logprobs.content]
    ends = whole.choices[0].finish_reason == "stop"  # the end token is not part of the text
    text = b"".join(bytes(one.bytes) for one in (found[:-1] if ends else found))
    assert text.decode(errors="replace") == whole.choices[0].message.content
    assert any(one.token == "\N{REPLACEMENT CHARACTER}" for one in found)
    assert all(len(one.bytes) == 1 for one in found[:-1])
    assert [(one.bytes, one.token) for one in pieces] == [(one.bytes, one.token) for one in found]
    assert any(likely.bytes != [0xEF, 0xBF, 0xBD] for one in found for likely in one.top_logprobs)
    plain = client.completions.create(model="small", prompt="One", max_tokens=60, temperature=0, logprobs=3)
    assert all(len(likeliest) == 3 for likeliest in plain.choices[0].logprobs.top_logprobs)


def test_wrong_option_is_refused_without_a_load(client, gateway):
    for param, value in (("response_format", {"type": "json_schema"}), ("guided_regex", 3)):
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as refused:
                client.chat.completions.create(
                    model="cold", messages=QUESTION, stream=stream, extra_body={param: value}
                )
            assert refused.value.param == param
    assert model_of(gateway, "cold")["state"] == "cold"


# ---- clients of third parties

OTHERS_PYTHON = os.environ.get("STOKER_CLIENTS_PYTHON", "")
"""The Python of an environment with the clients of .ci/clients.txt, whose requirements conflict with Stoker's."""


def example_in(text, *parts):
    """Return the first Python block of a published text that contains all `parts`."""
    blocks = [textwrap.dedent(block) for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL)]
    return next(block for block in blocks if all(part in block for part in parts))


def readme_of(package, python=sys.executable):
    code = f"from importlib.metadata import metadata; print(metadata({package!r}).get_payload())"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=True).stdout


def run_example(gateway, code, *, model="gpt-5.5", python=sys.executable, **settings):
    """Run a published program unchanged. Only its environment names the gateway. Check that the model answered the
    program.
    """
    env = {**os.environ, "OPENAI_BASE_URL": f"{gateway.url}/v1", "OPENAI_API_KEY": "none", **settings}
    before = model_of(gateway, model)["requests"]
    done = subprocess.run(
        [python, "-c", code], cwd=gateway.folder, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    until(lambda: model_of(gateway, model)["requests"] > before, why="the model has answered the program")
    return done.stdout


@pytest.mark.long
@pytest.mark.parametrize(
    ("module", "package", "parts"),
    [
        ("openai", "openai", ("OpenAI()", "chat.completions.create", "developer")),
        ("openai", "openai", ("AsyncOpenAI(", "responses.create", "asyncio.run")),
        ("openai", "openai", ("OpenAI()", "stream=True", "for event in stream")),
        ("agents", "openai-agents", ("Runner.run_sync(agent, ",)),
    ],
)
def test_examples_of_openais_packages_run_unchanged(gateway, module, package, parts):
    if find_spec(module) is None:
        pytest.skip(f"{package} is not installed")
    code = example_in(readme_of(package), *parts)
    run_example(gateway, code, OPENAI_DEFAULT_MODEL="gpt-5.5", OPENAI_AGENTS_DISABLE_TRACING="1")


@pytest.mark.long
@pytest.mark.skipif(find_spec("langchain_openai") is None, reason="langchain-openai is not installed")
def test_examples_of_langchain_run_unchanged(gateway):
    from langchain_openai import ChatOpenAI

    parts = ("model = ChatOpenAI(", "max_retries=2"), ("model.invoke(messages)",), ("in model.stream(messages)",)
    made, *used = (example_in(inspect.getdoc(ChatOpenAI), *each) for each in parts)
    assert made.count('model="..."') == 1
    run_example(gateway, "\n".join([made.replace('model="..."', 'model="gpt-5.5"'), *used]))


@pytest.mark.long
@pytest.mark.skipif(
    not OTHERS_PYTHON, reason="STOKER_CLIENTS_PYTHON names no Python with the packages of .ci/clients.txt"
)
def test_examples_of_instructor_and_litellm_run_unchanged(gateway):
    code = example_in(readme_of("instructor", OTHERS_PYTHON), "from_provider(", "print(user)")
    printed = run_example(gateway, code, model="gpt-4o-mini", python=OTHERS_PYTHON)
    assert re.match(r"name=(['\"]).*\1 age=-?\d+$", printed, re.DOTALL)
    code = example_in(readme_of("litellm", OTHERS_PYTHON), "from litellm import completion", "# Anthropic")
    ours, _, _ = code.partition("# Anthropic")  # the program also calls a second provider
    # litellm would request prices from another site
    run_example(gateway, ours, model="gpt-4o", python=OTHERS_PYTHON, LITELLM_LOCAL_MODEL_COST_MAP="True")
