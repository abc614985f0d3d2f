"""One-line errors for TOML files: file, line, setting, problem and the nearest valid setting.

msgspec reports the path of a fault (`$.pilot.memory`), but no line; `find_setting_line` finds the line.
"""

from __future__ import annotations

import bisect
import difflib
import enum
import functools
import re
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import msgspec

from stoker.errors import ConfigError

T = TypeVar("T", bound=msgspec.Struct)
KeyPath = tuple[str, ...]

_STATEMENT = re.compile(r"""\s*(\[|("[^"]*"|'[^']*'|[\w-]+)\s*[.=])""")
"""Pattern of the start of a table or a setting. A line inside a multi-line value may match, too."""


def find_setting_line(path: KeyPath, text: str) -> int:
    """Return the line number (from 1) of a setting, or, if missing, of its table. `text` must be valid TOML."""
    lines = text.split("\n")
    starts = [number for number, line in enumerate(lines) if _STATEMENT.match(line)]

    def parse(count: int) -> dict[str, Any] | None:
        try:
            return tomllib.loads("\n".join(lines[:count]))
        except tomllib.TOMLDecodeError:  # the last of these lines is inside a multi-line value
            return None

    def has(number: int, end: int) -> bool:
        """Return True if the statements up to statement `number` set a value at `path[:end]`."""
        values = parse([*starts[1:], len(lines)][number])
        if values is None:
            return number > 0 and has(number - 1, end)
        return functools.reduce(_value_at_key, path[:end], values) is not None

    for end in range(len(path), 0, -1):
        number = bisect.bisect_left(range(len(starts)), True, key=lambda number: has(number, end))
        if number < len(starts):
            return 1 + next(start for start in reversed(starts[: number + 1]) if parse(start) is not None)
    return 1


# ---- the settings that structs allow


ReadUnit = Callable[[type, Any], Any]
"""A `dec_hook` for msgspec, which converts a value to a type."""


class SettingPlace(typing.NamedTuple):
    """A setting. `shown`: path of the setting, with names instead of indices. `kind`: type of the setting, or None."""

    path: KeyPath
    shown: KeyPath
    kind: Any


def is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def find_setting_at_path(
    root: type[msgspec.Struct], parts: KeyPath, *, data: Any, read: ReadUnit | None
) -> SettingPlace:
    """Return the setting at a path that msgspec reported. In such a path, `...` means the first invalid table in
    `data`."""
    kind: Any = root
    path: KeyPath = ()
    shown: KeyPath = ()
    for part in parts:
        kind = resolve_tagged_union(kind, data)
        inner = _field_types(kind).get(part) if is_struct(kind) else _container_element_type(kind)
        if part == "..." and isinstance(data, dict):
            part = next((name for name, value in data.items() if not _is_valid_value(value, inner, read)), part)
        data = _value_at_key(data, part)
        path = (*path, part)
        named = isinstance(data, dict) and part.isdigit() and isinstance(data.get("name"), str)
        shown = (*shown, data["name"] if named else part)
        kind = inner
    return SettingPlace(path, shown, resolve_tagged_union(kind, data))


def setting_names(kind: Any) -> list[str]:
    tag = kind.__struct_config__.tag_field if is_struct(kind) else None
    return [*([tag] if tag else []), *_field_types(kind)]


def structs_by_tag(kind: Any) -> dict[str, type[msgspec.Struct]]:
    return {
        str(each.__struct_config__.tag): each
        for each in _struct_types_in(kind)
        if each.__struct_config__.tag is not None
    }


def tag_field(kind: Any) -> str:
    return next((each.__struct_config__.tag_field or "" for each in _struct_types_in(kind)), "")


def iter_table_settings(kind: Any, *, at: str = "") -> Iterator[tuple[str, list[str]]]:
    """Yield the header and the setting names of each table that the struct allows. The header of the top level is
    empty.
    """
    for struct in _struct_types_in(kind):
        yield at, setting_names(struct)
        for name, inner in _field_types(struct).items():
            below = f"{at}.{name}" if at else name
            if get_origin(_strip_annotated(inner)) is dict:
                below += ".NAME"
            element = _container_element_type(inner)
            yield from iter_table_settings(element if element is not None else inner, at=below)


def resolve_tagged_union(kind: Any, data: Any) -> Any:
    """Return the union member that the tag in `data` selects. If `kind` is not a tagged union, return it unchanged."""
    kind = _strip_annotated(kind)
    structs = structs_by_tag(kind)
    if len(structs) > 1 and isinstance(data, dict):
        return structs.get(str(data.get(tag_field(kind))), kind)
    return kind


def _struct_types_in(kind: Any) -> list[type[msgspec.Struct]]:
    kind = _strip_annotated(kind)
    members = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    return [_strip_annotated(member) for member in members if is_struct(_strip_annotated(member))]


def _strip_annotated(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _container_element_type(kind: Any) -> Any:
    kind = _strip_annotated(kind)
    inside = get_args(kind)
    if get_origin(kind) is dict:
        return inside[1]
    return inside[0] if get_origin(kind) in (tuple, list) and inside else None


def _field_types(kind: Any) -> dict[str, Any]:
    if not is_struct(kind):
        return {}
    hints = typing.get_type_hints(kind, include_extras=True)
    return {field.encode_name: hints[field.name] for field in msgspec.structs.fields(kind)}


def _value_at_key(data: Any, part: str) -> Any:
    if isinstance(data, dict):
        return data.get(part)
    if isinstance(data, list | tuple) and part.isdigit() and int(part) < len(data):
        return data[int(part)]
    return None


def _is_valid_value(value: Any, kind: Any, read: ReadUnit | None) -> bool:
    try:
        msgspec.convert(value, type=kind, dec_hook=read)
    except msgspec.ValidationError:
        return False
    return True


# ---- errors in words


def parse_toml(text: str, *, file: str) -> dict[str, Any]:
    """Return the values of TOML text by key.

    Args:
        text: TOML.
        file: Name of the file, for errors.

    Raises:
        ConfigError: The text is not TOML. The error has the line.
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"\(at line (\d+)", str(error))
        line = int(found[1]) if found else text.count("\n") + 1
        problem = re.sub(r" \(at .*\)$", "", str(error))
        problem = next((words for begins, words in _TOML_EXPLANATIONS.items() if problem.startswith(begins)), problem)
        raise ConfigError.in_file(file, f"not TOML: {problem}", line=line) from None
    except RecursionError:
        raise ConfigError.in_file(file, "not TOML: its lists or tables are nested too deep") from None
    except ValueError as error:  # Python refuses a number with thousands of digits
        raise ConfigError.in_file(file, f"not TOML: {error}") from None


_TOML_EXPLANATIONS = {
    "Illegal character '\\n'": "a closing quote is missing",
    "Unterminated string": "a closing quote is missing",
    'Expected "\'"': "a closing quote is missing",
    "Unescaped '\\' in a string": "write a backslash in quotes twice, or the text in single quotes",
    "Invalid value": 'a value is missing or wrong; write text in quotes, as in name = "lab"',
    "Invalid statement": "write a setting as name = value, and a table as [name] on its own line",
    "Expected '=' after a key": "write a setting as name = value, and a table as [name] on its own line",
    "Expected newline or end of document": "a value is followed by more text; a comment begins with #",
    "Expected ']' at the end of a table": "the closing ] of a table is missing",
    "Unclosed array": "the closing ] of a list is missing",
    "Unclosed inline table": "the closing } of a table is missing",
    "Cannot overwrite a value": "this setting is written twice",
    "Cannot declare": "this table is written twice",
}
"""Explanation for users, by the start of tomllib's error message."""


def read_toml(
    text: str, shape: type[T], *, file: str, shapes: dict[str, str], read: ReadUnit, data: dict[str, Any]
) -> T:
    """Convert parsed TOML to a struct. Raises ConfigError."""
    try:
        return msgspec.convert(data, type=shape, dec_hook=read)
    except msgspec.ValidationError as error:
        problem, path, key = explain_msgspec_error(str(error), root=shape, shapes=shapes, data=data, read=read)
        raise ConfigError.in_file(file, problem, line=find_setting_line(path, text), key=key) from None
    except (RecursionError, OverflowError, ValueError) as error:
        raise ConfigError.in_file(file, f"cannot be read: {error}") from None


def explain_msgspec_error(
    fault: str, *, root: type[msgspec.Struct], shapes: dict[str, str], data: Any = None,
    read: ReadUnit | None = None,
) -> tuple[str, KeyPath, str]:  # fmt: skip
    """Explain `fault`, an error message of msgspec. Return the explanation, the path of the setting (or of its table),
    and the setting's name. `shapes`: description of the valid values of each setting that has a pattern.
    """
    problem, _, where = fault.partition(" - at `$")
    parts = tuple(name or number for name, number in _STEP.findall(where.rstrip("`")))
    place = find_setting_at_path(root, parts, data=data, read=read)
    depth, key, words = _explain_setting_fault(problem, place, root, shapes, data=data, read=read)
    path = (*place.path[:depth], key.partition("[")[0])
    table = ".".join(place.shown[:depth])
    return f"[{table}] {words}" if table else words, path, key


_STEP = re.compile(r"\.([^.\[]+)|\[([^\]]*)\]")


def _explain_setting_fault(
    problem: str, place: SettingPlace, root: type[msgspec.Struct], shapes: dict[str, str], *, data: Any,
    read: ReadUnit | None,
) -> tuple[int, str, str]:  # fmt: skip
    """Return the depth of the table's path, the setting's name, and the explanation."""
    parts, kind = place.path, place.kind
    whole = len(parts)
    if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", problem):
        return (whole, unknown[1], f"{unknown[1]} is not a setting; {_suggest_setting(root, kind, unknown[1])}")
    if missing := re.fullmatch(r"Object missing required field `(.*)`", problem):
        choices = f"; {_describe_choices(structs_by_tag(kind), '')}" if missing[1] == tag_field(kind) else ""
        return (whole, missing[1], f"{missing[1]} is missing{choices}")
    if is_struct(kind) and not problem.startswith("Expected `object`"):
        # The struct's own check failed. Its message begins with the name of a setting.
        return (whole, re.split(r"[ :]", problem, maxsplit=1)[0], problem)
    last = max((number for number, part in enumerate(parts) if not part.isdigit()), default=0)
    key = parts[last] + "".join(f"[{part}]" for part in parts[last + 1 :]) if parts else ""
    if is_struct(kind) and last == whole - 1:
        return (last, key, f"{key} is a table: write [{key}] on its own line, and its settings below")
    if invalid := re.match(r"Invalid (?:enum )?value (.*)$", problem):
        above = find_setting_at_path(root, parts[:-1], data=data, read=read).kind
        known = _enum_values(kind) or structs_by_tag(above)
        return (last, key, f"{key} = {invalid[1]} is not available; {_describe_choices(known, invalid[1])}")
    if "matching regex" in problem and key in shapes:
        return (last, key, f"{key}: {shapes[key]}")
    if wanted := re.match(r"Expected `(.*?)`( [<>]=? \S+)?(?:, got `(.*)`)?$", problem):
        got = f", not {_TYPES.get(wanted[3], wanted[3])}" if wanted[3] else ""
        bound = wanted[2].replace(">=", "of at least").replace("<=", "of at most") if wanted[2] else ""
        types = " or ".join(_TYPES.get(each, each) for each in wanted[1].split(" | ") if each != "null")
        return (last, key, f"{key} must be {types}{bound}{got}")
    return (last, key, f"{key}: {problem}")


_TYPES = {
    "int": "a whole number", "str": "text in quotes", "float": "a number", "bool": "true or false",
    "array": "a list", "object": "a table",
}  # fmt: skip


def _enum_values(kind: Any) -> list[str]:
    kinds = (kind, *typing.get_args(kind))
    return [
        str(value.value) for each in kinds if isinstance(each, type) and issubclass(each, enum.Enum) for value in each
    ]


def suggest_similar_name(name: str, known: Iterable[str], *, cutoff: float = 0.6, otherwise: str | None = None) -> str:
    """Return a hint: the most similar name (`did you mean plain?`), or else `otherwise` (default: a list of the known
    names).
    """
    names = list(known)
    if close := difflib.get_close_matches(name, names, n=1, cutoff=cutoff):
        return f"did you mean {close[0]}?"
    return f"there are {', '.join(names)}" if otherwise is None else otherwise


def _suggest_setting(root: type[msgspec.Struct], table: Any, key: str) -> str:
    here = setting_names(table)
    if hint := suggest_similar_name(key, here, otherwise=""):
        return hint
    for other, there in iter_table_settings(root):
        close = difflib.get_close_matches(key, there, n=1, cutoff=0.75)
        if close and there != here:
            return f"did you mean {close[0]} {f'in [{other}]' if other else 'at the top of the file'}?"
    return f"there are {', '.join(here or setting_names(root))}"


def _describe_choices(known: Iterable[str], value: str) -> str:
    names = list(known)
    if close := difflib.get_close_matches(value.strip("'"), names, n=1, cutoff=0.6):
        return f"did you mean {close[0]!r}?"
    return f"there {'is' if len(names) == 1 else 'are'} {', '.join(map(repr, names))}"
