"""Find the function calls in a model's text, piece by piece during generation.

Each family of models has a format for calls (`FORMATS`): marks around a JSON object with a name and arguments. A parser
holds back text that may begin a call. As in OpenAI's API, arguments are returned as the model wrote them, even if they
are not valid JSON.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Collection, Mapping

import msgspec


class CallDelta(msgspec.Struct, frozen=True):
    """A part of function call number `index`. Only the first part has a `name`; AnswerParser also gives this part an
    `id`.
    """

    index: int
    name: str = ""
    arguments: str = ""
    id: str = ""


class AnswerDelta(msgspec.Struct, frozen=True):
    """A piece of an answer, in this order: reasoning, text, and parts of function calls."""

    reasoning: str = ""
    text: str = ""
    calls: tuple[CallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.text or self.calls)


class ToolFormat(msgspec.Struct, frozen=True):
    """How a family of models writes function calls.

    `begin`, `end`: marks around a call (`end` may be empty); `is_bare`: JSON at the start of an answer is also a call
    if the JSON names a function of the request; `has_name_first`: the name may precede the arguments, `name[ARGS]{…}`;
    `has_short_ids`: ids of calls have nine letters and digits; `is_xml`: arguments are tags (`xml_calls.py`);
    `templates`: texts that identify the format in a chat template.
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
"""Formats by the names of vLLM's parsers, in the order in which they are tried. The default is `json`."""
PLAIN_FORMAT = "hermes"
"""The format that is explained to models whose chat template does not support tools."""


def detect_tool_call_format(template: str) -> str:
    shown = (name for name, each in FORMATS.items() if any(mark in template for mark in each.templates))
    return next(shown, "json")


_ARGUMENTS = ("arguments", "parameters")
_KEYS = (*_ARGUMENTS, "name", "type", "id")
_BRACKETS = {"{": 1, "[": 1, "}": -1, "]": -1}
_STRING = r'"(?:[^"\\]|\\.)*"'
_OPENING = re.compile(r"\s*\[?\s*\{")
_LONGEST_OPENING = 256
_NAMED_OPENING = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")
_CLOSING = re.compile(r"[\s,]*\}")
_FIELD = re.compile(rf'[\s,]*({_STRING}|[^\s"{{}}\[\]:,]+)\s*:\s*', re.DOTALL)
_SCALAR = re.compile(rf'({_STRING}|[^\s"{{}}\[\],][^"{{}}\[\],]*?(?=\s*[,}}]))\s*', re.DOTALL)
_SEPARATORS = ",;]" + string.whitespace
"""Characters between and after the calls of one answer."""


class HeldTextParser:
    """Collects the text and the calls that a parser finds. `only_first`: ignore further calls.

    `feed` parses the next piece of an answer. Each parser's `end` returns the parts that remain after the last piece.
    """

    _step: Callable[[], bool]
    """The current parsing step. It returns False if it needs more text."""

    def __init__(self, *, only_first: bool) -> None:
        self._only_first = only_first
        self._count = 0
        self._held = ""
        self._text: list[str] = []
        self._calls: dict[int, CallDelta] = {}

    def feed(self, text: str) -> AnswerDelta:
        self._held += text
        while self._step():
            pass
        return self._take_delta()

    def _take_delta(self) -> AnswerDelta:
        found = AnswerDelta("", "".join(self._text), tuple(self._calls.values()))
        self._text.clear()
        self._calls.clear()
        return found

    def _add_to_call(self, *, name: str = "", arguments: str = "") -> None:
        index = self._count - 1
        if not index or not self._only_first:
            before = self._calls.get(index, CallDelta(index))
            self._calls[index] = CallDelta(index, before.name or name, before.arguments + arguments)


class ToolCallParser(HeldTextParser):
    """Finds function calls of one format in an answer. `names`: functions of the request."""

    def __init__(self, format: ToolFormat, names: Collection[str], *, only_first: bool = False) -> None:
        super().__init__(only_first=only_first)
        self._format = format
        self._names = names
        self._may_be_bare = format.is_bare
        self._opened = ""
        self._begin_opening("", "")
        self._step = self._parse_text

    def end(self) -> AnswerDelta:
        if self._is_named:
            self._add_arguments(self._held if self._step == self._parse_value and self._key in _ARGUMENTS else "")
        elif self._step != self._parse_after_call:
            self._text.append(self._opened + self._held)
        self._held = ""
        return self._take_delta()

    def _consume(self, length: int) -> str:
        taken, self._held = self._held[:length], self._held[length:]
        if not self._is_named:
            self._opened += taken
        return taken

    def _parse_text(self) -> bool:
        held, begin = self._held, self._format.begin
        if self._may_be_bare:
            if not held.strip():
                return False
            self._may_be_bare = False
            if held.lstrip()[0] in "{[":
                return self._begin_opening("", held)
        if begin and begin in held:
            text, _, rest = held.partition(begin)
            self._text.append(text)
            return self._begin_opening(begin, rest)
        kept = suffix_overlap_length(held, begin)
        self._text.append(held[: len(held) - kept])
        self._held = held[len(held) - kept :]
        return False

    def _begin_opening(self, mark: str, rest: str, *, is_marked: bool = False) -> bool:
        self._held, self._step = rest, self._parse_opening
        self._opened = mark
        """Text that may begin a call. It is returned as ordinary text if no call follows."""
        self._is_marked = is_marked or bool(mark)
        self._key = self._arguments = ""
        """`_key`: key of the current value; `_arguments`: arguments that precede the function's name."""
        self._depth = self._scanned = 0
        self._is_named = self._is_quoted = self._is_escaped = self._has_arguments = self._is_named_first = False
        return True

    def _parse_opening(self) -> bool:
        has_name_first = self._is_marked and self._format.has_name_first
        if found := _OPENING.match(self._held):
            self._consume(found.end())
            self._step = self._parse_call
        elif has_name_first and (found := _NAMED_OPENING.match(self._held)):
            self._consume(found.end())
            self._key, self._step, self._is_named_first = _ARGUMENTS[0], self._parse_value, True
            self._begin_call(found[1])
        elif self._held.strip() in ("", "[") or (
            has_name_first and "{" not in self._held and len(self._held) <= _LONGEST_OPENING
        ):
            return False
        else:
            self._end_as_text()
        return True

    def _parse_call(self) -> bool:
        """Parse the next key or value of the call's object."""
        self._consume(len(self._held) - len(self._held.lstrip()))
        mark = self._format.end
        until = self._held.find(mark) if mark else -1
        until = len(self._held) if until < 0 else until
        if not self._key:
            if found := _CLOSING.match(self._held, 0, until):
                self._consume(found.end())
                return self._end_call()
            if found := _FIELD.match(self._held, 0, until):
                self._consume(found.end())
                self._key = _decode_json_string(found[1])
                if not (self._is_marked or self._is_named or self._key in _KEYS):
                    self._end_as_text()
                return True
        elif self._held[:1] in ("{", "["):
            self._step = self._parse_value
            return True
        elif found := _SCALAR.match(self._held, 0, until):
            self._consume(found.end())
            key, value, self._key = self._key, _decode_json_string(found[1]), ""
            if key in _ARGUMENTS:
                self._add_arguments(value)
            elif key == "name" and not self._is_named:
                if not self._is_marked and value not in self._names:
                    return self._end_as_text()
                self._begin_call(value)
            return True
        if until < len(self._held):
            if self._key in _ARGUMENTS:
                self._add_arguments(self._held[:until])
            self._consume(until)
            return self._end_call()
        return False

    def _parse_value(self) -> bool:
        """Read an object or a list, and stream the arguments. The end mark ends a call even inside a value."""
        mark, held, stop = self._format.end, self._held, len(self._held)
        for position in range(self._scanned, stop):
            character = held[position]
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_quoted:
                self._is_escaped, self._is_quoted = character == "\\", character != '"'
            elif character == '"':
                self._is_quoted = True
            elif character in _BRACKETS:
                self._depth += _BRACKETS[character]
                if not self._depth:
                    stop = position + 1
                    break
        self._scanned = stop
        marked_at = held.find(mark, 0, stop) if mark else -1
        if marked_at >= 0:
            stop = marked_at
        elif self._depth:
            stop -= suffix_overlap_length(held, mark)
        taken = self._consume(stop)
        self._scanned -= stop
        if self._key in _ARGUMENTS:
            self._add_arguments(taken)
        if marked_at >= 0 or (self._is_named_first and not self._depth):
            return self._end_call()
        if self._depth:
            return False
        self._key, self._scanned, self._step = "", 0, self._parse_call
        return True

    def _begin_call(self, name: str) -> None:
        self._is_named, self._opened = True, ""
        self._count += 1
        self._add_to_call(name=name)
        self._add_arguments(self._arguments)

    def _add_arguments(self, arguments: str) -> None:
        if not self._is_named:
            self._arguments += arguments
        elif arguments:
            self._has_arguments = True
            self._add_to_call(arguments=arguments)

    def _end_call(self) -> bool:
        if not self._is_named:
            return self._end_as_text()
        if not self._has_arguments:
            self._add_arguments("{}")
        self._is_named, self._step = False, self._parse_after_call
        return True

    def _end_as_text(self) -> bool:
        """Treat the opening mark as text, because no call follows, and parse the rest as text."""
        self._held, self._step = self._opened + self._held, self._parse_text
        kept = len(self._format.begin) if self._held.startswith(self._format.begin) else 0
        self._text.append(self._held[:kept])
        self._held = self._held[kept:]
        self._opened = ""
        return True

    def _parse_after_call(self) -> bool:
        begin, end, rest = self._format.begin, self._format.end, self._held
        if end:
            if end.startswith(rest.lstrip()):
                return False
            if rest.lstrip().startswith(end):
                rest = rest.lstrip().removeprefix(end)
        after = rest.lstrip(_SEPARATORS)
        if after.startswith("{"):
            return self._begin_opening("", after, is_marked=True)
        if begin and after.startswith(begin):
            return self._begin_opening(begin, after.removeprefix(begin))
        if begin.startswith(after):
            self._held = rest
            return False
        self._held, self._step = rest, self._parse_text
        return True


class NamedCallParser:
    """Parses an answer that contains only the arguments of the requested function."""

    def __init__(self, name: str) -> None:
        self._name = name

    def feed(self, text: str) -> AnswerDelta:
        if not text:
            return AnswerDelta()
        name, self._name = self._name, ""
        return AnswerDelta(calls=(CallDelta(0, name, text),))

    def end(self) -> AnswerDelta:
        return AnswerDelta(calls=(CallDelta(0, self._name),)) if self._name else AnswerDelta()


def _decode_json_string(word: str) -> str:
    """Return a JSON string as text, `null` as empty text, and other text unchanged."""
    try:
        found = msgspec.json.decode(word)
    except msgspec.DecodeError:
        return word
    return found if isinstance(found, str) else "" if found is None else word


def suffix_overlap_length(text: str, mark: str) -> int:
    """Return how many characters at the end of `text` may be the beginning of `mark`."""
    longest = min(len(text), len(mark) - 1)
    return next((length for length in range(longest, 0, -1) if mark.startswith(text[-length:])), 0)
