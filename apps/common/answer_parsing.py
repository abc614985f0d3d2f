"""Parse a model's text into the parts of an OpenAI answer: reasoning, text, and function calls."""

from __future__ import annotations

import hashlib

from msgspec.structs import replace

from stoker.apps.common.openai_messages import ToolCall
from stoker.apps.common.openai_requests import ApiRequest, Endpoint
from stoker.apps.common.openai_tools import ToolChoice
from stoker.apps.common.reasoning import REASONING, ReasoningParser, detect_reasoning_marks
from stoker.apps.common.tool_calls import (
    FORMATS,
    PLAIN_FORMAT,
    AnswerDelta,
    CallParser,
    NamedCallParser,
    ToolCallParser,
    ToolFormat,
    detect_tool_call_format,
)
from stoker.apps.common.tool_prompts import has_tool_support
from stoker.apps.common.xml_calls import XMLCallParser


class AnswerParser:
    """Parses an answer. `seed`: text from which ids of calls are derived."""

    def __init__(
        self, *, reasoning: ReasoningParser | None, calls: CallParser | None, seed: str, has_short_ids: bool
    ) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._seed = seed
        self._has_short_ids = has_short_ids
        self.has_calls = False

    def feed(self, text: str) -> AnswerDelta:
        return self._parse(self._reasoning.feed(text) if self._reasoning else AnswerDelta(text=text))

    def end(self) -> AnswerDelta:
        found = self._parse(self._reasoning.end()) if self._reasoning else AnswerDelta()
        if self._calls is None:
            return found
        last = self._with_ids(self._calls.end())
        return AnswerDelta(found.reasoning, found.text + last.text, (*found.calls, *last.calls))

    def finish_reason(self, reason: str) -> str:
        return "tool_calls" if self.has_calls and reason == "stop" else reason

    def _parse(self, found: AnswerDelta) -> AnswerDelta:
        if self._calls is None:
            return found
        return replace(self._with_ids(self._calls.feed(found.text)), reasoning=found.reasoning)

    def _with_ids(self, found: AnswerDelta) -> AnswerDelta:
        self.has_calls = self.has_calls or bool(found.calls)
        calls = (replace(call, id=self._id(call.index)) if call.name else call for call in found.calls)
        return replace(found, calls=tuple(calls)) if found.calls else found

    def _id(self, index: int) -> str:
        digest = hashlib.blake2b(f"{self._seed}/{index}".encode(), digest_size=12).hexdigest()
        return digest[:9] if self._has_short_ids else f"call_{digest}"


def tool_format(request: ApiRequest, template: str) -> ToolFormat:
    name = request.tool_parser or (detect_tool_call_format(template) if has_tool_support(template) else PLAIN_FORMAT)
    return FORMATS[name]


def answer_parser(request: ApiRequest, *, template: str, prompt: str, place: int) -> AnswerParser | None:
    """Return None if the answer is ordinary text. `place`: index of the prompt in the request."""
    if request.endpoint is not Endpoint.CHAT:
        return None
    marks = None
    if not request.sampling.form_field:  # an answer in a required format has no reasoning
        marks = REASONING.get(request.reasoning_parser or detect_reasoning_marks(template))
    format = tool_format(request, template)
    calls = _call_parser(request, format)
    if marks is None and calls is None:
        return None
    return AnswerParser(
        reasoning=ReasoningParser(marks, prompt=prompt) if marks is not None else None,
        calls=calls,
        seed=f"{request.custom_id}/{request.sampling.seed}/{place}",
        has_short_ids=format.has_short_ids,
    )


def _call_parser(request: ApiRequest, format: ToolFormat) -> CallParser | None:
    tools = request.tools
    only_first = not tools.is_parallel
    match tools.choice:
        case ToolChoice.NAMED:
            return NamedCallParser(tools.name)
        case ToolChoice.REQUIRED:
            return ToolCallParser(FORMATS["json"], tools.names, only_first=only_first)
        case ToolChoice.AUTO if format.is_xml and not request.sampling.form_field:
            return XMLCallParser(tools.parameters, only_first=only_first)
        case ToolChoice.AUTO if not request.sampling.form_field:
            return ToolCallParser(format, tools.names, only_first=only_first)
        case _:
            return None


def parse_whole_answer(parser: AnswerParser, text: str) -> tuple[AnswerDelta, tuple[ToolCall, ...]]:
    parts = (parser.feed(text), parser.end())
    calls: dict[int, ToolCall] = {}
    for part in (call for each in parts for call in each.calls):
        before = calls.get(part.index, ToolCall(part.id, part.name, ""))
        calls[part.index] = ToolCall(before.id, before.name, before.arguments + part.arguments)
    found = AnswerDelta("".join(each.reasoning for each in parts), "".join(each.text for each in parts))
    return found, tuple(calls.values())
