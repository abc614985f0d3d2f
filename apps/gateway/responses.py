"""`/v1/responses` without stored state: converts requests to chat requests, and creates answers and events.

Calls and their results are separate items of `input`. In a chat request, a call is part of the preceding assistant
message.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from stoker.apps.common.openai_answers import AnswerPiece, Choice, TextBegun, TextEnded, TextPiece, TokenPiece
from stoker.apps.common.openai_requests import ENGINE_FIELDS, IGNORED, Body, Note
from stoker.apps.common.refusals import RequestRefused, are_equal_json_values, check_type, field_error, format_value
from stoker.apps.common.tool_calls import AnswerDelta, CallDelta

ADDRESS = "/v1/responses"
_RENAMED = {"max_output_tokens": "max_completion_tokens"}
_UNCHANGED = frozenset(
    {
        "model", "temperature", "top_p", "parallel_tool_calls", "stream", "seed", "stop", "chat_template_kwargs",
        *ENGINE_FIELDS,
    }
)  # fmt: skip
_OWN = ("input", "instructions", "tools", "tool_choice", "text")
_IGNORED = IGNORED | {"include", "reasoning", "stream_options"}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,), "truncation": ("auto", "disabled"), "top_logprobs": (0,),
}  # fmt: skip
_STATE = ("previous_response_id", "conversation", "prompt")
_FIELDS = {"max_completion_tokens": "max_output_tokens", "messages": "input", "response_format": "text.format"}
"""Fields of `/v1/responses`, by their names in chat requests."""
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


class ConvertedRequest(msgspec.Struct, frozen=True):
    """A request converted to a chat request. `repeated`: request fields that the response repeats; `places`: for each
    chat message, the field of the original request.
    """

    chat: Body
    repeated: Body
    places: tuple[str, ...]


def convert_to_chat_request(body: Body, *, ignored: Note) -> ConvertedRequest:
    given = {name: value for name, value in body.items() if value is not None}
    chat: Body = {}
    for name, value in given.items():
        if name in _UNCHANGED or name in _RENAMED:
            chat[_RENAMED.get(name, name)] = value
        elif name in _STATE:
            what = "is not supported: the gateway stores no responses; send the whole input"
            raise field_error(name, what, "unsupported")
        elif name in _IGNORED:
            ignored(name)
        elif name not in _OWN and not any(are_equal_json_values(value, neutral) for neutral in _NEUTRAL.get(name, ())):
            known = name in _NEUTRAL
            what = (
                f"is {format_value(value)}, which is not supported" if known else f"is not a known field of {ADDRESS}"
            )
            raise field_error(name, what, "unsupported_value" if known else "unknown_parameter")
    if "tools" in given:
        chat["tools"] = [_convert_tool_for_chat(tool) for tool in check_type(given["tools"], list, "tools")]
    choice = given.get("tool_choice", "auto")
    if isinstance(choice, dict) and choice.get("type") == "function":
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    chat["tool_choice"] = choice
    format = _read_text_format(given.get("text", {}))
    if format["type"] != "text":
        chat["response_format"] = _nest_under_type("json_schema", format) if format["type"] == "json_schema" else format
    by_place = _convert_input_to_messages(given.get("input"))
    if given.get("instructions"):
        by_place = {"instructions": {"role": "system", "content": given["instructions"]}, **by_place}
    chat["messages"] = list(by_place.values())
    return ConvertedRequest(chat, _select_repeated_fields(given, format), tuple(by_place))


def translate_chat_error(error: RequestRefused, places: Sequence[str] = ()) -> RequestRefused:
    """Replace a chat field in an error by the field of `/v1/responses`. `places`: as in `ConvertedRequest`."""
    param = error.error.param or ""
    if found := re.match(r"messages\[(\d+)\]", param):
        name, own = found[0], dict(enumerate(places)).get(int(found[1]), "input")
    else:
        name = re.split(r"[\[.]", param)[0]
        own = _FIELDS.get(name, name)
    if name == own:
        return error
    there = own + param.removeprefix(name)
    return RequestRefused(there + error.error.message.removeprefix(param), param=there, code=error.error.code)


def _convert_tool_for_chat(tool: Any) -> Any:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return tool
    return _nest_under_type("function", tool)


def _nest_under_type(kind: str, fields: Body) -> Body:
    """Return `{"type": kind, kind: fields}`, as chat requests write tools and formats."""
    return {"type": kind, kind: {name: value for name, value in fields.items() if name != "type"}}


def _read_text_format(text: Any) -> Body:
    format = text.get("format") or {"type": "text"} if isinstance(text, dict) else None
    if not isinstance(format, dict) or "type" not in format:
        raise field_error(
            "text.format", f"must be an object with a type, and is {format_value(format)}", "invalid_type"
        )
    return format


def _convert_input_to_messages(given: Any) -> dict[str, Body]:
    """Return the chat messages. The key of a message is the request field where it begins, for example `input[0]`."""
    if isinstance(given, str):
        return {"input": {"role": "user", "content": given}}
    messages: dict[str, Body] = {}
    last: Body = {"role": ""}
    reasoning = ""
    for number, item in enumerate(check_type(given, list, "input")):
        where = f"input[{number}]"
        match check_type(item, dict, where).get("type", "message"):
            case "message":
                last = messages[where] = {
                    "role": item.get("role"),
                    "content": _convert_content(item.get("content"), where),
                }
            case "function_call":
                call = {"name": item.get("name"), "arguments": item.get("arguments", "")}
                if last["role"] != "assistant":
                    last = messages[where] = {"role": "assistant", "content": None}
                calls = last.setdefault("tool_calls", [])
                calls.append({"id": item.get("call_id"), "type": "function", "function": call})
            case "function_call_output":
                output = _convert_content(item.get("output"), where)
                last = messages[where] = {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
            case "reasoning":
                reasoning = _read_reasoning_text(item)
                continue
            case kind:
                raise field_error(
                    f"{where}.type", f"is {format_value(kind)}, which is not supported", "unsupported_value"
                )
        if reasoning and last["role"] == "assistant":
            last["reasoning_content"], reasoning = reasoning, ""
    return messages


def _convert_content(content: Any, where: str) -> Any:
    if not isinstance(content, list):
        return content
    parts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in _TEXT_PARTS:
            what = f"is of type {format_value(kind)}; only text is supported"
            raise field_error(f"{where}.content[{number}]", what, "unsupported_value")
        parts.append({"type": "text", "text": part.get(_TEXT_PARTS[kind])})
    return parts or ""


def _read_reasoning_text(item: Body) -> str:
    parts = item.get("content") or item.get("summary") or []
    return "\n".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))


def _select_repeated_fields(given: Body, format: Body) -> Body:
    """Return the request fields that a response repeats. The parser of the chat request checks their values."""
    return {
        "instructions": given.get("instructions"),
        "max_output_tokens": given.get("max_output_tokens"),
        "metadata": given.get("metadata", {}),
        "parallel_tool_calls": given.get("parallel_tool_calls", True),
        "temperature": given.get("temperature", 1.0),
        "text": {"format": {**format, **({"strict": format.get("strict")} if format["type"] == "json_schema" else {})}},
        "tool_choice": given.get("tool_choice", "auto"),
        "tools": [
            {"parameters": None, "strict": None, **tool} for tool in given.get("tools", []) if isinstance(tool, dict)
        ],
        "top_p": given.get("top_p", 1.0),
        "truncation": given.get("truncation", "disabled"),
    }


# ---- answers


def build_response_body(choice: Choice, repeated: Body, *, name: str, model: str, created: int) -> Body:
    events = ResponseEvents(repeated, name=name, model=model, created=created)
    delta = AnswerDelta(
        choice.reasoning,
        choice.text,
        tuple(CallDelta(place, call.name, call.arguments, call.id) for place, call in enumerate(choice.calls)),
    )
    begun, ended = TextBegun(choice.prompt_tokens), TextEnded(choice.finish_reason, choice.completion_tokens)
    events.encode_pieces(0, [begun, AnswerPiece(delta, choice.completion_tokens), ended])
    return events.build_response()


class ResponseEvents:
    """Builds a streamed response and its events, with the same interface as `ChunkEncoder`."""

    def __init__(self, repeated: Body, *, name: str, model: str, created: int) -> None:
        self._name = name
        self._head = {
            "id": f"resp_{name}", "object": "response", "created_at": float(created), "model": model, "error": None,
            "previous_response_id": None, "reasoning": {"effort": None, "summary": None}, **repeated,
        }  # fmt: skip
        self._items: list[Body] = []
        self._finish = ""
        self._number = 0
        self._is_open = False
        self.read, self.written = 0, 0

    @property
    def finish_reasons(self) -> list[str]:
        return [self._finish] if self._finish else []

    def encode_pieces(self, _index: int, pieces: Sequence[TextPiece]) -> bytes:
        return b"".join(event for piece in pieces for event in self._encode_piece(piece))

    def encode_end(self) -> bytes:
        kind = "response.incomplete" if self._finish == "length" else "response.completed"
        return self._encode_event(kind, response=self.build_response())

    def build_response(self) -> Body:
        status = {"": "in_progress", "length": "incomplete"}.get(self._finish, "completed")
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        usage = None
        if self._finish:
            usage = {
                "input_tokens": self.read, "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": self.written, "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": self.read + self.written,
            }  # fmt: skip
        return {
            **self._head, "status": status, "incomplete_details": incomplete, "output": self._items, "usage": usage,
        }  # fmt: skip

    def _encode_piece(self, piece: TextPiece) -> Iterator[bytes]:
        match piece:
            case TextBegun():
                self.read = piece.prompt_tokens
                yield self._encode_event("response.created", response=self.build_response())
                yield self._encode_event("response.in_progress", response=self.build_response())
            case str():
                self.written += 1
                yield from self._encode_text(piece)
            case TokenPiece():
                self.written += 1
                yield from self._encode_text(piece.text)
            case AnswerPiece():
                self.written += piece.tokens
                if piece.delta.reasoning:
                    yield from self._encode_reasoning(piece.delta.reasoning)
                if piece.delta.text:
                    yield from self._encode_text(piece.delta.text)
                for call in piece.delta.calls:
                    yield from self._encode_function_call(call)
            case TextEnded():
                self.written = piece.completion_tokens
                self._finish = piece.finish_reason
                if not self._items:
                    yield from self._encode_text("")
                yield from self._end_item("incomplete" if self._finish == "length" else "completed")

    def _encode_text(self, text: str) -> Iterator[bytes]:
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        yield from self._begin_item("message", part=part, role="assistant")
        self._items[-1]["content"][0]["text"] += text
        yield self._encode_event(
            "response.output_text.delta", **self._describe_item_position(), content_index=0, delta=text, logprobs=[]
        )

    def _encode_reasoning(self, text: str) -> Iterator[bytes]:
        yield from self._begin_item("reasoning", part={"type": "reasoning_text", "text": ""}, summary=[])
        self._items[-1]["content"][0]["text"] += text
        yield self._encode_event(
            "response.reasoning_text.delta", **self._describe_item_position(), content_index=0, delta=text
        )

    def _encode_function_call(self, call: CallDelta) -> Iterator[bytes]:
        if call.id:
            yield from self._end_item()
            yield from self._begin_item("function_call", call_id=call.id, name=call.name, arguments="")
        if call.arguments:
            self._items[-1]["arguments"] += call.arguments
            yield self._encode_event(
                "response.function_call_arguments.delta", **self._describe_item_position(), delta=call.arguments
            )

    def _begin_item(self, kind: str, *, part: Body | None = None, **fields: Any) -> Iterator[bytes]:
        """Begin an output item, unless an item of this kind is open."""
        if self._is_open and self._items[-1]["type"] == kind:
            return
        yield from self._end_item()
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        item: Body = {"id": f"{prefix}_{self._name}{len(self._items)}", "type": kind, "status": "in_progress", **fields}
        if part is not None:
            item["content"] = []
        self._items.append(item)
        self._is_open = True
        yield self._encode_event("response.output_item.added", output_index=len(self._items) - 1, item=item)
        if part is not None:
            item["content"].append(part)
            yield self._encode_event(
                "response.content_part.added", **self._describe_item_position(), content_index=0, part=part
            )

    def _end_item(self, status: str = "completed") -> Iterator[bytes]:
        if not self._is_open:
            return
        self._is_open = False
        item, place = self._items[-1], self._describe_item_position()
        item["status"] = status
        if item["type"] == "function_call":
            yield self._encode_event("response.function_call_arguments.done", **place, arguments=item["arguments"])
        else:
            [part] = item["content"]
            kind = part["type"]
            more: Body = {"logprobs": []} if kind == "output_text" else {}
            yield self._encode_event(f"response.{kind}.done", **place, content_index=0, text=part["text"], **more)
            yield self._encode_event("response.content_part.done", **place, content_index=0, part=part)
        yield self._encode_event("response.output_item.done", output_index=place["output_index"], item=item)

    def _describe_item_position(self) -> Body:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _encode_event(self, kind: str, **fields: Any) -> bytes:
        data = msgspec.json.encode({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"
