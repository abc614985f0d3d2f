"""Convert the messages and tools of a request to the input of a chat template.

A template without tools gets a text that describes the functions and the call format (`PLAIN_FORMAT`). Calls and their
results become text.
"""

from __future__ import annotations

from typing import Any

import msgspec

from stoker.apps.common.openai_chat import ChatMessage, ToolChoice, Tools
from stoker.apps.common.openai_requests import ApiRequest
from stoker.apps.common.refusals import encode_json_text
from stoker.apps.common.tool_calls import ToolFormat

_SHORT_ID = 9
_PLAIN_TOOLS = """\
You can call functions. They are described here as JSON, one per line:
{functions}

To call a function, write its name and its arguments as JSON between these tags, and nothing after them:
<tool_call>
{{"name": "NAME", "arguments": {{"ARGUMENT": "VALUE"}}}}
</tool_call>"""
_FORCED_CALL_TEXTS = {
    ToolChoice.REQUIRED: (
        'Answer now with a JSON list of one or more function calls: [{"name": "NAME", "parameters": {...}}]'
    ),
    ToolChoice.NAMED: "Answer now with the arguments of the function {name}, as one JSON object and nothing else",
}


def has_tool_support(template: str) -> bool:
    return "tools" in template


def convert_messages_for_template(request: ApiRequest, template: str, format: ToolFormat) -> list[dict[str, Any]]:
    if has_tool_support(template):
        return [_convert_message(message, format) for message in request.messages]
    messages = [_convert_message_without_tools(message) for message in request.messages]
    return _add_tool_descriptions(messages, request.tools) if request.tools.functions else messages


def _convert_message(message: ChatMessage, format: ToolFormat) -> dict[str, Any]:
    found: dict[str, Any] = _message_with_content(message, message.role, message.content)
    if message.calls:
        found["tool_calls"] = [
            {
                "id": _format_call_id(call.id, format),
                "type": "function",
                "function": {"name": call.name, "arguments": _decode_arguments(call.arguments)},
            }
            for call in message.calls
        ]
    if message.call_id:
        found["tool_call_id"] = _format_call_id(message.call_id, format)
    return found


def _convert_message_without_tools(message: ChatMessage) -> dict[str, Any]:
    if message.role == "tool":
        return _message_with_content(message, "user", f"<tool_response>\n{message.content}\n</tool_response>")
    calls = [
        f"<tool_call>\n{encode_json_text({'name': call.name, 'arguments': _decode_arguments(call.arguments)})}\n"
        "</tool_call>"
        for call in message.calls
    ]
    return _message_with_content(
        message, message.role, "\n".join(text for text in (message.content, *calls) if text or not calls)
    )


def _message_with_content(message: ChatMessage, role: str, content: str) -> dict[str, Any]:
    found = {"role": role, "content": content}
    if message.name:
        found["name"] = message.name
    if message.reasoning:
        found["reasoning_content"] = message.reasoning
    return found


def _add_tool_descriptions(messages: list[dict[str, Any]], tools: Tools) -> list[dict[str, Any]]:
    """Describe the tools in the system message, or else in the first user message."""
    functions = "\n".join(encode_json_text(tool["function"]) for tool in tools.functions)
    text = _PLAIN_TOOLS.format(functions=functions)
    if forced := _FORCED_CALL_TEXTS.get(tools.choice):
        text += "\n\n" + forced.replace("{name}", tools.name)
    for role in ("system", "user"):
        for place, message in enumerate(messages):
            if message["role"] == role:
                both = (message["content"], text) if role == "system" else (text, message["content"])
                return [*messages[:place], {**message, "content": "\n\n".join(both)}, *messages[place + 1 :]]
    return [{"role": "user", "content": text}, *messages]


def _format_call_id(id: str, format: ToolFormat) -> str:
    letters = "".join(character for character in id if character.isalnum())
    return letters[-_SHORT_ID:].rjust(_SHORT_ID, "0") if format.has_short_ids else id


def _decode_arguments(arguments: str) -> Any:
    """Decode arguments to an object, as chat templates expect. Return invalid JSON unchanged."""
    try:
        return msgspec.json.decode(arguments or "{}")
    except msgspec.DecodeError:
        return arguments
