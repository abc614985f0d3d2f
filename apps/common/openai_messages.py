"""Parse the messages of a conversation in OpenAI's format, with every field of earlier answers, which clients send
again.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

import msgspec

from stoker.apps.common.refusals import equals, expect, refused, shown


class ToolCall(msgspec.Struct, frozen=True):
    """A function call of an answer. `arguments`: JSON text, which may be invalid."""

    id: str
    name: str
    arguments: str


class ChatMessage(msgspec.Struct, frozen=True):
    """One message of a conversation. `name`: its author; `call_id`: the function call that a tool answers."""

    role: str
    content: str
    name: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    reasoning: str = ""


_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_REASONING = ("reasoning_content", "reasoning")
_HONOURED = ("role", "content", "name", "refusal", *_REASONING)
_BY_ROLE = {"tool_calls": "assistant", "tool_call_id": "tool"}
"""Message fields that only one role has, with that role."""
_IGNORED = frozenset(
    {
        "annotations", "metadata", "id", "object", "created", "status", "weight", "reasoning_details",
        "provider_specific_fields", "cache_control", "logprobs", "finish_reason", "index",
    }
)  # fmt: skip
"""Message fields that never become part of a prompt."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {"function_call": ({},), "audio": ({},), "tool_calls": ([],)}


def read_messages(messages: Any, ignored: Callable[[str], None]) -> tuple[ChatMessage, ...]:
    """Parse messages. `ignored` receives the names of ignored fields. Raises RequestRefused."""
    if not isinstance(messages, list) or not messages:
        raise refused("messages", f"must be a list of messages, and is {shown(messages)}", "invalid_type")
    return tuple(_message(message, f"messages[{number}]", ignored) for number, message in enumerate(messages))


def _message(message: Any, where: str, ignored: Callable[[str], None]) -> ChatMessage:
    role = expect(message, dict, where).get("role")
    for name, value in message.items():
        if value is None or name in _HONOURED or (role is not None and _BY_ROLE.get(name) == role):
            continue
        if name in _IGNORED:
            ignored(f"messages[].{name}")
        elif not any(equals(value, neutral) for neutral in _NEUTRAL.get(name, ())):
            _refuse_field(name, f"{where}.{name}")
    if not isinstance(role, str) or role not in _ROLES:
        what = "is missing" if role is None else f"is {shown(role)}; it must be system, user, assistant or tool"
        raise refused(f"{where}.role", what, "invalid_value" if role is not None else "missing_required_parameter")
    if role == "tool" and not message.get("tool_call_id"):
        raise refused(f"{where}.tool_call_id", "is missing", "missing_required_parameter")
    calls = _calls(message.get("tool_calls"), f"{where}.tool_calls") if role == "assistant" else ()
    return ChatMessage(
        role=_ROLES[role],
        content="" if calls and not message.get("content") else _content_or_refusal(message, where),
        name=_text(message, "name", where),
        calls=calls,
        call_id=_text(message, "tool_call_id", where) if role == "tool" else "",
        reasoning=next((text for name in _REASONING if isinstance(text := message.get(name), str)), ""),
    )


def _refuse_field(name: str, where: str) -> None:
    if name in _BY_ROLE:
        raise refused(where, f"is for messages of the role {_BY_ROLE[name]}", "invalid_value")
    if name in _NEUTRAL:
        instead = "use tool_calls" if name == "function_call" else "leave it out"
        raise refused(where, f"is not supported here; {instead}", "unsupported_parameter")
    near = difflib.get_close_matches(name, ["role", "content", "name", *_BY_ROLE], n=1)
    hint = f"; did you mean {near[0]}?" if near else "; leave it out"
    raise refused(where, f"is not a known field of a message{hint}", "unknown_parameter")


def _text(message: dict[str, Any], name: str, where: str) -> str:
    return expect(message.get(name) or "", str, f"{where}.{name}")


def _calls(calls: Any, where: str) -> tuple[ToolCall, ...]:
    given = expect(calls or [], list, where, "a list of calls")
    return tuple(_call(call, f"{where}[{number}]") for number, call in enumerate(given))


def _call(call: Any, where: str) -> ToolCall:
    if (kind := expect(call, dict, where).get("type", "function")) != "function":
        raise refused(f"{where}.type", f"is {shown(kind)}; only function is supported", "unsupported_value")
    function = expect(call.get("function"), dict, f"{where}.function", "an object with name and arguments")
    for name, value in {"id": call.get("id"), "function.name": function.get("name")}.items():
        if not isinstance(value, str) or not value:
            raise refused(f"{where}.{name}", "must be a text that is not empty", "invalid_type")
    arguments = expect(function.get("arguments", ""), str, f"{where}.function.arguments")
    return ToolCall(call["id"], function["name"], arguments)


def _content_or_refusal(message: dict[str, Any], where: str) -> str:
    refusal, content = message.get("refusal"), message.get("content")
    if not refusal:
        return _content(content, f"{where}.content")
    if content:
        raise refused(f"{where}.refusal", "is given together with content; give one of them", "invalid_value")
    return expect(refusal, str, f"{where}.refusal")


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        raise refused(where, "is missing", "missing_required_parameter")
    if not isinstance(content, list) or not content:
        raise refused(where, f"must be a text or a list of parts, and is {shown(content)}", "invalid_type")
    texts: list[str] = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "refusal"):
            what = f"is of type {shown(kind)}; only text is supported"
            raise refused(f"{where}[{number}]", what, "unsupported_value")
        if not isinstance(text := part.get(kind), str):
            raise refused(f"{where}[{number}]", "has no text", "unsupported_value")
        texts.append(text)
    return "\n".join(texts)
