"""`/v1/responses`: requests as chat requests, and bodies and events of OpenAI's types exactly."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

if not all(map(find_spec, ("openai", "starlette", "prometheus_client"))):
    pytest.skip("needs the extras serve and test", allow_module_level=True)

from gateway.bodies import strict
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from stoker.apps.common.openai_answers import AnswerPiece, Choice, TextBegun, TextEnded
from stoker.apps.common.openai_chat import ToolCall
from stoker.apps.common.openai_requests import RequestRefused
from stoker.apps.common.tool_calls import AnswerDelta, CallDelta
from stoker.apps.gateway.answering import parse_responses_request
from stoker.apps.gateway.responses import (
    ResponseEvents,
    build_response_body,
    convert_to_chat_request,
    translate_chat_error,
)

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}, "strict": False}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)


def read(**fields):
    try:
        return parse_responses_request(json.dumps({"model": "m", "input": "Hi", **fields}).encode(), name="r")
    except RequestRefused as error:
        raise translate_chat_error(error) from None


def events_of(data: bytes):
    for event in data.decode().split("\n\n")[:-1]:
        kind, line = event.split("\n")
        found = strict(EVENT.validate_python(json.loads(line.removeprefix("data: "))))
        assert kind == f"event: {found.type}"
        yield found


def test_input_of_items_is_a_conversation():
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
        {"type": "function_call", "call_id": "c3", "name": "f", "arguments": "{}"},
    ]
    found = read(input=items, instructions="Be kind", tools=[TOOL], tool_choice={"type": "function", "name": "f"})
    said = [(each.role, each.content, [call.id for call in each.calls]) for each in found.request.messages]
    assert said == [
        ("system", "Be kind", []), ("user", "Hi", []), ("assistant", "I look", ["c1", "c2"]), ("tool", "1", []),
        ("tool", "2", []), ("assistant", "", ["c3"]),
    ]  # fmt: skip
    assert found.request.messages[2].reasoning == "Hm"
    assert found.request.tools.name == "f"
    format = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
    limited = read(text={"format": format}, max_output_tokens=7).request.sampling
    assert (json.loads(limited.json_schema), limited.max_new_tokens) == ({"type": "object"}, 7)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"inputs": "Hi"}, "inputs"),
        ({"input": []}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].tool_call_id"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": ["f"]}, "tools[0].type"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": [1]}, "top_p"),
        ({"input": [{"role": "user", "content": [{"type": ["text"]}]}]}, "input[0].content[0]"),
        ({"instructions": 5}, "instructions.content"),
        ({"input": [{"role": "robot", "content": "x"}], "instructions": "Be kind"}, "input[0].role"),
        ({"input": [CALL, CALL, {"role": "robot", "content": "x"}]}, "input[2].role"),
    ],
)
def test_unsupported_response_field_is_refused(fields, param):
    with pytest.raises(RequestRefused) as refused:
        read(**fields)
    assert refused.value.error.param == param
    assert refused.value.error.message.startswith(param)


def test_store_and_include_fields_are_ignored_and_reported():
    noted = []
    convert_to_chat_request({"model": "m", "input": "Hi", "store": False, "include": []}, ignored=noted.append)
    assert noted == ["store", "include"]


def test_streamed_events_add_up_to_the_whole_response():
    repeated = convert_to_chat_request(
        {"model": "m", "input": "Hi", "tools": [TOOL], "text": None}, ignored=lambda _: None
    ).repeated
    events = ResponseEvents(repeated, name="n", model="m", created=1)
    pieces = [
        TextBegun(5), AnswerPiece(AnswerDelta("Hm"), 2), AnswerPiece(AnswerDelta(" so", "I"), 1),
        " look", AnswerPiece(AnswerDelta(calls=(CallDelta(0, "f", "{", "c1"),)), 1),
        AnswerPiece(AnswerDelta(calls=(CallDelta(0, arguments="}"), CallDelta(1, "f", "{}", "c2"))), 3),
        TextEnded("tool_calls", 9),
    ]  # fmt: skip
    found = list(events_of(events.encode_pieces(0, pieces) + events.encode_end()))
    assert [event.sequence_number for event in found] == list(range(len(found)))
    assert [event.type for event in found[:2]] == ["response.created", "response.in_progress"]
    assert found[-1].type == "response.completed"
    done = found[-1].response
    assert [item.type for item in done.output] == ["reasoning", "message", "function_call", "function_call"]
    assert done.output_text == "I look"
    assert [item.arguments for item in done.output[2:]] == ["{}", "{}"]
    assert (done.usage.input_tokens, done.usage.output_tokens, done.usage.total_tokens) == (5, 9, 14)
    added, ended = ([each for each in found if each.type == f"response.output_item.{end}"] for end in ("added", "done"))
    assert [each.item.id for each in added] == [each.item.id for each in ended]
    assert {each.item.status for each in added} == {"in_progress"}
    assert {each.item.status for each in ended} == {"completed"}
    calls = (ToolCall("c1", "f", "{}"), ToolCall("c2", "f", "{}"))
    choice = Choice("I look", "tool_calls", 5, 9, reasoning="Hm so", calls=calls)
    body = build_response_body(choice, repeated, name="n", model="m", created=1)
    assert strict(Response.model_validate(body, strict=True)) == done


def test_response_cut_at_its_token_limit_is_marked_incomplete():
    repeated = convert_to_chat_request({"model": "m", "input": "Hi"}, ignored=lambda _: None).repeated
    events = ResponseEvents(repeated, name="n", model="m", created=1)
    *_, last = events_of(events.encode_pieces(0, [TextBegun(5), "So", TextEnded("length", 1)]) + events.encode_end())
    assert (last.type, last.response.status) == ("response.incomplete", "incomplete")
    assert last.response.incomplete_details.reason == "max_output_tokens"
