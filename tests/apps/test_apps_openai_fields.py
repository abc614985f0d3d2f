from __future__ import annotations

import json
import typing
from importlib.util import find_spec

import pytest

if find_spec("openai") is None:
    pytest.skip("needs the extra test", allow_module_level=True)

from openai.types import Completion, completion_create_params, embedding_create_params
from openai.types.chat import (
    ChatCompletion,
    ChatCompletionAssistantMessageParam,
    ChatCompletionUserMessageParam,
)
from openai.types.chat import (
    completion_create_params as chat_create_params,
)

from stoker.apps.batch_inference.options import ModelPaths
from stoker.apps.batch_inference.request_file import RefusedLine, check_file, parse_request_line
from stoker.apps.common.openai_answers import Choice, build_answer_body
from stoker.apps.common.openai_requests import (
    ENGINE_FIELDS,
    HONOURED,
    IGNORED,
    NEUTRAL,
    REFUSED,
    ApiRequest,
    ChatMessage,
    Endpoint,
    RequestRefused,
)
from stoker.apps.gateway.answering import parse_model_request
from stoker.datafile import Line

ANY = ModelPaths(named={}, every="models/m", engine="continuous")
QUESTION = {"role": "user", "content": "Say hi"}


def by_gateway(endpoint: Endpoint, body: dict, *, models: ModelPaths = ANY) -> ApiRequest:
    request = parse_model_request(json.dumps(body).encode(), endpoint=endpoint, name="r").request
    models.check_model(request)
    return request


def by_batch(endpoint: Endpoint, body: dict, *, models: ModelPaths = ANY) -> ApiRequest:
    line = {"custom_id": "r", "method": "POST", "url": endpoint.value, "body": body}
    found = parse_request_line(Line(0, json.dumps(line).encode()), seen={}, admit=models.check_model)
    if isinstance(found, RefusedLine):
        raise RequestRefused(found.error.message, param=found.error.param)
    return found


BOTH = pytest.mark.parametrize("read", [by_gateway, by_batch])


@pytest.mark.parametrize(
    ("endpoint", "types"),
    [
        (Endpoint.CHAT, chat_create_params.CompletionCreateParamsBase),
        (Endpoint.COMPLETIONS, completion_create_params.CompletionCreateParamsBase),
        (Endpoint.EMBEDDINGS, embedding_create_params.EmbeddingCreateParams),
    ],
)
def test_fields_of_openais_requests_are_all_classified(endpoint, types):
    placed = HONOURED[endpoint] | IGNORED | NEUTRAL.keys() | REFUSED | ENGINE_FIELDS.keys()
    assert set(typing.get_type_hints(types)) <= placed


def test_request_field_has_only_one_classification():
    places = [*HONOURED.values(), IGNORED, NEUTRAL.keys(), REFUSED, ENGINE_FIELDS.keys()]
    others = [set(each) for each in places[3:]]
    for at, each in enumerate(others):
        assert not any(each & other for other in others[at + 1 :])
        assert not any(each & honoured for honoured in HONOURED.values())


@BOTH
def test_openai_response_message_is_accepted_in_a_later_request(read):
    own = build_answer_body(Endpoint.CHAT, [Choice("Hi", "stop", 3, 1)], name="n", model="m", created=1)
    openais = {
        "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "gpt", "service_tier": "default",
        "choices": [
            {
                "index": 0, "finish_reason": "stop", "logprobs": None,
                "message": {"role": "assistant", "content": "Hi", "refusal": None, "annotations": []},
            }
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
    }  # fmt: skip
    for body in (own, openais):
        message = ChatCompletion.model_validate(body).choices[0].message
        for dumped in (message.model_dump(), message.model_dump(exclude_none=True), message.to_dict()):
            found = read(Endpoint.CHAT, {"model": "m", "messages": [QUESTION, dumped, QUESTION]})
            assert found.messages[1] == ChatMessage("assistant", "Hi")
    answer = Completion.model_validate(
        build_answer_body(Endpoint.COMPLETIONS, [Choice(" hi", "stop", 3, 1)], name="n", model="m", created=1)
    ).model_dump()
    again = read(Endpoint.COMPLETIONS, {"model": "m", "prompt": "Say" + answer["choices"][0]["text"], "suffix": None})
    assert again.texts == ("Say hi",)


@BOTH
def test_message_may_have_every_field_of_openais_types(read):
    empty = {"tool_calls": [], "function_call": None, "audio": None, "refusal": None, "name": "ana"}
    assert set(typing.get_type_hints(ChatCompletionAssistantMessageParam)) == {*empty, "role", "content"}
    assert set(typing.get_type_hints(ChatCompletionUserMessageParam)) == {"role", "content", "name"}
    found = read(Endpoint.CHAT, {"model": "m", "messages": [{"role": "assistant", "content": "Hi", **empty}]})
    assert found.messages == (ChatMessage("assistant", "Hi", "ana"),)
    refused = {"role": "assistant", "content": None, "refusal": "I will not."}
    parts = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}, {"type": "text", "text": "Or"}]}
    found = read(Endpoint.CHAT, {"model": "m", "messages": [refused, parts]})
    assert [each.content for each in found.messages] == ["I will not.", "No.\nOr"]


@BOTH
def test_supported_options_reach_the_engine(read):
    given = {
        "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "frequency_penalty": 0.5, "presence_penalty": -1,
        "logit_bias": {"50256": -100}, "min_tokens": 2, "ignore_eos": True, "stop_token_ids": [3, 4],
    }  # fmt: skip
    for endpoint, words in ((Endpoint.CHAT, {"messages": [QUESTION]}), (Endpoint.COMPLETIONS, {"prompt": "x"})):
        found = read(endpoint, {"model": "m", **words, **given})
        assert dict(found.sampling.engine_options) == {**given, "logit_bias": {50256: -100}}


SCHEMA = {"type": "integer"}
FORMS = [
    ({"response_format": {"type": "json_object"}}, "response_format", "json_schema", '{"type":"object"}'),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, "response_format",
     "json_schema", '{"type":"integer"}'),
    ({"guided_json": SCHEMA}, "guided_json", "json_schema", '{"type":"integer"}'),
    ({"guided_regex": "a+"}, "guided_regex", "regex", "a+"),
    ({"guided_choice": ["a", "b"]}, "guided_choice", "choice", ["a", "b"]),
    ({"guided_grammar": "start: A"}, "guided_grammar", "grammar", "start: A"),
    ({"structured_outputs": {"json_object": True, "regex": None}}, "structured_outputs.json_object", "json_schema",
     '{"type":"object"}'),
    ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs.choice", "choice", ["a"]),
]  # fmt: skip


@BOTH
@pytest.mark.parametrize(("body", "field", "option", "value"), FORMS)
def test_every_structured_output_option_reaches_the_engine(read, body, field, option, value):
    for endpoint, words in ((Endpoint.CHAT, {"messages": [QUESTION]}), (Endpoint.COMPLETIONS, {"prompt": "x"})):
        sampling = read(endpoint, {"model": "m", **words, **body}).sampling
        assert {"json_schema": sampling.json_schema, **dict(sampling.engine_options)}[option] == value
        assert sampling.form_field == field


@BOTH
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"guided_regex": 3}, "guided_regex"), ({"guided_choice": "a"}, "guided_choice"),
        ({"guided_json": [1]}, "guided_json"),
        ({"structured_outputs": "x"}, "structured_outputs"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
    ],
)  # fmt: skip
def test_invalid_structured_output_option_is_refused_by_name(read, body, param):
    with pytest.raises(RequestRefused) as refused:
        read(Endpoint.CHAT, {"model": "m", "messages": [QUESTION], **body})
    assert refused.value.error.param == param


def test_ignored_fields_are_reported():
    body = {"model": "m", "messages": [{**QUESTION, "metadata": {}}], "user": "ana", "store": None, "priority": 3}
    told: list[str] = []
    parse_model_request(json.dumps(body).encode(), endpoint=Endpoint.CHAT, name="r", ignored=told.append)
    assert sorted(told) == ["messages[].metadata", "priority", "user"]


def test_ignored_fields_of_a_request_file_are_listed(tmp_path):
    path = tmp_path / "requests.jsonl"
    body = {"model": "m", "messages": [{**QUESTION, "annotations": []}], "user": "ana"}
    lines = [{"custom_id": f"r{n}", "method": "POST", "url": Endpoint.CHAT.value, "body": body} for n in range(3)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    checked = check_file(path, admit=ANY.check_model)
    assert (checked.refused, checked.ignored) == ((), ("messages[].annotations", "user"))
