"""Find function calls in the format of Qwen3-Coder, which uses tags instead of JSON for arguments.

    <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>

A value is JSON or text, depending on the parameter's type in the schema of the function.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from stoker.apps.common.tool_calls import AnswerDelta, HeldTextParser

_MARK, _MARK_END, _FUNCTION = "<tool_call>", "</tool_call>", "<function="
_BEGIN = re.compile(r"(?:<tool_call>\s*)?<function=([^<>\s]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>]+)>(.*?)</parameter>\s*", re.DOTALL)
_END = re.compile(r".*?</function>", re.DOTALL)
_OPENING = re.compile(r"(?:<tool_call>\s*)?<function=[^<>\s]*")
_LONGEST_OPENING = 300


class XMLCallParser(HeldTextParser):
    """Finds function calls in an answer. `parameters`: JSON schemas of the parameters by function name."""

    def __init__(self, parameters: Mapping[str, Mapping[str, Any]], *, only_first: bool = False) -> None:
        super().__init__(only_first=only_first)
        self._parameters = parameters
        self._name = ""
        """Function of the current call; empty outside of a call."""
        self._has_arguments = self._follows_call = False
        self._step = self._parse_text

    def end(self) -> AnswerDelta:
        if self._name:
            self._add_to_call(arguments="}" if self._has_arguments else "{}")
        elif not (self._follows_call and _MARK_END.startswith(self._held)):
            self._text.append(self._held)
        self._held = self._name = ""
        return self._take_delta()

    def _parse_text(self) -> bool:
        """Return text that is not part of a call, and check whether a call begins. Return True if it does."""
        if self._follows_call:
            self._held = self._held.lstrip().removeprefix(_MARK_END).lstrip()
            if _MARK_END.startswith(self._held):
                return False
            self._follows_call = False
        if found := _BEGIN.search(self._held):
            self._text.append(self._held[: found.start()])
            self._held, self._name, self._has_arguments = self._held[found.end() :], found[1], False
            self._count += 1
            self._add_to_call(name=self._name)
            self._step = self._parse_call
            return True
        kept = _partial_call_suffix_length(self._held)
        self._text.append(self._held[: len(self._held) - kept])
        self._held = self._held[len(self._held) - kept :]
        return False

    def _parse_call(self) -> bool:
        """Parse a parameter or the end of the call. Return False if more text is needed."""
        if found := _PARAMETER.match(self._held):
            key, value = found[1].strip(), found[2].removeprefix("\n").removesuffix("\n")
            encoded = str(msgspec.json.encode(key), "utf-8") + ": " + self._encode_parameter_value(key, value)
            self._add_to_call(arguments=(", " if self._has_arguments else "{") + encoded)
            self._has_arguments = True
        elif not self._held.lstrip().startswith("<parameter=") and (found := _END.match(self._held)):
            self._add_to_call(arguments="}" if self._has_arguments else "{}")
            self._name, self._follows_call, self._step = "", True, self._parse_text
        else:
            return False
        self._held = self._held[found.end() :]
        return True

    def _encode_parameter_value(self, key: str, value: str) -> str:
        schema = self._parameters.get(self._name, {}).get("properties", {}).get(key, {})
        if isinstance(schema, dict) and schema.get("type", "string") != "string":
            try:
                msgspec.json.decode(value)
            except msgspec.DecodeError:
                lower = value.strip().lower()
                return lower if lower in ("true", "false", "null") else str(msgspec.json.encode(value), "utf-8")
            return value.strip()
        return str(msgspec.json.encode(value), "utf-8")


def _partial_call_suffix_length(text: str) -> int:
    for found in re.finditer("<", text):
        rest = text[found.start() :]
        after = rest.removeprefix(_MARK).lstrip() if rest.startswith(_MARK) else rest
        opens = _FUNCTION.startswith(after) or _MARK.startswith(rest) or _OPENING.fullmatch(rest)
        if opens and len(rest) <= _LONGEST_OPENING:
            return len(rest)
    return 0
