"""Parse the messages and the tools of a conversation in OpenAI's format.

Clients send earlier answers back as messages, so every field of an answer is accepted.

If a request requires a call, the model writes it in vLLM's format: the arguments of the named function, or a list of
objects with `name` and `parameters`.
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from stoker.apps.common.refusals import are_equal_json_values, check_type, encode_json_text, field_error, format_value


class ToolCall(msgspec.Struct, frozen=True):
    """A function call of an answer. `arguments`: JSON text, which may be invalid."""

    id: str
    name: str
    arguments: str


class ChatMessage(msgspec.Struct, frozen=True):
    """One message of a conversation. `name`: the author; `call_id`: id of the function call that a tool answers."""

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
        raise field_error("messages", f"must be a list of messages, and is {format_value(messages)}", "invalid_type")
    return tuple(_read_message(message, f"messages[{number}]", ignored) for number, message in enumerate(messages))


def _read_message(message: Any, where: str, ignored: Callable[[str], None]) -> ChatMessage:
    role = check_type(message, dict, where).get("role")
    for name, value in message.items():
        if value is None or name in _HONOURED or (role is not None and _BY_ROLE.get(name) == role):
            continue
        if name in _IGNORED:
            ignored(f"messages[].{name}")
        elif not any(are_equal_json_values(value, neutral) for neutral in _NEUTRAL.get(name, ())):
            _refuse_field(name, f"{where}.{name}")
    if not isinstance(role, str) or role not in _ROLES:
        what = "is missing" if role is None else f"is {format_value(role)}; it must be system, user, assistant or tool"
        raise field_error(f"{where}.role", what, "invalid_value" if role is not None else "missing_required_parameter")
    if role == "tool" and not message.get("tool_call_id"):
        raise field_error(f"{where}.tool_call_id", "is missing", "missing_required_parameter")
    calls = _read_calls(message.get("tool_calls"), f"{where}.tool_calls") if role == "assistant" else ()
    return ChatMessage(
        role=_ROLES[role],
        content="" if calls and not message.get("content") else _read_content_or_refusal(message, where),
        name=_read_text_field(message, "name", where),
        calls=calls,
        call_id=_read_text_field(message, "tool_call_id", where) if role == "tool" else "",
        reasoning=next((text for name in _REASONING if isinstance(text := message.get(name), str)), ""),
    )


def _refuse_field(name: str, where: str) -> None:
    if name in _BY_ROLE:
        raise field_error(where, f"is for messages of the role {_BY_ROLE[name]}", "invalid_value")
    if name in _NEUTRAL:
        instead = "use tool_calls" if name == "function_call" else "leave it out"
        raise field_error(where, f"is not supported here; {instead}", "unsupported_parameter")
    near = difflib.get_close_matches(name, ["role", "content", "name", *_BY_ROLE], n=1)
    hint = f"; did you mean {near[0]}?" if near else "; leave it out"
    raise field_error(where, f"is not a known field of a message{hint}", "unknown_parameter")


def _read_text_field(message: dict[str, Any], name: str, where: str) -> str:
    return check_type(message.get(name) or "", str, f"{where}.{name}")


def _read_calls(calls: Any, where: str) -> tuple[ToolCall, ...]:
    given = check_type(calls or [], list, where, "a list of calls")
    return tuple(_read_call(call, f"{where}[{number}]") for number, call in enumerate(given))


def _read_call(call: Any, where: str) -> ToolCall:
    if (kind := check_type(call, dict, where).get("type", "function")) != "function":
        raise field_error(f"{where}.type", f"is {format_value(kind)}; only function is supported", "unsupported_value")
    function = check_type(call.get("function"), dict, f"{where}.function", "an object with name and arguments")
    for name, value in {"id": call.get("id"), "function.name": function.get("name")}.items():
        if not isinstance(value, str) or not value:
            raise field_error(f"{where}.{name}", "must be a text that is not empty", "invalid_type")
    arguments = check_type(function.get("arguments", ""), str, f"{where}.function.arguments")
    return ToolCall(call["id"], function["name"], arguments)


def _read_content_or_refusal(message: dict[str, Any], where: str) -> str:
    refusal, content = message.get("refusal"), message.get("content")
    if not refusal:
        return _read_content(content, f"{where}.content")
    if content:
        raise field_error(f"{where}.refusal", "is given together with content; give one of them", "invalid_value")
    return check_type(refusal, str, f"{where}.refusal")


def _read_content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        raise field_error(where, "is missing", "missing_required_parameter")
    if not isinstance(content, list) or not content:
        raise field_error(where, f"must be a text or a list of parts, and is {format_value(content)}", "invalid_type")
    texts: list[str] = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "refusal"):
            what = f"is of type {format_value(kind)}; only text is supported"
            raise field_error(f"{where}[{number}]", what, "unsupported_value")
        if not isinstance(text := part.get(kind), str):
            raise field_error(f"{where}[{number}]", "has no text", "unsupported_value")
        texts.append(text)
    return "\n".join(texts)


# ---- tools

TOOL_FIELDS = ("tools", "tool_choice", "parallel_tool_calls")
_MOST_TOOLS = 1024
_FUNCTION_FIELDS: dict[str, type] = {"name": str, "description": str, "parameters": dict, "strict": bool}
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class ToolChoice(enum.Enum):
    NONE = "none"
    """The model sees no tools."""
    AUTO = "auto"
    REQUIRED = "required"
    """The model calls at least one function."""
    NAMED = "function"


class Tools(msgspec.Struct, frozen=True):
    """The functions that the model may call. `name`: the function that it must call if `choice` is `NAMED`."""

    functions: tuple[dict[str, Any], ...] = ()
    choice: ToolChoice = ToolChoice.NONE
    name: str = ""
    is_parallel: bool = True

    @property
    def function_names(self) -> frozenset[str]:
        return frozenset(self.parameters_by_function)

    @property
    def parameters_by_function(self) -> dict[str, dict[str, Any]]:
        return {each["function"]["name"]: _function_parameters(each) for each in self.functions}

    @property
    def is_call_required(self) -> bool:
        return self.choice in (ToolChoice.REQUIRED, ToolChoice.NAMED)

    @property
    def call_schema(self) -> str:
        """The JSON schema that the text of a required call must match."""
        parameters = self.parameters_by_function
        if self.choice is ToolChoice.NAMED:
            return encode_json_text(parameters[self.name])
        calls, definitions = [], {}
        for number, (name, schema) in enumerate(parameters.items()):
            place = f"parameters{number}"
            definitions[place] = _rebase_schema_references(schema, f"#/$defs/{place}")
            properties = {"name": {"enum": [name]}, "parameters": {"$ref": f"#/$defs/{place}"}}
            shape = {"type": "object", "properties": properties, "required": ["name", "parameters"]}
            calls.append({**shape, "additionalProperties": False})
        most = {} if self.is_parallel else {"maxItems": 1}
        items = {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}, "$defs": definitions}
        return encode_json_text(items)


def read_tools(body: Mapping[str, Any]) -> Tools:
    """Parse the fields `tools`, `tool_choice` and `parallel_tool_calls`. Raises RequestRefused."""
    given = body.get("tools", [])
    if not isinstance(given, list) or len(given) > _MOST_TOOLS:
        raise field_error(
            "tools", f"must be a list of up to {_MOST_TOOLS} tools, and is {format_value(given)}", "invalid_type"
        )
    functions = tuple(_read_tool_function(tool, f"tools[{number}]") for number, tool in enumerate(given))
    is_parallel = check_type(body.get("parallel_tool_calls", True), bool, "parallel_tool_calls")
    choice, name = _read_tool_choice(body.get("tool_choice", "auto"))
    tools = Tools(functions, choice, name, is_parallel)
    if tools.is_call_required and not functions:
        raise field_error("tool_choice", "needs tools", "invalid_value")
    if name and name not in tools.function_names:
        raise field_error(
            "tool_choice", f"names the function {format_value(name)}, which is not in tools", "invalid_value"
        )
    return tools if functions and choice is not ToolChoice.NONE else Tools()


def _read_tool_function(tool: Any, where: str) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind != "function":
        raise field_error(f"{where}.type", f"is {format_value(kind)}; only function is supported", "unsupported_value")
    function = check_type(tool.get("function"), dict, f"{where}.function")
    given = {name: value for name, value in function.items() if value is not None}
    for name, value in given.items():
        if name not in _FUNCTION_FIELDS:
            raise field_error(f"{where}.function.{name}", "is not a known field of a function", "unknown_parameter")
        check_type(value, _FUNCTION_FIELDS[name], f"{where}.function.{name}")
    if not given.get("name"):
        raise field_error(f"{where}.function.name", "is missing or empty", "invalid_type")
    shown_to_model = {field: given[field] for field in ("name", "description", "parameters") if field in given}
    return {"type": "function", "function": shown_to_model}


def _read_tool_choice(choice: Any) -> tuple[ToolChoice, str]:
    if choice in ("none", "auto", "required"):
        return ToolChoice(choice), ""
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        what = "it must be none, auto, required, or an object with type function and function.name"
        raise field_error("tool_choice", f"is {format_value(choice)}; {what}", "unsupported_value")
    return ToolChoice.NAMED, name


def _function_parameters(tool: Mapping[str, Any]) -> dict[str, Any]:
    parameters: dict[str, Any] = tool["function"].get("parameters") or _NO_PARAMETERS
    return parameters


def _rebase_schema_references(schema: Any, place: str) -> Any:
    """Adjust the `$ref` references of a schema that moves to path `place` of a larger document."""
    if isinstance(schema, list):
        return [_rebase_schema_references(each, place) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: place + value.removeprefix("#")
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _rebase_schema_references(value, place)
        for key, value in schema.items()
    }
