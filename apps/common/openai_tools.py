"""The tools of a request: the functions that a model may call, and the JSON schema of a required call.

As in vLLM, a required call is the arguments of the named function, or a list of objects with `name` and `parameters`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import msgspec

from stoker.apps.common.refusals import encode_json_text, expect, refused, shown

Body = Mapping[str, Any]
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
    """The functions of a request, as a chat template expects them. `name`: the function to call, with `NAMED`."""

    functions: tuple[dict[str, Any], ...] = ()
    choice: ToolChoice = ToolChoice.NONE
    name: str = ""
    is_parallel: bool = True

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.parameters)

    @property
    def parameters(self) -> dict[str, dict[str, Any]]:
        return {each["function"]["name"]: _parameters(each) for each in self.functions}

    @property
    def is_call_required(self) -> bool:
        return self.choice in (ToolChoice.REQUIRED, ToolChoice.NAMED)

    @property
    def schema(self) -> str:
        """The JSON schema for the text of a required call."""
        parameters = self.parameters
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


def read_tools(body: Body) -> Tools:
    """Parse the tools in the body of a request. Raises RequestRefused."""
    given = body.get("tools", [])
    if not isinstance(given, list) or len(given) > _MOST_TOOLS:
        raise refused("tools", f"must be a list of up to {_MOST_TOOLS} tools, and is {shown(given)}", "invalid_type")
    functions = tuple(_function(tool, f"tools[{number}]") for number, tool in enumerate(given))
    is_parallel = expect(body.get("parallel_tool_calls", True), bool, "parallel_tool_calls")
    choice, name = _choice(body.get("tool_choice", "auto"))
    tools = Tools(functions, choice, name, is_parallel)
    if tools.is_call_required and not functions:
        raise refused("tool_choice", "needs tools", "invalid_value")
    if name and name not in tools.names:
        raise refused("tool_choice", f"names the function {shown(name)}, which is not in tools", "invalid_value")
    return tools if functions and choice is not ToolChoice.NONE else Tools()


def _function(tool: Any, where: str) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind != "function":
        raise refused(f"{where}.type", f"is {shown(kind)}; only function is supported", "unsupported_value")
    function = expect(tool.get("function"), dict, f"{where}.function")
    given = {name: value for name, value in function.items() if value is not None}
    for name, value in given.items():
        if name not in _FUNCTION_FIELDS:
            raise refused(f"{where}.function.{name}", "is not a known field of a function", "unknown_parameter")
        expect(value, _FUNCTION_FIELDS[name], f"{where}.function.{name}")
    if not given.get("name"):
        raise refused(f"{where}.function.name", "is missing or empty", "invalid_type")
    shown_to_model = {field: given[field] for field in ("name", "description", "parameters") if field in given}
    return {"type": "function", "function": shown_to_model}


def _choice(choice: Any) -> tuple[ToolChoice, str]:
    if choice in ("none", "auto", "required"):
        return ToolChoice(choice), ""
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        what = "it must be none, auto, required, or an object with type function and function.name"
        raise refused("tool_choice", f"is {shown(choice)}; {what}", "unsupported_value")
    return ToolChoice.NAMED, name


def _parameters(tool: Body) -> dict[str, Any]:
    parameters: dict[str, Any] = tool["function"].get("parameters") or _NO_PARAMETERS
    return parameters


def _rebase_schema_references(schema: Any, place: str) -> Any:
    """Return a schema for the path `place` of a larger document, with its `$ref` references adjusted."""
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
