"""Test a running gateway: tools, `/v1/responses`, tokens of a text, echoed prompts, adapters and scores.

A random model calls a tool only if a schema forces the call.
"""

from __future__ import annotations

import itertools
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from adapter_folders import write_tiny_lora, write_tiny_soft_prompt
from gateway.asking import QUESTION, chat, client_of, figures, model_of, openai
from gateway.bodies import strict
from gateway.running import LIMIT_S, MODELS, until
from lazily import lazily
from openai.types.chat import ChatCompletion
from tiny_encoder import write_tiny_encoder

from stoker.apps.gateway.vllm_endpoints import RERANK, SCORE

torch, transformers = lazily("torch", "transformers")
pytestmark = pytest.mark.slow
MORE = """
[models.base]
path = "models/tiny"

[models.legal]
base = "base"
adapter = "lora"
ttft = "10 min"

[models.soft]
base = "base"
adapter = "soft"

[models.damaged]
base = "base"
adapter = "damaged"

[models.encoder]
path = "models/encoder"
kind = "embedding"

[models.cross]
path = "models/cross"
kind = "embedding"

[models.labels]
path = "models/labels"
kind = "embedding"
"""


@pytest.fixture(scope="module")
def write_models():
    def write(folder):
        (folder / "models.toml").write_text(MODELS + MORE)
        write_tiny_lora(folder / "lora", seed=1)
        write_tiny_lora(folder / "damaged", seed=2, scale=float("nan"))
        write_tiny_soft_prompt(folder / "soft", seed=3)
        write_tiny_encoder(folder / "models" / "encoder")
        write_tiny_encoder(folder / "models" / "cross", head=True, num_labels=1)
        write_tiny_encoder(folder / "models" / "labels", head=True, num_labels=3)

    return write


# ---- tools

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Paris"]}, "hot": {"$ref": "#/$defs/Hot"}},
    "required": ["city", "hot"],
    "additionalProperties": False,
    "$defs": {"Hot": {"type": "boolean"}},
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": PARAMETERS}}
TIME = {"type": "function", "function": {"name": "get_time"}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def ask(client, **fields):
    asked = {"model": "small", "messages": QUESTION, "max_tokens": 400, "temperature": 1, "seed": 3}
    return client.chat.completions.create(**asked, **fields)


def check(name: str, arguments: str) -> None:
    found = json.loads(arguments)
    if name == "get_time":
        assert found == {}
    else:
        assert name == "get_weather"
        assert found.keys() == {"city", "hot"}
        assert found["city"] in ("Rome", "Paris")


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_required_tool_call_is_made(client, choice):
    options = {"tools": [WEATHER, TIME], "tool_choice": choice, "parallel_tool_calls": False}
    whole = ask(client, **options)
    assert ChatCompletion.model_validate(whole.model_dump(), strict=True).choices[0].finish_reason == "tool_calls"
    [call] = whole.choices[0].message.tool_calls
    assert whole.choices[0].message.content is None
    check(call.function.name, call.function.arguments)
    chunks = list(ask(client, **options, stream=True, stream_options={"include_usage": True}))
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    parts = [part for delta in deltas for part in delta.tool_calls or ()]
    assert not any(delta.content for delta in deltas)
    assert [part.function.name for part in parts if part.function.name] == [call.function.name]
    assert "".join(part.function.arguments for part in parts) == call.function.arguments
    assert chunks[-1].usage == whole.usage
    assert whole.usage.completion_tokens >= len(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "Sunny"}
    messages = [*QUESTION, whole.choices[0].message, result]
    again = client.chat.completions.create(model="small", messages=messages, tools=[WEATHER], max_tokens=4)
    assert again.choices[0].finish_reason in ("stop", "length")


def test_error_for_an_unusable_tool_schema_names_the_field(client):
    wrong = {"type": "function", "function": {"name": "f", "parameters": {"type": "nothing"}}}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            ask(client, tools=[wrong], tool_choice="required", stream=stream)
        assert refused.value.param == "tool_choice"


# ---- responses


def test_openais_client_gets_valid_answers_from_the_responses_api(client):
    asked = {"model": "small", "input": "Hi", "max_output_tokens": 30, "temperature": 0}
    whole = client.responses.create(**asked)
    assert strict(whole).usage.output_tokens
    with client.responses.stream(**asked) as stream:
        *_, last = [strict(event) for event in stream]
    assert last.response.output_text == whole.output_text
    parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    tool = {"type": "function", "name": "f", "parameters": parameters, "strict": False}
    called = client.responses.create(
        **{**asked, "max_output_tokens": 400}, tools=[tool], tool_choice={"type": "function", "name": "f"}
    )
    [call] = called.output
    assert (call.name, json.loads(call.arguments)) == ("f", {})
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    again = client.responses.create(**{**asked, "input": [{"role": "user", "content": "Hi"}, call, result]})
    assert again.usage.input_tokens > whole.usage.input_tokens


# ---- tokens: they are counted as the model does, without loading it


def test_tokenize_returns_the_models_tokens_and_detokenize_the_text(http, client, gateway):
    asked = {"model": "swift", "prompt": "What is two plus two?", "return_token_strs": True}
    found = http.post("/tokenize", json=asked).json()
    assert found.keys() == {"count", "max_model_len", "tokens", "token_strs"}
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"]) == 21
    assert found["max_model_len"] == 2048
    assert http.post("/detokenize", json={"model": "swift", "tokens": found["tokens"]}).json() == {
        "prompt": asked["prompt"]
    }
    assert model_of(gateway, "swift")["state"] == "cold"
    assert chat(client).usage.prompt_tokens == found["count"]


@pytest.mark.parametrize(
    ("address", "body", "param"),
    [
        ("/tokenize", {"prompt": "a"}, "model"),
        ("/tokenize", {"model": "small", "prompt": 1}, "prompt"),
        ("/tokenize", {"model": "gone", "prompt": "a"}, "model"),
        ("/detokenize", {"model": "small", "tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"model": "small", "tokens": [99_999]}, "tokens"),
    ],
)
def test_error_for_a_wrong_tokenize_request_names_the_field(http, address, body, param):
    answer = http.post(address, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


# ---- token ids, echoed prompts and candidates, as evaluation harnesses request them

PROMPTS = ["Paris lies in France.", "Water boils at 100 °C, on most days", "x"]
ECHO = {"model": "small", "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True, "seed": 1234}
"""Options of lm-eval for log-likelihoods."""


@pytest.fixture(scope="module")
def own(gateway):
    """Return the model's own log-probabilities after each token of a prompt, by Transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(gateway.folder / "models" / "tiny")

    def after_tokens(ids):
        with torch.inference_mode():
            return torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), dim=-1)

    return after_tokens


@pytest.fixture(scope="module")
def tokenizer(gateway):
    return transformers.AutoTokenizer.from_pretrained(gateway.folder / "models" / "tiny")


def test_echoed_prompt_has_the_log_likelihoods_of_transformers(client, own, tokenizer):
    rows = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    with ThreadPoolExecutor(8) as threads:  # these requests write texts in the same batches
        others = [
            threads.submit(client.completions.create, model="small", prompt=prompt, max_tokens=30)
            for prompt in PROMPTS * 3
        ]
        answer = client.completions.create(**ECHO, prompt=rows)
        assert all(other.result().choices for other in others)
    assert answer.usage.prompt_tokens == sum(map(len, rows))
    assert answer.usage.completion_tokens == len(rows)
    for prompt, ids, choice in zip(PROMPTS, rows, answer.choices, strict=True):
        found, expected = choice.logprobs, own(ids)
        assert choice.text.startswith(prompt)
        assert len(found.tokens) == len(ids) + 1
        assert (found.token_logprobs[0], found.top_logprobs[0]) == (None, None)
        greedy = expected[-1].max().item()
        per_token = [expected[place, token].item() for place, token in enumerate(ids[1:])] + [greedy]
        assert found.token_logprobs[1:] == pytest.approx(per_token, abs=1e-4)
        likeliest = [max(each.values()) for each in found.top_logprobs[1:]]
        assert likeliest == pytest.approx(expected.max(dim=-1)[0].tolist(), abs=1e-4)


def test_echo_without_new_tokens_is_the_prompt(client):
    whole = client.completions.create(**{**ECHO, "max_tokens": 0}, prompt=PROMPTS[0])
    [choice] = whole.choices
    assert (choice.text, choice.finish_reason) == (PROMPTS[0], "length")
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(PROMPTS[0]), 0)
    assert "".join(choice.logprobs.tokens) == PROMPTS[0]
    assert choice.logprobs.text_offset == list(range(len(PROMPTS[0])))
    plain = client.completions.create(model="small", prompt=PROMPTS[0], max_tokens=0, echo=True)
    assert (plain.choices[0].text, plain.choices[0].logprobs) == (PROMPTS[0], None)
    with pytest.raises(openai.BadRequestError, match="max_tokens must be a whole number from 1") as refused:
        client.completions.create(model="small", prompt="x", max_tokens=0)
    assert refused.value.param == "max_tokens"


@pytest.mark.parametrize(("most", "logprobs"), [(0, None), (5, 2)])
def test_streamed_echo_equals_the_unstreamed_echo(client, most, logprobs):
    asked = {**ECHO, "max_tokens": most, "prompt": PROMPTS[:2], "logprobs": logprobs}
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage == whole.usage
    for index, choice in enumerate(whole.choices):
        parts = [chunk.choices[0] for chunk in chunks[:-1] if chunk.choices[0].index == index]
        assert "".join(part.text for part in parts) == choice.text
        assert parts[-1].finish_reason == choice.finish_reason
        for name in ("tokens", "text_offset", "token_logprobs") if logprobs else ():
            found = itertools.chain.from_iterable(getattr(part.logprobs, name) for part in parts if part.logprobs)
            expected = getattr(choice.logprobs, name)
            assert list(found) == (pytest.approx(expected, abs=1e-4) if name == "token_logprobs" else expected)


def test_error_for_token_ids_beyond_the_vocabulary_names_the_field(client):
    with pytest.raises(openai.BadRequestError, match="the token 40000; this model's tokens are 0 to") as refused:
        client.completions.create(model="small", prompt=[5, 40_000], max_tokens=4)
    assert refused.value.param == "prompt"


def test_best_of_returns_the_likeliest_of_its_candidates(client):
    asked = {"model": "small", "prompt": ["One", "Two"], "max_tokens": 6, "seed": 5, "temperature": 1.5}
    every = client.completions.create(**asked, n=6, logprobs=0)
    best = client.completions.create(**asked, n=2, best_of=6)

    def mean(choice):
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    expected = [sorted(every.choices[start : start + 6], key=mean, reverse=True)[:2] for start in (0, 6)]
    assert [choice.text for choice in best.choices] == [choice.text for each in expected for choice in each]
    assert [choice.logprobs for choice in best.choices] == [None] * 4
    assert [choice.index for choice in best.choices] == [0, 1, 2, 3]
    assert best.usage == every.usage  # the usage counts the tokens of all candidates


# ---- a base and its adapters

NAMES = ("base", "legal", "soft")
PROMPT = "The quick brown fox"


def written(http, name, **options):
    body = {"model": name, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, **options}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == name
    return answer.json()["choices"][0]["text"], answer.json()["usage"]


def test_base_and_adapters_write_their_own_texts_in_one_context(gateway, http, client):
    with ThreadPoolExecutor(len(NAMES)) as pool:
        found = dict(zip(NAMES, pool.map(lambda name: written(http, name), NAMES), strict=True))
    texts = {name: text for name, (text, _) in found.items()}
    assert len(set(texts.values())) == len(NAMES)
    plain = client.completions.create(model="small", prompt=PROMPT, max_tokens=12, temperature=0)
    assert texts["base"] == plain.choices[0].text
    assert {usage["prompt_tokens"] for _, usage in found.values()} == {len(PROMPT)}

    def all_hot():
        found = figures(gateway)
        return found if all(each["hot"] for each in found["models"] if each["name"] in NAMES) else None

    contexts = [each["name"] for each in until(all_hot, why="the figures show the library")["contexts"]]
    [shared] = [name for name in contexts if any(each in name for each in NAMES)]
    assert all(each in shared for each in NAMES)


def test_soft_prompt_gives_the_same_likelihoods_as_in_peft(gateway, http, tokenizer):
    import peft

    body = {"model": "soft", "prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 1}
    found = http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]["token_logprobs"]
    base = transformers.AutoModelForCausalLM.from_pretrained(gateway.folder / "models" / "tiny")
    model = peft.PeftModel.from_pretrained(base, gateway.folder / "soft").eval()
    ids = tokenizer([PROMPT], return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, -ids.shape[1] : -1]
    expected = torch.log_softmax(logits.float(), dim=-1).gather(-1, ids[0, 1:, None])[:, 0]
    assert found[0] is None
    assert found[1:] == pytest.approx(expected.tolist(), abs=1e-4)


def test_adapters_are_listed_with_their_base(http):
    listed = {each["id"]: each.get("parent") for each in http.get("/v1/models").json()["data"]}
    assert {name: base for name, base in listed.items() if base} == dict.fromkeys(("legal", "soft", "damaged"), "base")


def test_request_too_long_with_its_soft_prompt_is_refused(http):
    body = {"model": "soft", "prompt": PROMPT, "max_tokens": 2048 - len(PROMPT) - 4}
    answer = http.post("/v1/completions", json=body, timeout=LIMIT_S)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_error_for_a_damaged_adapter_names_the_adapter(http):
    answer = http.post("/v1/completions", json={"model": "damaged", "prompt": PROMPT})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
    assert "the adapter damaged cannot be served" in answer.json()["error"]["message"]


# ---- scores, by embeddings and by a cross-encoder

QUERY, DOCUMENTS = "paris in france", ["water boils", "paris lies in france", "france"]


def cross_scores(folder, query, documents):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    rows = tokenizer([query] * len(documents), documents, padding=True, return_tensors="pt")
    with torch.inference_mode():
        return torch.sigmoid(model(**rows).logits[:, 0]).tolist(), int(rows["attention_mask"].sum())


@pytest.mark.parametrize("name", ["encoder", "labels"])
def test_scores_of_an_encoder_are_cosines_of_its_embeddings(gateway, http, name):
    with client_of(gateway) as client:
        found = client.embeddings.create(model=name, input=[QUERY, *DOCUMENTS])
    query, *rows = (torch.tensor(each.embedding) for each in found.data)
    expected = [torch.cosine_similarity(query, row, dim=0).item() for row in rows]
    answer = http.post(SCORE, json={"model": name, "text_1": QUERY, "text_2": DOCUMENTS}).json()
    assert answer["id"].startswith("score-")
    assert (answer["object"], answer["model"]) == ("list", name)
    assert [(each["index"], each["object"]) for each in answer["data"]] == [(n, "score") for n in range(3)]
    assert [each["score"] for each in answer["data"]] == pytest.approx(expected, abs=1e-5)
    assert answer["usage"] == {"prompt_tokens": found.usage.prompt_tokens, "total_tokens": found.usage.prompt_tokens}
    pairs = http.post(SCORE, json={"model": name, "text_1": [QUERY] * 3, "text_2": DOCUMENTS}).json()
    assert [each["score"] for each in pairs["data"]] == pytest.approx(expected, abs=1e-5)


def test_scores_of_a_cross_encoder_equal_those_of_transformers(gateway, http):
    expected, tokens = cross_scores(gateway.folder / "models" / "cross", QUERY, DOCUMENTS)
    answer = http.post(SCORE, json={"model": "cross", "text_1": QUERY, "text_2": DOCUMENTS}).json()
    assert [each["score"] for each in answer["data"]] == pytest.approx(expected, abs=1e-5)
    assert answer["usage"]["total_tokens"] == tokens


def test_rerank_lists_the_best_documents_first(gateway, http):
    expected, _ = cross_scores(gateway.folder / "models" / "cross", QUERY, DOCUMENTS)
    order = sorted(range(3), key=lambda index: -expected[index])
    asked = {"model": "cross", "query": QUERY, "documents": DOCUMENTS, "user": "ana"}
    answer = http.post(RERANK, json=asked).json()
    assert answer["id"].startswith("rerank-")
    assert [each["index"] for each in answer["results"]] == order
    assert [each["document"]["text"] for each in answer["results"]] == [DOCUMENTS[index] for index in order]
    scores = [each["relevance_score"] for each in answer["results"]]
    assert scores == pytest.approx([expected[index] for index in order], abs=1e-5)
    first = http.post(RERANK, json={**asked, "top_n": 1, "return_documents": False}).json()
    assert first["results"] == [{"index": order[0], "relevance_score": pytest.approx(max(expected), abs=1e-5)}]


@pytest.mark.parametrize("name", ["encoder", "cross"])
def test_text_that_is_too_long_to_score_is_refused(http, name):
    refused = http.post(RERANK, json={"model": name, "query": QUERY, "documents": ["paris", "water " * 60]})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
