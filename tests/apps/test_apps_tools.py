"""Requests with tools: refusals, the chat template's input, and answers with calls and reasoning."""

from __future__ import annotations

import json
from importlib.util import find_spec

import msgspec
import pytest

if not all(map(find_spec, ("openai", "starlette", "prometheus_client"))):
    pytest.skip("needs the extras serve and test", allow_module_level=True)

from openai.types.chat import ChatCompletion, ChatCompletionChunk

from stoker.apps.common.openai_answers import TextPiece, build_answer_body, build_prompts, complete_prompt, stream_text
from stoker.apps.common.openai_requests import ApiRequest, Endpoint, RequestRefused, parse_request_body
from stoker.apps.gateway.streaming import ChunkEncoder
from stoker.contexts.ambient import RelayedTexts
from stoker.contexts.inference.adapter import FinishReason, NewToken
from stoker.contexts.text_writer import Completion, CompletionStream, CompletionTexts, CompletionToken

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        "strict": True,
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
QUESTION = {"role": "user", "content": "Weather?"}
FUNCTION = {"name": "get_weather", "arguments": '{"city":"Rome"}'}
CALLED = {
    "role": "assistant", "content": None,
    "tool_calls": [{"id": "call_123456789a", "type": "function", "function": FUNCTION}],
}  # fmt: skip
RESULT = {"role": "tool", "tool_call_id": "call_123456789a", "content": "Sunny"}
HERMES = "{{ tools }} {{ messages[0].tool_calls }} <tool_call>"
CALL = 'I look.<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'


class WrittenGeneration:
    """A stand-in for an engine's `Generation`, with the methods that readers of texts use."""

    def __init__(self, texts: list[str], finish: FinishReason) -> None:
        self._texts, self._finish, self.made = texts, finish, 0

    def tokens(self):
        for text in self._texts:
            self.made += 1
            yield NewToken(0, 0, text, self._finish if self.made == len(self._texts) else None)

    def abort(self):
        pass


class WritingModel:
    """A model that writes a given text, three characters a token, and records the input of its chat template."""

    longest = 1000

    def __init__(self, text: str = "", template: str = HERMES, prompt: str = "prompt", finish: str = "stop") -> None:
        self.text = text
        self.chat_template = template
        self.prompt = prompt
        self.finish = finish

    def chat_prompt(self, messages, **options):
        self.messages, self.options = messages, options
        return self.prompt

    def count_tokens(self, text):
        return len(text)

    def complete(self, prompt, **options):
        self.sampling = options
        return Completion(self.text, self.finish, len(prompt), len(self._tokens()))

    def stream_completion(self, prompt, **options):
        *first, last = self._tokens()
        tokens = [CompletionToken(text, logprobs=((text, -1.0, ()),)) for text in first]
        tokens.append(CompletionToken(last, self.finish, ((last, -1.0, ()),)))
        texts = CompletionTexts(lambda _sink: WrittenGeneration(self._tokens(), FinishReason(self.finish)))
        return CompletionStream((token for token in tokens), texts)

    def _tokens(self):
        return [self.text[start : start + 3] for start in range(0, len(self.text), 3)] or [""]


def read(**fields) -> ApiRequest:
    body = {"model": "m", "messages": [QUESTION], **fields}
    return parse_request_body(body, endpoint=Endpoint.CHAT, custom_id="r", line=0)


def strict(kind, body):
    found = kind.model_validate(body, strict=True)
    assert json.loads(found.model_dump_json(exclude_unset=True)) == body
    assert not found.choices[0].model_extra
    return found.choices[0]


def answer(model: WritingModel, **fields):
    request = read(**fields)
    [prompt] = build_prompts(model, request)
    choice = complete_prompt(model, request, prompt, place=0)
    body = json.loads(msgspec.json.encode(build_answer_body(Endpoint.CHAT, [choice], name="n", model="m", created=1)))
    assert body["usage"]["completion_tokens"] == len(model._tokens())
    return strict(ChatCompletion, body)


def streamed(model: WritingModel, **fields) -> tuple[str, str, list[list[str]], str]:
    """Return reasoning, text, calls and finish reason of a streamed answer."""
    request = read(**fields)
    [prompt] = build_prompts(model, request)
    pieces: list[TextPiece] = []
    for piece in stream_text(model, request, prompt, place=0):
        pieces.extend(piece if isinstance(piece, RelayedTexts) else (piece,))
    chunks = ChunkEncoder(endpoint=Endpoint.CHAT, name="n", model="m", created=1, per_prompt=1, usage=False)
    lines = chunks.encode_pieces(0, pieces).decode().split("\n\n")[:-1]
    chunks.encode_end()
    assert chunks.written == len(model._tokens())
    reasoning, text, calls, finish = "", "", dict[int, list[str]](), ""
    for line in lines:
        choice = strict(ChatCompletionChunk, json.loads(line.removeprefix("data: ")))
        reasoning += getattr(choice.delta, "reasoning_content", "")
        text += choice.delta.content or ""
        finish = choice.finish_reason or finish
        for call in choice.delta.tool_calls or ():
            if call.id:
                assert call.type == "function"
                calls[call.index] = [call.id, call.function.name, ""]
            calls[call.index][2] += call.function.arguments
    return reasoning, text, list(calls.values()), finish


# ---- answers


@pytest.mark.parametrize(
    ("text", "fields", "said", "arguments", "finish"),
    [
        (CALL, {}, "I look.", ['{"city": "Rome"}'], "tool_calls"),
        (CALL.replace('{"city": "Rome"}', "Rome"), {}, "I look.", ["Rome"], "tool_calls"),
        (CALL * 2, {"parallel_tool_calls": False}, "I look.I look.", ['{"city": "Rome"}'], "tool_calls"),
        (CALL, {"tool_choice": "none"}, CALL, [], "stop"),
        ("Sunny", {}, "Sunny", [], "stop"),
        (
            '[{"name": "get_weather", "parameters": {"city": "Rome"}}, {"name": "get_weather", "parameters": {}}]',
            {"tool_choice": "required"}, None, ['{"city": "Rome"}', "{}"], "tool_calls",
        ),
        ('{"city": "Rome"}', {"tool_choice": NAMED}, None, ['{"city": "Rome"}'], "tool_calls"),
    ],
)  # fmt: skip
def test_tool_calls_in_the_text_are_returned_whole_and_streamed(text, fields, said, arguments, finish):
    fields = {"tools": [WEATHER, TIME], **fields}
    whole = answer(WritingModel(text), **fields)
    calls = whole.message.tool_calls or []
    assert whole.message.content == said
    assert [(call.function.name, call.function.arguments) for call in calls] == [
        ("get_weather", each) for each in arguments
    ]
    assert whole.finish_reason == finish
    in_pieces = [[call.id, call.function.name, call.function.arguments] for call in calls]
    assert streamed(WritingModel(text), **fields) == ("", said or "", in_pieces, finish)


def test_truncated_tool_call_has_the_finish_reason_length():
    cut = answer(WritingModel(CALL[: -len('ome"}}</tool_call>')], finish="length"), tools=[WEATHER])
    assert cut.finish_reason == "length"
    assert cut.message.tool_calls[0].function.arguments == '{"city": "R'


def test_repeated_request_with_the_same_seed_gives_equal_call_ids():
    ids = [answer(WritingModel(CALL), tools=[WEATHER], seed=seed).message.tool_calls[0].id for seed in (1, 1, 2)]
    assert ids[0] == ids[1] != ids[2]
    short = answer(WritingModel("[TOOL_CALLS]f{}", template="{{ tools }} [TOOL_CALLS]"), tools=[WEATHER])
    assert len(short.message.tool_calls[0].id) == 9


def test_reasoning_comes_before_text_and_calls():
    model = WritingModel("Hm.\n</think>\n\n" + CALL, template=HERMES + "</think>", prompt="...<think>\n")
    whole = answer(model, tools=[WEATHER])
    assert whole.message.reasoning_content == "Hm."
    reasoning, text, calls, _ = streamed(model, tools=[WEATHER], logprobs=True)
    assert (reasoning, text, len(calls)) == ("Hm.", "I look.", 1)


def test_requested_tool_format_overrides_that_of_the_template():
    request = msgspec.structs.replace(read(tools=[WEATHER]), tool_parser="mistral", reasoning_parser="none")
    model = WritingModel('<think></think>[TOOL_CALLS]get_weather{"city": "Rome"}', template=HERMES + "</think>")
    choice = complete_prompt(model, request, "prompt", place=0)
    assert (choice.text, choice.calls[0].name) == ("<think></think>", "get_weather")


# ---- prompts


def test_chat_template_with_tool_support_receives_tools_and_calls():
    model = WritingModel()
    fields = {"messages": [QUESTION, CALLED, RESULT], "chat_template_kwargs": {"enable_thinking": False}}
    build_prompts(model, read(tools=[WEATHER], **fields))
    [shown] = model.options.pop("tools")
    assert shown["function"] == {key: value for key, value in WEATHER["function"].items() if key != "strict"}
    assert model.options == {"enable_thinking": False}
    called, result = model.messages[1:]
    assert called["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": {"city": "Rome"}}
    assert called["tool_calls"][0]["id"] == result["tool_call_id"] == "call_123456789a"
    mistral = WritingModel(template="{{ tools }} [TOOL_CALLS]")
    build_prompts(mistral, read(tools=[WEATHER], messages=[QUESTION, CALLED, RESULT]))
    assert mistral.messages[1]["tool_calls"][0]["id"] == mistral.messages[2]["tool_call_id"] == "23456789a"
    build_prompts(model, read(tools=[WEATHER], tool_choice="none"))
    assert not model.options


@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be kind."}]])
def test_chat_template_without_tool_support_gets_tools_as_text(system):
    model = WritingModel(CALL, template="{{ messages }}")
    fields = {"tools": [WEATHER], "messages": [*system, QUESTION, CALLED, RESULT]}
    assert answer(model, **fields).message.tool_calls[0].function.name == "get_weather"
    assert not model.options
    first, *_, called, result = model.messages
    assert "get_weather" in first["content"]
    assert first["content"].startswith("Be kind." if system else "You can call functions.")
    assert called == {
        "role": "assistant",
        "content": '<tool_call>\n{"name":"get_weather","arguments":{"city":"Rome"}}\n</tool_call>',
    }
    assert result == {"role": "user", "content": "<tool_response>\nSunny\n</tool_response>"}


# ---- schemas and refusals


def test_forced_tool_call_is_constrained_by_a_json_schema():
    named = read(tools=[WEATHER, TIME], tool_choice=NAMED)
    assert json.loads(named.sampling.json_schema) == WEATHER["function"]["parameters"]
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}}
    tree = {"type": "function", "function": {"name": "tree", "parameters": {**node, "$defs": {"Node": node}}}}
    asked = read(tools=[tree, TIME], tool_choice="required", parallel_tool_calls=False)
    schema = json.loads(asked.sampling.json_schema)
    assert (schema["minItems"], schema["maxItems"]) == (1, 1)
    names = [each["properties"]["name"]["enum"] for each in schema["items"]["anyOf"]]
    assert names == [["tree"], ["get_time"]]
    moved = schema["$defs"]["parameters0"]["properties"]["next"]["$ref"]
    assert moved == "#/$defs/parameters0/$defs/Node"
    assert not read(tools=[WEATHER]).sampling.json_schema


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": "f"}, "tools"),
        ({"tools": [{"type": "custom"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 1}}]}, "tools[0].function.parameters"),
        ({"tools": [{"type": "function", "function": {"name": "f", "x": 1}}]}, "tools[0].function.x"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [WEATHER], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "messages[0].tool_calls[0].function"),
    ],
)
def test_unusable_tool_is_refused_by_its_field(fields, param):
    with pytest.raises(RequestRefused) as refused:
        read(**fields)
    assert refused.value.error.param == param
