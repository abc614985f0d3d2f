"""What may stand where in a TOML file: the structs that it is read into, asked by path.

A path is of names, as in the file; in a list of tables the place counts, from 0. Structs may stand in one another, in
lists and in tables by name, and be one of several that a tag tells apart.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec

from stoker.config_lines import Path

Read = Callable[[type, Any], Any]
"""A `dec_hook` of msgspec's: reads what TOML has no type for."""


class SettingPlace(typing.NamedTuple):
    """What stands at a path: `path` is complete, `shown` has a list's tables by name, `kind` is the type that is meant
    (None: there can be nothing)."""

    path: Path
    shown: Path
    kind: Any


def is_struct(kind: Any) -> bool:
    """Whether it is a type of structs."""
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def setting_at(root: type[msgspec.Struct], parts: Path, *, data: Any, read: Read | None) -> SettingPlace:
    """What stands at a path that msgspec has told. Of a table of tables it does not say which (`...`): the first one
    in `data` that cannot be read."""
    kind: Any = root
    path: Path = ()
    shown: Path = ()
    for part in parts:
        kind = meant(kind, data)
        inner = _fields(kind).get(part) if is_struct(kind) else _element(kind)
        if part == "..." and isinstance(data, dict):
            part = next((name for name, value in data.items() if not _reads(value, inner, read)), part)
        data = _inside(data, part)
        path = (*path, part)
        named = isinstance(data, dict) and part.isdigit() and isinstance(data.get("name"), str)
        shown = (*shown, data["name"] if named else part)
        kind = inner
    return SettingPlace(path, shown, meant(kind, data))


def settings(kind: Any) -> list[str]:
    """What a table may have; none for what is no table."""
    tag = kind.__struct_config__.tag_field if is_struct(kind) else None
    return [*([tag] if tag else []), *_fields(kind)]


def tags(kind: Any) -> dict[str, type[msgspec.Struct]]:
    """The structs of a union, by the value that tells them apart."""
    return {str(each.__struct_config__.tag): each for each in _structs(kind) if each.__struct_config__.tag is not None}


def tag_field(kind: Any) -> str:
    """The setting that tells the structs of a union apart."""
    return next((each.__struct_config__.tag_field or "" for each in _structs(kind)), "")


def tables(kind: Any, *, at: str = "") -> Iterator[tuple[str, list[str]]]:
    """Every table that there may be, as its header reads (empty: the top of the file), and its settings."""
    for struct in _structs(kind):
        yield at, settings(struct)
        for name, inner in _fields(struct).items():
            below = f"{at}.{name}" if at else name
            if get_origin(_bare(inner)) is dict:
                below += ".NAME"
            element = _element(inner)
            yield from tables(element if element is not None else inner, at=below)


def meant(kind: Any, data: Any) -> Any:
    """Of a union of structs the one that the tag in `data` says; anything else as it is."""
    kind = _bare(kind)
    structs = tags(kind)
    if len(structs) > 1 and isinstance(data, dict):
        return structs.get(str(data.get(tag_field(kind))), kind)
    return kind


def _structs(kind: Any) -> list[type[msgspec.Struct]]:
    kind = _bare(kind)
    members = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    return [_bare(member) for member in members if is_struct(_bare(member))]


def _bare(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _element(kind: Any) -> Any:
    """The type of what stands in a list, or in a table of tables."""
    kind = _bare(kind)
    inside = get_args(kind)
    if get_origin(kind) is dict:
        return inside[1]
    return inside[0] if get_origin(kind) in (tuple, list) and inside else None


def _fields(kind: Any) -> dict[str, Any]:
    if not is_struct(kind):
        return {}
    hints = typing.get_type_hints(kind, include_extras=True)
    return {field.encode_name: hints[field.name] for field in msgspec.structs.fields(kind)}


def _inside(data: Any, part: str) -> Any:
    if isinstance(data, dict):
        return data.get(part)
    if isinstance(data, list | tuple) and part.isdigit() and int(part) < len(data):
        return data[int(part)]
    return None


def _reads(value: Any, kind: Any, read: Read | None) -> bool:
    try:
        msgspec.convert(value, type=kind, dec_hook=read)
    except msgspec.ValidationError:
        return False
    return True
