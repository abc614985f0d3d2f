"""Find function calls and reasoning in texts of real models, for any split of the texts into pieces."""

from __future__ import annotations

import pytest

from stoker.apps.common.answer_parsing import REASONING, CallParser, ReasoningParser, detect_reasoning_parser
from stoker.apps.common.tool_calls import (
    FORMATS,
    AnswerDelta,
    NamedCallParser,
    ToolCallParser,
    detect_tool_call_format,
)
from stoker.apps.common.xml_calls import XMLCallParser

NAMES = {"get_weather", "add"}
PARIS = ["get_weather", '{"city": "Paris"}']
ADD = ["add", '{"a": 1, "b": [2, {"c": "}"}]}']
PIECES = (1, 2, 3, 5, 1000)


def parse(parser: CallParser, text: str, size: int) -> tuple[str, list[list[str]]]:
    """Parse a text in pieces of `size` characters. Return the ordinary text, and each call's name and arguments."""
    said, calls = "", dict[int, list[str]]()
    pieces = [parser.feed(text[start : start + size]) for start in range(0, len(text), size)]
    for found in (*pieces, parser.end()):
        assert isinstance(found, AnswerDelta)
        said += found.text
        for call in found.calls:
            so_far = calls.setdefault(call.index, ["", ""])
            assert not (call.name and so_far[0])
            so_far[0] += call.name
            so_far[1] += call.arguments
    return said, list(calls.values())


CALLS = [
    ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>', "", [PARIS]),
    ("hermes",
     'Let me look.\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
     '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, {"c": "}"}]}}\n</tool_call>',
     "Let me look.\n\n", [PARIS, ADD]),
    ("hermes", '<tool_call>{"arguments": {"city": "Paris"}, "name": "get_weather"}</tool_call>', "", [PARIS]),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>', "", [PARIS]),
    ("hermes", '<tool_call>{"name": "unknown"}</tool_call>', "", [["unknown", "{}"]]),
    ("llama3_json", '{"name": "get_weather", "parameters": {"city": "Paris"}}', "", [PARIS]),
    ("llama3_json", '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}', "", [PARIS]),
    ("llama3_json",
     '{"type": "function", "name": "get_weather", "parameters": {"city": "Paris"}}; '
     '{"name": "add", "parameters": {"a": 1, "b": [2, {"c": "}"}]}}', "", [PARIS, ADD]),
    ("mistral",
     '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}, '
     '{"name": "add", "arguments": {"a": 1, "b": [2, {"c": "}"}]}}]', "", [PARIS, ADD]),
    ("mistral",
     'Sure.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]add[CALL_ID]a1b2c3d4e[ARGS]'
     '{"a": 1, "b": [2, {"c": "}"}]}', "Sure.", [PARIS, ADD]),
    ("mistral", '[TOOL_CALLS]get_weather{"city": "Paris"}', "", [PARIS]),
    ("json", ' [{"name": "get_weather", "parameters": {"city": "Paris"}}]', "", [PARIS]),
]  # fmt: skip


@pytest.mark.parametrize(("format", "text", "said", "calls"), CALLS)
def test_tool_calls_are_found_in_each_format(format, text, said, calls):
    for size in PIECES:
        assert parse(ToolCallParser(FORMATS[format], NAMES), text, size) == (said, calls)


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("hermes", "a < b, <tool_call and <tool_call> in words"),
        ("hermes", '<tool_call>{"nothing": 1}</tool_call> so'),
        ("llama3_json", '<|python_tag|>brave_search.call(query="weather")'),
        ("llama3_json", '{"name": "Ana", "age": 3} is a person'),
        ("mistral", "As [1] says, [TOOL"),
        ("mistral", '[TOOL_CALLS]not a name{"a": 1}'),
        ("json", '{"answer": {"name": "add", "arguments": {}}}'),
        ("json", ""),
    ],
)
def test_text_without_a_tool_call_is_unchanged(format, text):
    for size in PIECES:
        assert parse(ToolCallParser(FORMATS[format], NAMES), text, size) == (text, [])


@pytest.mark.parametrize(
    ("text", "said", "arguments"),
    [
        ('<tool_call>{"name": "add", "arguments": {"a": Paris, 1}}</tool_call>', "", '{"a": Paris, 1}'),
        ('<tool_call>{"name": "add", "arguments": Paris}</tool_call>', "", "Paris"),
        ('<tool_call>{"name": "add", "arguments": {"a": "b}}</tool_call>Then', "Then", '{"a": "b}}'),
        ('<tool_call>{"name": "add", "arguments": {"a": "b', "", '{"a": "b'),
    ],
)
def test_tool_arguments_that_are_not_json_are_kept_unchanged(text, said, arguments):
    for size in PIECES:
        assert parse(ToolCallParser(FORMATS["hermes"], NAMES), text, size) == (said, [["add", arguments]])


def test_text_and_arguments_are_streamed():
    parser = ToolCallParser(FORMATS["hermes"], NAMES)
    assert parser.feed("I look <").text == "I look "
    assert parser.feed("up").text == "<up"
    [begun] = parser.feed('<tool_call>{"name": "add", "arg').calls
    assert (begun.name, begun.arguments) == ("add", "")
    [more] = parser.feed('uments": {"a": 1').calls
    assert (more.index, more.name, more.arguments) == (0, "", '{"a": 1')
    bare = ToolCallParser(FORMATS["json"], NAMES)
    assert bare.feed('{"answer"').text == ""
    assert bare.feed(': "a long').text == '{"answer": "a long'
    assert bare.feed(" text").text == " text"


def test_later_tool_calls_are_dropped_if_only_one_is_requested():
    format, text, said, calls = CALLS[1]
    assert parse(ToolCallParser(FORMATS[format], NAMES, only_first=True), text, 3) == (said, calls[:1])


def test_whole_text_becomes_the_arguments_of_a_named_function():
    assert parse(NamedCallParser("add"), '{"a": 1}', 3) == ("", [["add", '{"a": 1}']])
    assert parse(NamedCallParser("add"), "", 3) == ("", [["add", ""]])


XML = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "</function>\n</tool_call>"
)


@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        ("I look.\n" + XML, "I look.\n", [["get_weather", '{"city": "Paris", "days": 3}']]),
        (XML + "\n" + XML.replace("\n3\n", "\nsoon\n"), "", [
            ["get_weather", '{"city": "Paris", "days": 3}'], ["get_weather", '{"city": "Paris", "days": "soon"}'],
        ]),
        ("<function=get_time>\n</function>", "", [["get_time", "{}"]]),
        ("<function=f>\n<parameter=a>\n<b>1</b>\n</parameter>", "", [["f", '{"a": "<b>1</b>"}']]),
        ("a < b and <function of x> and <tool_call> so <", "a < b and <function of x> and <tool_call> so <", []),
    ],
)  # fmt: skip
def test_tool_calls_in_xml_tags_are_converted_to_json(text, said, calls):
    parameters = {"get_weather": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}
    for size in PIECES:
        assert parse(XMLCallParser(parameters), text, size) == (said, calls)
    assert parse(XMLCallParser(parameters, only_first=True), text, 3) == (said, calls[:1])


@pytest.mark.parametrize(
    ("template", "format"),
    [
        ("{% if tools %}...within <tool_call></tool_call> XML tags{% endif %}", "hermes"),
        ('{{- "<|python_tag|>" + tool_call.name + ".call(" }}', "llama3_json"),
        ('{"name": function name, "parameters": dictionary of argument name and its value}', "llama3_json"),
        ('{{- "[TOOL_CALLS] [" }}', "mistral"),
        ("<tool_call>\n<function=f>\n<parameter=p>", "qwen3_xml"),
        ("{% if tools %}{{ tools | tojson }}{% endif %}", "json"),
        ("", "json"),
    ],
)
def test_tool_call_format_is_detected_from_the_chat_template(template, format):
    assert detect_tool_call_format(template) == format


@pytest.mark.parametrize(
    ("text", "prompt", "thought", "said"),
    [
        ("<think>\nSo a < b,\n\nhm </b>\n</think>\n\nYes <think>.\n", "", "So a < b,\n\nhm </b>", "Yes <think>.\n"),
        ("So.\n</think>\n\nYes", "<|assistant|><think>\n", "So.", "Yes"),
        ("<think>\n\n</think>\n\nYes", "", "", "Yes"),
        ("Yes", "<think>\n\n</think>\n\n", "", "Yes"),
        (" Yes", "", "", " Yes"),
        ("<thi", "", "", "<thi"),
        ("So it is cut </thi", "<think>", "So it is cut </thi", ""),
    ],
)
def test_reasoning_is_separated_from_the_answer(text, prompt, thought, said):
    for size in PIECES:
        parser = ReasoningParser(REASONING["deepseek_r1"], prompt=prompt)
        found = [parser.feed(text[start : start + size]) for start in range(0, len(text), size)]
        found.append(parser.end())
        assert "".join(each.reasoning for each in found) == thought
        assert "".join(each.text for each in found) == said


def test_reasoning_format_is_detected_from_the_chat_template():
    assert detect_reasoning_parser("{{ content.split('</think>')[-1] }}") == "deepseek_r1"
    assert detect_reasoning_parser("[THINK]{{ thinking }}[/THINK]") == "mistral"
    assert detect_reasoning_parser("{{ content }}") == "none"
