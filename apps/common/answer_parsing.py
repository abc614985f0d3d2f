"""Parse a model's text into the parts of an OpenAI answer: reasoning, text, and function calls.

A model writes its reasoning between two marks. Some chat templates write the first mark at the end of the prompt. Blank
lines around the reasoning are dropped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from msgspec.structs import replace

from stoker.apps.common.openai_chat import ToolCall, ToolChoice
from stoker.apps.common.openai_requests import ApiRequest, Endpoint
from stoker.apps.common.tool_calls import (
    FORMATS,
    PLAIN_FORMAT,
    AnswerDelta,
    NamedCallParser,
    ToolCallParser,
    ToolFormat,
    detect_tool_call_format,
    suffix_overlap_length,
)
from stoker.apps.common.tool_prompts import has_tool_support
from stoker.apps.common.xml_calls import XMLCallParser

CallParser = ToolCallParser | XMLCallParser | NamedCallParser
REASONING: Mapping[str, tuple[str, str]] = {
    "deepseek_r1": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
}
"""The marks before and after a model's reasoning, by the name of vLLM's reasoning parser."""
NO_REASONING = "none"
REASONING_PARSERS = (NO_REASONING, *REASONING)


def detect_reasoning_parser(template: str) -> str:
    """Return the key in `REASONING` whose end mark is in the chat template, or `none`."""
    found = (name for name, (_, end) in REASONING.items() if end in template)
    return next(found, NO_REASONING)


class ReasoningParser:
    """Separates reasoning from text. If `prompt` ends with the first mark, the answer begins with reasoning."""

    def __init__(self, marks: tuple[str, str], *, prompt: str) -> None:
        self._begin, self._end = marks
        self._is_reasoning = prompt.rstrip().endswith(self._begin)
        self._is_first = not self._is_reasoning
        """True while the answer may still begin with the mark before reasoning."""
        self._is_blank = True
        """True while leading whitespace of the current part is omitted."""
        self._held = ""

    def feed(self, text: str) -> AnswerDelta:
        self._held += text
        if self._is_first and not self._check_first_mark():
            return AnswerDelta()
        reasoning = self._take_reasoning() if self._is_reasoning else ""
        return AnswerDelta(reasoning, "" if self._is_reasoning else self._take_answer())

    def end(self) -> AnswerDelta:
        held, self._held = self._held, ""
        return AnswerDelta(reasoning=held.rstrip()) if self._is_reasoning else AnswerDelta(text=held)

    def _check_first_mark(self) -> bool:
        """Check whether the answer begins with the first mark. Return False if more text is needed to decide."""
        said = self._held.lstrip()
        if said.startswith(self._begin):
            self._is_reasoning, self._held = True, said.removeprefix(self._begin)
        elif self._begin.startswith(said):
            return False
        else:
            self._is_blank = False
        self._is_first = False
        return True

    def _take_reasoning(self) -> str:
        thought, mark, rest = self._held.partition(self._end)
        if mark:
            self._is_reasoning = False
            self._held = rest
            kept = thought.rstrip()
        else:
            kept = thought[: len(thought) - suffix_overlap_length(thought, self._end)].rstrip()
            self._held = thought[len(kept) :]
        if self._is_blank:
            kept = kept.lstrip()
        self._is_blank = bool(mark) or (self._is_blank and not kept)
        return kept

    def _take_answer(self) -> str:
        text, self._held = self._held, ""
        if self._is_blank:
            text = text.lstrip()
            self._is_blank = not text
        return text


class AnswerParser:
    """Splits an answer into reasoning, text and calls. `seed`: text from which the ids of the calls are derived."""

    def __init__(
        self, *, reasoning: ReasoningParser | None, calls: CallParser | None, seed: str, has_short_ids: bool
    ) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._seed = seed
        self._has_short_ids = has_short_ids
        self.has_calls = False

    def feed(self, text: str) -> AnswerDelta:
        return self._parse_calls(self._reasoning.feed(text) if self._reasoning else AnswerDelta(text=text))

    def end(self) -> AnswerDelta:
        found = self._parse_calls(self._reasoning.end()) if self._reasoning else AnswerDelta()
        if self._calls is None:
            return found
        last = self._add_call_ids(self._calls.end())
        return AnswerDelta(found.reasoning, found.text + last.text, (*found.calls, *last.calls))

    def convert_finish_reason(self, reason: str) -> str:
        return "tool_calls" if self.has_calls and reason == "stop" else reason

    def _parse_calls(self, found: AnswerDelta) -> AnswerDelta:
        if self._calls is None:
            return found
        return replace(self._add_call_ids(self._calls.feed(found.text)), reasoning=found.reasoning)

    def _add_call_ids(self, found: AnswerDelta) -> AnswerDelta:
        self.has_calls = self.has_calls or bool(found.calls)
        calls = (replace(call, id=self._make_call_id(call.index)) if call.name else call for call in found.calls)
        return replace(found, calls=tuple(calls)) if found.calls else found

    def _make_call_id(self, index: int) -> str:
        digest = hashlib.blake2b(f"{self._seed}/{index}".encode(), digest_size=12).hexdigest()
        return digest[:9] if self._has_short_ids else f"call_{digest}"


def choose_tool_format(request: ApiRequest, template: str) -> ToolFormat:
    name = request.tool_parser or (detect_tool_call_format(template) if has_tool_support(template) else PLAIN_FORMAT)
    return FORMATS[name]


def make_answer_parser(request: ApiRequest, *, template: str, prompt: str, place: int) -> AnswerParser | None:
    """Return a parser, or None if the answer needs none. `place`: index of the prompt in the request."""
    if request.endpoint is not Endpoint.CHAT:
        return None
    marks = None
    if not request.sampling.form_field:  # an answer in a required format has no reasoning
        marks = REASONING.get(request.reasoning_parser or detect_reasoning_parser(template))
    format = choose_tool_format(request, template)
    calls = _make_call_parser(request, format)
    if marks is None and calls is None:
        return None
    return AnswerParser(
        reasoning=ReasoningParser(marks, prompt=prompt) if marks is not None else None,
        calls=calls,
        seed=f"{request.custom_id}/{request.sampling.seed}/{place}",
        has_short_ids=format.has_short_ids,
    )


def _make_call_parser(request: ApiRequest, format: ToolFormat) -> CallParser | None:
    tools = request.tools
    only_first = not tools.is_parallel
    match tools.choice:
        case ToolChoice.NAMED:
            return NamedCallParser(tools.name)
        case ToolChoice.REQUIRED:
            return ToolCallParser(FORMATS["json"], tools.function_names, only_first=only_first)
        case ToolChoice.AUTO if format.is_xml and not request.sampling.form_field:
            return XMLCallParser(tools.parameters_by_function, only_first=only_first)
        case ToolChoice.AUTO if not request.sampling.form_field:
            return ToolCallParser(format, tools.function_names, only_first=only_first)
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
