"""A gateway with OpenAI's client: tools, `/v1/responses`, and the tokens of a text.

A random model calls a tool only where a schema holds it.
"""

from __future__ import annotations

import json

import openai
import pytest
from gateway.asking import CHAT, QUESTION, chat, model_of
from gateway.bodies import strict
from gateway.running import until
from openai.types.chat import ChatCompletion

pytestmark = pytest.mark.slow

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
def test_a_call_that_is_asked_for_is_made(client, choice):
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


def test_openais_client_collects_a_streamed_call(client):
    with client.chat.completions.stream(
        model="small", messages=QUESTION, max_tokens=400, seed=3, tools=[WEATHER], tool_choice=NAMED
    ) as stream:
        kinds = {event.type for event in stream}
        [call] = stream.get_final_completion().choices[0].message.tool_calls
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    check(call.function.name, call.function.arguments)


def test_the_model_may_answer_without_a_call(client):
    answer = ask(client, tools=[WEATHER])
    assert answer.choices[0].message.content
    assert not answer.choices[0].message.tool_calls


@pytest.mark.long
def test_a_batch_has_calls(client):
    body = {"model": "small", "messages": QUESTION, "max_tokens": 400, "tools": [WEATHER], "tool_choice": NAMED}
    line = json.dumps({"custom_id": "a", "method": "POST", "url": CHAT, "body": body})
    file = client.files.create(file=("in.jsonl", line.encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    done = until(lambda: _ended(client, batch.id), why="the end of the batch")
    [answer] = client.files.content(done.output_file_id).text.splitlines()
    [call] = json.loads(answer)["response"]["body"]["choices"][0]["message"]["tool_calls"]
    check(call["function"]["name"], call["function"]["arguments"])


def _ended(client, id):
    batch = client.batches.retrieve(id)
    return batch if batch.status != "in_progress" else None


def test_a_schema_that_cannot_be_held_is_refused_by_its_field(client):
    wrong = {"type": "function", "function": {"name": "f", "parameters": {"type": "nothing"}}}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            ask(client, tools=[wrong], tool_choice="required", stream=stream)
        assert refused.value.param == "tool_choice"


# ---- responses


def test_openais_client_gets_responses(client):
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


def test_tokens_of_a_text_are_the_models_and_make_the_text_again(http, client, gateway):
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
        ("/tokenize", {"model": "small"}, "prompt"),
        ("/tokenize", {"model": "small", "prompt": 1}, "prompt"),
        ("/tokenize", {"model": "small", "messages": []}, "messages"),
        ("/tokenize", {"model": "gone", "prompt": "a"}, "model"),
        ("/detokenize", {"model": "small", "tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"model": "small", "tokens": [99_999]}, "tokens"),
    ],
)
def test_what_cannot_be_tokenized_is_refused_by_its_field(http, address, body, param):
    answer = http.post(address, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
