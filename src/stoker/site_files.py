"""The site files of a session: a site and those that it names, and a copy of each for the session's own processes."""

from __future__ import annotations

import enum
import json
import os
from collections.abc import Iterable
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import FieldInfo

from stoker.config import load_site, site_file
from stoker.errors import ConfigError
from stoker.site import Duration, Site, Size
from stoker.site_effects import without_effect
from stoker.working_folder import working_folder

PYTHON_PATH = "python-path"
"""Beside the copies: folders that pilots import from beyond their environment, as in PYTHONPATH."""


def load_sites(site: str | os.PathLike[str] | Site | None = None) -> tuple[Site, ...]:
    """A site and all that it names (`sites`), and those that these name; paths count from the file that has them.

    Raises ConfigError, also when two of them have one name.
    """
    found: dict[str, Site] = {}
    seen: set[Path] = set()
    todo: list[str | os.PathLike[str] | Site | None] = [site]
    while todo:
        given = todo.pop(0)
        base, file = working_folder(), None
        if isinstance(given, str | os.PathLike):
            file = site_file(given).resolve()
            if file in seen:
                continue
            seen.add(file)
            base = file.parent
        loaded = load_site(given)
        if loaded.name in found:
            raise ConfigError(f"two sites of the session are called {loaded.name}; rename one of them", key="name")
        found[loaded.name] = loaded
        others = [base / Path(other).expanduser() for other in loaded.sites]
        _refuse_repeated(loaded, others, file=file)
        todo += others
    return tuple(found.values())


def _refuse_repeated(site: Site, others: Iterable[Path], *, file: Path | None) -> None:
    """Raise ConfigError if a site names itself, or another one twice."""
    named: set[Path] = set()
    for written, other in zip(site.sites, others, strict=True):
        path = site_file(other).resolve()
        if path == file:
            raise ConfigError(f"{file}: sites names {written!r}, which is this very file; take it out", key="sites")
        if path in named:
            raise ConfigError(f"{file or site.name}: sites names {written!r} twice; take one out", key="sites")
        named.add(path)


def write_sites(folder: Path, sites: Iterable[Site], *, python_path: str = "") -> None:
    """Write the sites of a session into its folder of sites, one `NAME.toml` each."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for site in sites:
        (folder / f"{site.name}.toml").write_text(site_text(site), encoding="utf-8")
    (folder / PYTHON_PATH).write_text(python_path, encoding="utf-8", errors="surrogateescape")


def read_sites(folder: Path) -> dict[str, Site]:
    """The sites of a session, by name. Raises ConfigError."""
    sites = [load_site(file) for file in sorted(folder.glob("*.toml"))]
    return {site.name: site for site in sites}


def read_python_path(folder: Path) -> str:
    """Folders that pilots import from beyond their environment."""
    file = folder / PYTHON_PATH
    return file.read_text(encoding="utf-8", errors="surrogateescape") if file.exists() else ""


def site_text(site: Site) -> str:
    """A site as the text of a site file, without what has no effect, and without `sites`, which are files too."""
    lines, tables, vain = [], [], without_effect(site)
    for field in msgspec.structs.fields(site):
        value = getattr(site, field.name)
        if isinstance(value, msgspec.Struct):
            inner = msgspec.structs.fields(value)
            given = (
                (entry, getattr(value, entry.name))
                for entry in inner
                if (field.encode_name, entry.encode_name) not in vain
            )
            settings = [_setting(entry, said) for entry, said in given if said is not None]  # None: it is left out
            tables += ["", f"[{field.encode_name}]", *settings]
        elif field.name != "sites":
            lines.append(_setting(field, value))
    return "\n".join([*lines, *tables, ""])


def _setting(field: FieldInfo, value: Any) -> str:
    if field.type is Duration:  # without an exponent
        value = f"{Decimal(repr(float(value))):f} s"
    elif field.type is Size:
        value = f"{int(value)} B"
    return f"{field.encode_name} = {_value(value)}"


def _value(value: Any) -> str:
    match value:
        case enum.Enum():
            return _value(value.value)
        case str():  # what JSON escapes is escaped alike in TOML, which wants DEL escaped as well
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case tuple():
            return f"[{', '.join(map(_value, value))}]"
        case _:  # a number
            return json.dumps(value)
