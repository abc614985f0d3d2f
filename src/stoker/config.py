"""Site files: what Stoker should know of the machines that it runs on. One TOML file a site.

    name = "lab"                  what `status` calls it
    engine = "stoker"

    [provider]
    kind = "local"                pilots start on this machine

    [pilot]
    devices = "auto"              "auto": every GPU that is granted, else one CPU device a core; "gpu", "cpu", "cpu:4"
    cache_size = "20 GB"          bound of the object cache on the pilot's disk
    scratch = ""                  local disk for that cache and for calls; empty: the system's temporary folder
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
the line, the setting and the nearest valid one (`config_errors`).
"""

from __future__ import annotations

import difflib
import enum
import json
import math
import os
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any

import msgspec

from stoker.config_errors import explain
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
    """What a pilot takes of its node, and how many pilots there are. Sizes in bytes."""

    devices: Devices = "auto"
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
        found = re.search(r"\(at line (\d+)", str(error))
        line = int(found[1]) if found else text.count("\n") + 1
        problem = re.sub(r" \(at .*\)$", "", str(error))
        raise ConfigError(f"{file}: line {line}: not TOML: {problem}", file=file, line=line) from None
    except msgspec.ValidationError as error:
        fault = explain(str(error), text=text, root=Site, shapes=_SHAPES)
        raise ConfigError(
            f"{file}: line {fault.line}: {fault.problem}", file=file, line=fault.line, key=fault.key
        ) from None


_SHAPES = {
    "devices": 'write "auto", "gpu", "cpu", or "cpu:N" with N from 1 to 9999',
    "name": "up to 40 letters, digits, dots, dashes and underscores",
}


def _read_unit(kind: type, value: Any) -> Any:
    what = "a size" if kind is Size else "a duration"
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UnitError(f"{json.dumps(value, default=str)} is not {what}; write a number and a unit, in quotes")
    if isinstance(value, float) and not math.isfinite(value):
        raise UnitError(f"{value} is not {what}")
    return Size(parse_bytes(value)) if kind is Size else Duration(parse_seconds(value))


def _near_file(path: Path) -> str:
    """What to do about a missing file: one of nearly this name, or the site files of that folder."""
    folder = path.parent
    if not folder.is_dir():
        return f" (there is no folder {folder})"
    here = sorted(file.name for file in folder.glob("*.toml"))
    close = difflib.get_close_matches(path.name, here, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {folder / close[0]}?"
    return f"; {folder} has {', '.join(here)}" if here else ""
