"""Site files: what Stoker should know of the machines that it runs on. One TOML file a site.

    name = "lab"                  what `status` calls it
    engine = "stoker"

    [provider]
    kind = "local"                pilots start on this machine

    [pilot]
    devices = "auto"              "auto": every GPU that is granted, else one CPU device a core; "gpu", "cpu", "cpu:4"
    memory = "0"                  host memory that its libraries may promise; 0: nine tenths of what the machine has
    cache_size = "20 GB"          bound of the object cache on the pilot's disk
    scratch = ""                  folder for that cache and for calls; empty: the system's temporary folder
    init_blocks = 1               pilots to start at once, and how few and how many there may be
    min_blocks = 0
    max_blocks = 1

    [session]
    heartbeat = "5 s"             a pilot that is silent for three of these is lost
    lease = "60 s"                a pilot whose manager is gone for this long ends itself

    [policy]
    dispatch = "default"          who decides at each of the manager's seams
    residency = "default"
    provisioning = "default"

Every setting may be left out. A file is checked as a whole when it is read; an error is one line that names the file,
the line, the setting and the nearest valid one (`_explain`): msgspec finds the fault, `_lines` finds where it stands.
"""

from __future__ import annotations

import difflib
import enum
import os
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any

import msgspec

from stoker.errors import ConfigError, UnitError
from stoker.units import parse_bytes, parse_seconds


class Size(int):
    """Bytes; in a site file a number with a unit, `"4 GB"`."""


class Duration(float):
    """Seconds; in a site file a number with a unit, `"90 s"`."""


class Engine(enum.Enum):
    """What carries the calls."""

    STOKER = "stoker"
    """The manager and the pilots of this package."""


class ProviderKind(enum.Enum):
    """What starts pilots."""

    LOCAL = "local"
    """This machine: a pilot is a process here."""


class PolicyName(enum.Enum):
    """Policies that ship with Stoker."""

    DEFAULT = "default"
    """Context affinity: Pervasive Context Management, with load times that were measured."""


Count = Annotated[int, msgspec.Meta(ge=0, le=10_000)]
Devices = Annotated[str, msgspec.Meta(pattern=r"^(auto|gpu|cpu|cpu:[1-9][0-9]{0,3})$")]
Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,39}$")]


class Provider(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where pilots come from."""

    kind: ProviderKind = ProviderKind.LOCAL


class Pilot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a pilot takes of its node, and how many pilots there are. Sizes in bytes; 0 = what the node has."""

    devices: Devices = "auto"
    memory_bytes: Size = msgspec.field(default=Size(0), name="memory")
    cache_bytes: Size = msgspec.field(default=Size(20_000_000_000), name="cache_size")
    scratch: str = ""
    init_blocks: Count = 1
    min_blocks: Count = 0
    max_blocks: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 1

    def __post_init__(self) -> None:
        if self.min_blocks > self.max_blocks:
            raise ValueError(f"min_blocks = {self.min_blocks} is more than max_blocks = {self.max_blocks}")
        if self.init_blocks > self.max_blocks:
            raise ValueError(f"init_blocks = {self.init_blocks} is more than max_blocks = {self.max_blocks}")
        if self.init_blocks < self.min_blocks:
            raise ValueError(f"init_blocks = {self.init_blocks} is less than min_blocks = {self.min_blocks}")
        if self.scratch and not os.path.isabs(os.path.expanduser(self.scratch)):
            raise ValueError(f"scratch = {self.scratch!r} must be an absolute path, or start with ~")


class Session(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long silence lasts before somebody counts as gone. Seconds."""

    heartbeat_s: Duration = msgspec.field(default=Duration(5.0), name="heartbeat")
    lease_s: Duration = msgspec.field(default=Duration(60.0), name="lease")

    def __post_init__(self) -> None:
        if not 0.1 <= self.heartbeat_s <= 3600:
            raise ValueError("heartbeat must be between 0.1 s and 1 h")
        if self.lease_s < 2 * self.heartbeat_s:
            raise ValueError(
                f"lease = {self.lease_s:g} s must be at least two heartbeats ({self.heartbeat_s:g} s each)"
            )


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which policy decides at each seam."""

    dispatch: PolicyName = PolicyName.DEFAULT
    residency: PolicyName = PolicyName.DEFAULT
    provisioning: PolicyName = PolicyName.DEFAULT


class Site(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A site file that was read and found right."""

    name: Name = "local"
    engine: Engine = Engine.STOKER
    provider: Provider = Provider()
    pilot: Pilot = Pilot()
    session: Session = Session()
    policy: Policy = Policy()

    @staticmethod
    def default() -> Site:
        """This machine: one pilot, all its devices."""
        return Site()


def load_site(site: str | os.PathLike[str] | Site | None = None) -> Site:
    """The site that is meant: None is this machine, a path is read and checked, a Site is given back.

    Raises ConfigError with facts `file`, `line` and `key`, where known.
    """
    if site is None:
        return Site.default()
    if isinstance(site, Site):
        return site
    path = Path(site).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file{_near_file(path)}", file=str(path)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}", file=str(path)) from None
    return parse_site(text, file=str(path))


def parse_site(text: str, *, file: str) -> Site:
    """The site that `text` describes; `file` is what an error calls it. Raises ConfigError."""
    try:
        return msgspec.convert(tomllib.loads(text), type=Site, dec_hook=_read_unit)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"\(at line (\d+), column (\d+)\)", str(error))
        line = int(found[1]) if found else text.count("\n") + 1
        problem = re.sub(r" \(at .*\)$", "", str(error))
        raise ConfigError(f"{file}: line {line}: not TOML: {problem}", file=file, line=line) from None
    except msgspec.ValidationError as error:
        table, key, problem = _explain(str(error))
        lines = _lines(text)
        line = lines.get((*table, key)) or lines.get(table) or 1
        place = f"[{'.'.join(table)}] " if table else ""
        raise ConfigError(f"{file}: line {line}: {place}{problem}", file=file, line=line, key=key) from None


def _read_unit(kind: type, value: Any) -> Any:
    if kind is Size:
        return Size(parse_bytes(_plain(value, 'a size, as in "4 GB"')))
    return Duration(parse_seconds(_plain(value, 'a duration, as in "90 s"')))


def _plain(value: Any, what: str) -> str | int | float:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UnitError(f"{value!r} is not {what}")
    return value


# ---- an error in words


def _explain(fault: str) -> tuple[tuple[str, ...], str, str]:
    """The table, the setting and the problem, from what msgspec says: `... - at `$.provider.kind``."""
    problem, _, path = fault.partition(" - at `$")
    parts = tuple(part for part in path.rstrip("`").split(".") if part)
    unknown = re.search(r"unknown field `(.*)`", problem)
    if unknown:
        return parts, unknown[1], f"{unknown[1]} is not a setting; {_nearest(parts, unknown[1])}"
    table, key = (parts[:-1], parts[-1]) if parts else ((), "")
    if parts and (len(parts) == 1 and parts[0] in _tables() and not problem.startswith("Expected")):
        table, key = parts, problem.partition(" ")[0]  # a check of several settings: its message begins with one
        return table, key, problem
    invalid = re.search(r"Invalid enum value '?(.*?)'?$", problem)
    if invalid:
        return table, key, f"{key} = {invalid[1]!r}: {_choices(table, key, invalid[1])}"
    if "pattern" in problem:
        shapes = {
            "devices": 'write "auto", "gpu", "cpu", or "cpu:N" with N at least 1',
            "name": "letters, digits, . _ -",
        }
        return table, key, f"{key} is not well formed: {shapes.get(key, problem)}"
    wanted = re.match(r"Expected `(.*?)`( [<>]=? .*)?(?:, got `(.*)`)?$", problem)
    if wanted:
        if key in _tables() and not table:
            return table, key, f"{key} is a table: write [{key}] on a line of its own, and its settings below"
        got = f", not {_TYPES.get(wanted[3], wanted[3])}" if wanted[3] else ""
        return table, key, f"{key} must be {_TYPES.get(wanted[1], wanted[1])}{wanted[2] or ''}{got}"
    return table, key, f"{key}: {problem}"


_TYPES = {"int": "a whole number", "str": 'text in quotes', "float": "a number", "bool": "true or false",
          "array": "a list", "object": "a table"}  # fmt: skip


def _tables() -> dict[str, type[msgspec.Struct]]:
    return {"provider": Provider, "pilot": Pilot, "session": Session, "policy": Policy}


def _settings(table: tuple[str, ...]) -> list[str]:
    kind = _tables().get(table[0]) if table else Site
    return [field.encode_name for field in msgspec.structs.fields(kind)] if kind else []


def _nearest(table: tuple[str, ...], key: str) -> str:
    """What may have been meant: a setting of this table, the same one of another, or all that there are."""
    close = difflib.get_close_matches(key, _settings(table), n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]}?"
    for other in (*(name for name in _tables()), ""):
        where = (other,) if other else ()
        close = difflib.get_close_matches(key, _settings(where), n=1, cutoff=0.75)
        if close and where != table:
            return (
                f"did you mean {close[0]} in [{other}]?"
                if other
                else f"did you mean {close[0]} at the top of the file?"
            )
    return f"there are {', '.join(_settings(table))}"


def _choices(table: tuple[str, ...], key: str, value: str) -> str:
    kind: type[enum.Enum] = {"engine": Engine, "kind": ProviderKind}.get(key, PolicyName)
    names = [str(member.value) for member in kind]
    close = difflib.get_close_matches(value, names, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else f"this release has {', '.join(names)}"


def _near_file(path: Path) -> str:
    """A file of nearly this name beside it, or the site files of that folder."""
    folder = path.parent
    here = sorted(file.name for file in folder.glob("*.toml")) if folder.is_dir() else []
    if not folder.is_dir():
        return f" (there is no folder {folder})"
    close = difflib.get_close_matches(path.name, here, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {folder / close[0]}?"
    return f"; {folder} has {', '.join(here)}" if here else ""


_HEADER = re.compile(r"\s*\[\[?\s*([^\]]+?)\s*\]\]?\s*(#.*)?$")
_KEY = re.compile(r"\s*([A-Za-z0-9_\-.\"' ]+?)\s*=")
_STRING = re.compile(r'"""|\'\'\'|"(?:\\.|[^"\\])*"|\'[^\']*\'|#.*|[\[\]{}]')


def _lines(text: str) -> dict[tuple[str, ...], int]:
    """Where each table and setting stands: its path to its line number, from 1.

    The text is known to be TOML, so a look at line beginnings is enough, as long as lines inside of multi-line
    strings and arrays are skipped. The keys of an inline table stand on its line.
    """
    found: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    until, depth = "", 0
    for number, line in enumerate(text.splitlines(), start=1):
        if not until and depth == 0:
            header, key = _HEADER.match(line), _KEY.match(line)
            if header:
                table = _path(header[1])
                found.setdefault(table, number)
            elif key:
                path = (*table, *_path(key[1]))
                for end in range(len(table) + 1, len(path) + 1):
                    found.setdefault(path[:end], number)
                for inner in re.findall(r"[{,]\s*([A-Za-z0-9_-]+)\s*=", line[key.end() :]):
                    found.setdefault((*path, inner), number)
        until, depth = _open(line, until=until, depth=depth)
    return found


def _path(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))


def _open(line: str, *, until: str, depth: int) -> tuple[str, int]:
    """Whether this line leaves a multi-line string (its quotes) or brackets (how many) open."""
    position = 0
    while True:
        if until:
            end = line.find(until, position)
            if end < 0:
                return until, depth
            position, until = end + 3, ""
        mark = _STRING.search(line, position)
        if not mark:
            return "", depth
        position = mark.end()
        token = mark[0]
        if token in ('"""', "'''"):
            until = token
        elif token in "[{":
            depth += 1
        elif token in "]}":
            depth -= 1
