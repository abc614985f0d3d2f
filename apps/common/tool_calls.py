"""Find the function calls in a model's text, piece by piece during generation.

Each family of models has a separate format for calls (`FORMATS`). The formats differ in the marks around a JSON object
with a name and arguments. A parser holds back text that may begin a call.

As in OpenAI's API, arguments are returned as the model wrote them, even if they are not valid JSON.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Protocol

import msgspec


class CallDelta(msgspec.Struct, frozen=True):
    """A part of function call number `index`. Only the first part of a call has a `name`. `arguments` is JSON text."""

    index: int
    name: str = ""
    arguments: str = ""


class ParsedText(msgspec.Struct, frozen=True):
    """The parsed parts of a piece of text: ordinary text, and parts of the function calls that follow the text."""

    text: str = ""
    calls: tuple[CallDelta, ...] = ()


class CallParser(Protocol):
    def feed(self, text: str) -> ParsedText:
        """Parse the next piece of an answer."""

    def end(self) -> ParsedText:
        """Return the parsed parts that remain after the last piece of an answer."""


class ToolFormat(msgspec.Struct, frozen=True):
    """The format in which a family of models writes function calls.

    begin: The mark before a call.
    end: The mark after a call; empty: no mark.
    is_bare: True if an answer that begins with JSON is also a call, provided that it names a function of the request.
    has_name_first: True if the name may precede the arguments, outside of JSON: `name[ARGS]{…}`.
    has_short_ids: True if the chat template only accepts call ids of nine letters and digits.
    is_xml: True if arguments are tags (`xml_calls.py`).
    templates: Texts that identify the format in a chat template.
    """

    begin: str = ""
    end: str = ""
    is_bare: bool = False
    has_name_first: bool = False
    has_short_ids: bool = False
    is_xml: bool = False
    templates: tuple[str, ...] = ()


FORMATS: Mapping[str, ToolFormat] = {
    "mistral": ToolFormat("[TOOL_CALLS]", has_name_first=True, has_short_ids=True, templates=("[TOOL_CALLS]",)),
    "qwen3_xml": ToolFormat(is_xml=True, templates=("<parameter=",)),
    "hermes": ToolFormat("<tool_call>", "</tool_call>", templates=("<tool_call>",)),
    "llama3_json": ToolFormat(
        "<|python_tag|>", is_bare=True, templates=("<|python_tag|>", '"parameters": dictionary of argument name')
    ),
    "json": ToolFormat(is_bare=True),
}
"""Tool-call formats by the names of vLLM's parsers, in order of detection. If no format is detected, `json` is used."""
PLAIN_FORMAT = "hermes"
"""The format that a system text explains to models whose chat template does not support tools."""


def detect_tool_call_format(template: str) -> str:
    shown = (name for name, each in FORMATS.items() if any(mark in template for mark in each.templates))
    return next(shown, "json")


_NAMES, _ARGUMENTS = ("name",), ("arguments", "parameters")
_KEYS = (*_NAMES, *_ARGUMENTS, "type", "id")
_NAME_FIRST = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*")
_LONGEST_NAME = 256
_SEPARATORS = ",;]"
"""Characters between and after the calls of one answer."""


class ToolCallParser:
    """Parses answers in one format.

    Args:
        format: The format of calls.
        names: The functions of the request.
        only_first: Ignore further calls (`parallel_tool_calls` is false).
    """

    def __init__(self, format: ToolFormat, names: Collection[str], *, only_first: bool = False) -> None:
        self._format = format
        self._names = names
        self._only_first = only_first
        self._step = self._in_text
        self._held = ""
        """Held-back text, which is ordinary text unless a call follows."""
        self._object = _CallObject()
        self._is_marked = False
        """True if a mark precedes the call."""
        self._is_named = False
        """True once the name of the call is known. Until then, the text may be ordinary text."""
        self._is_empty = True
        """True while the call has no arguments."""
        self._count = 0
        self._may_be_bare = format.is_bare
        self._text: list[str] = []
        self._calls: list[CallDelta] = []

    def feed(self, text: str) -> ParsedText:
        for character in text:
            self._step(character)
        return self._take()

    def end(self) -> ParsedText:
        if self._step == self._in_call and self._is_named:
            rest, _ = self._object.take_arguments(until="")
            self._add(CallDelta(self._count - 1, arguments=rest))
        elif self._step != self._read_character_after_call:
            self._text.append(self._held)
        self._held = ""
        return self._take()

    def _take(self) -> ParsedText:
        found = ParsedText("".join(self._text), _joined(self._calls))
        self._text.clear()
        self._calls.clear()
        return found

    def _in_text(self, character: str) -> None:
        self._held += character
        if self._may_be_bare and not self._held.isspace():
            self._may_be_bare = False
            if character in "{[":
                self._step = self._read_opening_character
                self._open_if_ready()
                return
        begin = self._format.begin
        if begin and self._held.endswith(begin):
            self._text.append(self._held.removesuffix(begin))
            self._begin_opening()
        elif not self._may_be_bare:
            kept = suffix_overlap_length(self._held, begin)
            self._text.append(self._held[: len(self._held) - kept])
            self._held = self._held[len(self._held) - kept :]

    def _begin_opening(self) -> None:
        self._held, self._is_marked, self._step = self._format.begin, True, self._read_opening_character

    def _read_opening_character(self, character: str) -> None:
        self._held += character
        self._open_if_ready()

    def _open_if_ready(self) -> None:
        """Begin a function call if the held text ends with the opening brace of the call's JSON object."""
        said = self._held.removeprefix(self._format.begin) if self._is_marked else self._held
        bare = "".join(said.split())
        if bare in ("{", "[{"):
            self._object = _CallObject()
            self._is_named, self._step = False, self._in_call
        elif bare in ("", "["):
            return
        elif not (self._is_marked and self._format.has_name_first) or len(said) > _LONGEST_NAME:
            self._flush()
        elif said.endswith("{"):
            if found := _NAME_FIRST.fullmatch(said[:-1]):
                self._object = _CallObject(is_arguments=True)
                self._step = self._in_call
                self._begin_call(found[1])
            else:
                self._flush()

    def _in_call(self, character: str) -> None:
        self._object.feed(character)
        if not self._is_named:
            self._held += character
            if self._object.name and (self._is_marked or self._object.name in self._names):
                self._begin_call(self._object.name)
            elif self._is_no_call():
                self._flush()
                return
        if self._is_named:
            self._take_arguments()

    def _is_no_call(self) -> bool:
        if self._object.name or self._object.is_closed:
            return True
        return _ends_with(self._held, self._format.end) if self._is_marked else self._object.is_other

    def _begin_call(self, name: str) -> None:
        self._held, self._is_named, self._is_empty = "", True, True
        self._count += 1
        self._add(CallDelta(self._count - 1, name))
        self._take_arguments()

    def _take_arguments(self) -> None:
        arguments, is_over = self._object.take_arguments(until=self._format.end)
        if arguments:
            self._is_empty = False
            self._add(CallDelta(self._count - 1, arguments=arguments))
        if is_over:
            self._held = self._format.end
        if is_over or self._object.is_closed:
            self._end_call()

    def _end_call(self) -> None:
        if self._is_empty:
            self._add(CallDelta(self._count - 1, arguments="{}"))
        self._step = self._read_character_after_call

    def _add(self, delta: CallDelta) -> None:
        if not delta.index or not self._only_first:
            self._calls.append(delta)

    def _read_character_after_call(self, character: str) -> None:
        self._held += character
        begin, end = self._format.begin, self._format.end
        said = self._held.strip()
        if end and said.startswith(end):
            self._held, said = said.removeprefix(end), said.removeprefix(end)
        rest = said.lstrip(_SEPARATORS).lstrip()
        if not rest or (end and end.startswith(said)):
            return
        if rest == "{":
            self._held, self._is_marked, self._step = rest, True, self._read_opening_character
            self._open_if_ready()
        elif begin and rest == begin:
            self._begin_opening()
        elif not (begin and begin.startswith(rest)):
            held, self._held, self._step = self._held, "", self._in_text
            for each in held:
                self._step(each)

    def _flush(self) -> None:
        """Release the held text as ordinary text. Parse the last character again, because it may begin a mark."""
        held, self._held, self._is_marked, self._step = self._held, "", False, self._in_text
        self._text.append(held[:-1])
        self._step(held[-1])


class NamedCallParser:
    """Parses answers that contain only the arguments of the requested function."""

    def __init__(self, name: str) -> None:
        self._name = name

    def feed(self, text: str) -> ParsedText:
        if not text:
            return ParsedText()
        name, self._name = self._name, ""
        return ParsedText(calls=(CallDelta(0, name, text),))

    def end(self) -> ParsedText:
        return ParsedText(calls=(CallDelta(0, self._name),)) if self._name else ParsedText()


class _CallObject:
    """Reads the JSON object of a function call after the opening brace, one character at a time.

    is_arguments: True if the object contains only the arguments, without the name of the function.
    """

    def __init__(self, *, is_arguments: bool = False) -> None:
        self.name = ""
        self.is_closed = False
        self.is_other = False
        """True if the object has a key that is invalid in a function call."""
        self._is_arguments = is_arguments
        self._key: str | None = None
        self._word = ""
        """The current key or value, unless the value is an object or array."""
        self._depth = 0
        self._is_quoted = False
        self._is_escaped = False
        self._arguments = "{" if is_arguments else ""
        """Arguments that `take_arguments` has not returned yet."""

    def feed(self, character: str) -> None:
        is_text = self._is_quoted
        if is_text:
            self._quoted(character)
        elif character == '"':
            self._is_quoted = True
        if self._is_arguments:
            self._arguments += character
            if not is_text and character in _BRACKETS:
                self._depth += _BRACKETS[character]
                self.is_closed = self._depth < 0
        elif self._depth:
            self._nested(character, is_text=is_text)
        elif is_text or character == '"':
            self._word += character
            if not self._is_quoted and self._key in _NAMES:
                self.name = self.name or _decode_json_string(self._word)
        else:
            self._between(character)

    def take_arguments(self, *, until: str) -> tuple[str, bool]:
        """Return the new arguments, and True if the mark `until` follows the arguments."""
        taken, mark, _ = self._arguments.partition(until) if until else (self._arguments, "", "")
        kept = 0 if mark else suffix_overlap_length(taken, until)
        self._arguments = taken[len(taken) - kept :]
        return taken[: len(taken) - kept], bool(mark)

    def _quoted(self, character: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == '"':
            self._is_quoted = False

    def _nested(self, character: str, *, is_text: bool) -> None:
        if self._key in _ARGUMENTS:
            self._arguments += character
        if not is_text:
            self._depth += _BRACKETS.get(character, 0)

    def _between(self, character: str) -> None:
        if character == ":" and self._key is None:
            self._key, self._word = _decode_json_string(self._word), ""
            self.is_other = self.is_other or self._key not in _KEYS
        elif character in "{[":
            self._depth = 1
            if self._key in _ARGUMENTS:
                self._arguments += character
        elif character in ",}":
            if self._key in _ARGUMENTS:
                self._arguments += _decode_json_string(self._word)
            self._key, self._word = None, ""
            self.is_closed = character == "}"
        elif not character.isspace():
            self._word += character


_BRACKETS = {"{": 1, "[": 1, "}": -1, "]": -1}


def _decode_json_string(word: str) -> str:
    """Return a JSON string as text, `null` as empty text, and other text unchanged."""
    try:
        found = msgspec.json.decode(word)
    except msgspec.DecodeError:
        return word
    return found if isinstance(found, str) else "" if found is None else word


def _ends_with(text: str, mark: str) -> bool:
    return bool(mark) and text.endswith(mark)


def suffix_overlap_length(text: str, mark: str) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `mark`."""
    longest = min(len(text), len(mark) - 1)
    return next((length for length in range(longest, 0, -1) if mark.startswith(text[-length:])), 0)


def _joined(deltas: list[CallDelta]) -> tuple[CallDelta, ...]:
    found: dict[int, CallDelta] = {}
    for delta in deltas:
        before = found.get(delta.index, CallDelta(delta.index))
        found[delta.index] = CallDelta(delta.index, before.name or delta.name, before.arguments + delta.arguments)
    return tuple(found.values())
