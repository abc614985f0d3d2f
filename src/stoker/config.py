"""Site files: they describe the machines that Stoker runs on, one TOML file per site.

    name = "lab"                  what `status` calls it
    engine = "stoker"             or "taskvine", where a site runs TaskVine
    sites = ["other.toml"]        more sites for the same session; paths count from this file

    [provider]
    kind = "local"                this machine; "slurm", "condor", "pbs", "lsf", "grid_engine", "kubernetes"
    partition = "backfill"        Slurm; "queue" for PBS, LSF and Grid Engine
    account, qos, constraint      as the batch system calls them
    walltime = "1 h"              how long a block may last
    nodes = 1                     nodes per block; one pilot runs on each
    gpus = "a10:1"                GPUs per node, with or without their type (gpus = 1); also cores, memory
    options = ["--exclusive"]     more lines for the head of the submit script, verbatim; with Slurm's "--array=0-3"
                                  a block is that array, each task of which brings a pilot
    worker_init = "module load x" shell that runs before the pilot
    requirements = ""             HTCondor's requirement expression
    shared_files = true           whether pilots see the files of this machine
    command_limit = "30 s"        no command of the batch system may take longer
    poll = "10 s"                 how often it is asked
    listing_lag = "1 min"         how long its listings may lack a job that exists
    price = 0.0                   what a device costs an hour, in your money: `stoker plan` tells what a run would cost

    [pilot]
    devices = "auto"              "auto": every GPU that is granted, else one CPU device a core; "gpu", "cpu", "cpu:4";
                                  "gpu+cpu:1": GPUs, and one CPU device of the cores that they leave ("gpu+cpu": one a
                                  core), for contexts that name the kind "cpu"
    gpu_cores = 2                 with "gpu+cpu": the cores that are kept for each GPU
    cache_size = "20 GB"          bound of the object cache on the pilot's disk
    cache_age = "14 d"            objects unused for this time are removed when a pilot starts
    scratch = ""                  local disk for that cache and for calls ("$TMPDIR" is read there); empty: the
                                  system's temporary folder
    probe = "auto"                whether a device computes: our own probe, on GPUs; "never"; or the path of a program
                                  that gets the device's name and exits with 0 if it is sound
    probe_every = "5 min"         how often a device that holds no context is probed again; "0 s": when a pilot starts
    init_blocks = 1               blocks to ask for at once, and how few and how many there may be
    min_blocks = 0
    max_blocks = 1

    [session]
    heartbeat = "5 s"             a pilot that is silent for three of these is lost
    lease = "60 s"                a pilot whose manager is gone for this long ends itself
    interface = "ib0"             the network on which pilots reach the manager, by name or address
    ports = "21000-21999"         where it may listen

    [policy]
    name = "default"              who decides: "default", "shortest-first", "exclusive", "prompt-tuner", "slinfer",
                                  "arlo", or your own, "module:Class" or "path.py:Class"; a path counts from this file
    dispatch = "default"          the class that decides at one of the manager's seams
    residency = "default"
    provisioning = "default"      how many blocks: "opportunistic", "demand", "fixed", "once"
    keep_pending = 2              opportunistic: blocks that wait in the queue while there is work
    idle = "2 min"                a block idle for this time is released; left out: 2 min, and 30 min
                                  in a session of `stoker up`, which keeps contexts hot between programs
    finish_within = "10 min"      demand: how soon the waiting calls should be done

    [environment]
    kind = "shared"               pilots see this Python environment; "packed": it travels to them as an archive
    python = ""                   the interpreter on compute nodes

Every setting may be left out. Times need a unit: ms, s, m (or min), h, d. Sizes need one too: kB, MB, GB, TB, or KiB to
TiB. A file is checked as a whole when it is read; an error is one line that names the file, the line, the setting and
the nearest valid one (`config_errors`).

A setting without effect is refused, so that no one expects one. Whether it has an effect often depends on others: a
pilot on this machine has no walltime, and `finish_within` is the aim of the rule "demand".

A session has one site or several (`load_sites`), and keeps a copy of each for its own processes (`write_sites`).
"""

from __future__ import annotations

import difflib
import enum
import json
import math
import os
import re
from collections.abc import Iterable
from decimal import Decimal
from pathlib import Path
from typing import Any, get_args

import msgspec
from msgspec.structs import FieldInfo

from stoker.config_errors import line_of, parse_toml, read_toml
from stoker.decoding import read_text
from stoker.errors import ConfigError, UnitError
from stoker.folders import working_folder
from stoker.site import (
    NO_PROBE,
    POLICY_NAMES,
    Duration,
    Engine,
    Pilot,
    Policy,
    Provider,
    ProviderKind,
    ProvisioningName,
    Session,
    Site,
    Size,
    absolute_policy,
)
from stoker.units import parse_bytes, parse_seconds, without_unit

# ---- settings without effect


SiteSetting = tuple[str, str]
"""A table of a site file and a setting in it."""


def without_effect(site: Site) -> dict[SiteSetting, str]:
    """Return the settings without effect on this site, each with the reason and what to do."""
    found: dict[SiteSetting, str] = {}
    local, ours = site.provider.kind is ProviderKind.LOCAL, site.engine is Engine.STOKER
    if local:
        found["provider", "walltime"] = "a pilot on this machine lasts as long as its session; leave it out"
    if local and ours:
        found["provider", "command_limit"] = "no batch system is asked where kind is local; leave it out"
    if ours:  # limits of TaskVine are checked elsewhere, with other messages
        rule = site.policy.provisioning
        if rule is ProvisioningName.DEFAULT:
            rule = ProvisioningName.FIXED if local else ProvisioningName.OPPORTUNISTIC
        if rule is not ProvisioningName.DEMAND:
            found["policy", "finish_within"] = (
                'it is the aim of provisioning = "demand" alone; write that below [policy], or leave it out'
            )
        if rule is not ProvisioningName.OPPORTUNISTIC:
            found["policy", "keep_pending"] = (
                f'it belongs to provisioning = "opportunistic", and here it is "{rule.value}"; write that below'
                " [policy], or leave it out"
            )
    if not site.pilot.mixed:
        found["pilot", "gpu_cores"] = (
            f'it goes with devices = "gpu+cpu", and here it is "{site.pilot.devices}", whose GPUs share all cores;'
            " leave it out"
        )
    if not site.advice.url:
        for setting in ("model", "key_variable", "time_limit", "tokens"):
            found["advice", setting] = "no language model is asked without url; give it, or leave this out"
    if site.pilot.probe == NO_PROBE:
        found["pilot", "probe_every"] = f'nothing is probed with probe = "{NO_PROBE}"; leave one of the two out'
    return found


def refuse_in_vain(site: Site) -> None:
    """Raise ConfigError if a Site made by a program has a setting without effect."""
    for (table, setting), why in without_effect(site).items():
        settings = getattr(site, table)
        field = next(each for each in msgspec.structs.fields(settings) if each.encode_name == setting)
        if getattr(settings, field.name) != field.default:
            raise ConfigError(f"site {site.name}: [{table}] {field.name} has no effect: {why}", key=setting)


# ---- reading one site file


__all__ = [
    "Duration",
    "Engine",
    "Pilot",
    "Policy",
    "Provider",
    "ProviderKind",
    "Session",
    "Site",
    "Size",
    "decided_by",
    "load_site",
    "parse_site",
    "read_unit",
]  # fmt: skip


def load_site(site: str | os.PathLike[str] | Site | None = None) -> Site:
    """Return a site.

    Args:
        site: None: this machine. A path or a shipped name (`"workstation"`): the checked file. A Site: unchanged.

    Raises:
        ConfigError: The site is wrong; with the facts `file`, `line` and `key`, where known.
    """
    if site is None:
        return Site.default()
    if isinstance(site, Site):
        refuse_in_vain(site)
        return site
    if not isinstance(site, str | os.PathLike):
        raise ConfigError(f"{site!r} is no site: give the path of a site file, or nothing for this machine")
    path = site_file(site)
    if not os.fspath(site):
        raise ConfigError("site: '' names no site file; leave it out for this machine, or write a file's path")
    try:
        text = read_text(path)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file{_near_file(path)}", file=str(path)) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error}", file=str(path)) from None
    return _with_absolute_paths(parse_site(text, file=str(path)), path.parent)


def decided_by(site: Site, policy: str) -> Site:
    """Return the site with a shipped policy if its file leaves the choice open; else unchanged.

    A file leaves it open if it names no policy, joins no other sites, and uses Stoker's own engine.

    Args:
        site: A checked site.
        policy: Name of the policy.
    """
    plain = site.policy.name == Policy().name and not site.policy.dispatch and not site.policy.residency
    if policy not in POLICY_NAMES or not plain or site.sites or site.engine is not Engine.STOKER:
        return site
    return msgspec.structs.replace(site, policy=msgspec.structs.replace(site.policy, name=policy))


def site_file(site: str | os.PathLike[str]) -> Path:
    path = Path(site).expanduser()
    if path.parent == Path() and path.suffix == "" and not path.exists() and path.name in shipped_sites():
        return _SHIPPED / f"{path.name}.toml"
    return path


def shipped_sites() -> list[str]:
    """Return the names of the site files that ship."""
    return sorted(file.stem for file in _SHIPPED.glob("*.toml"))


_SHIPPED = Path(__file__).parent / "site_configs"


def parse_site(text: str, *, file: str) -> Site:
    """Parse the text of a site file.

    Args:
        text: TOML.
        file: Its name in errors.

    Returns:
        The checked site.

    Raises:
        ConfigError: The site is wrong; with the facts `file`, `line` and `key`, where known.
    """
    data = parse_toml(text, file=file)
    _read_numbers(data)
    site = read_toml(text, Site, file=file, shapes=_SHAPES, read=read_unit, data=data)
    for (table, setting), why in without_effect(site).items():
        if setting in data.get(table, {}):
            line = line_of((table, setting), text)
            problem = f"line {line}: [{table}] {setting} has no effect: {why}"
            raise ConfigError(f"{file}: {problem}", file=file, line=line, key=setting)
    return site


def _read_numbers(data: dict[str, Any]) -> None:
    """Accept a number in quotes or without: `nodes = "2"`, `gpus = 2`."""
    for table, shape in (("provider", Provider), ("pilot", Pilot), ("policy", Policy)):
        settings = data.get(table)
        if not isinstance(settings, dict):
            continue
        fields = msgspec.structs.fields(shape)
        numbers = {field.encode_name for field in fields if (get_args(field.type) or (field.type,))[0] is int}
        for setting, value in settings.items():
            if setting in numbers and isinstance(value, str) and _DIGITS.fullmatch(value.strip()):
                settings[setting] = int(value)
            if setting == "gpus" and type(value) is int:
                settings[setting] = str(value) if value else ""


_DIGITS = re.compile(r"[0-9]{1,9}")


def _with_absolute_paths(site: Site, folder: Path) -> Site:
    """Paths of policies are relative to the site file; the session runs elsewhere."""
    policy = site.policy
    names = {each: absolute_policy(getattr(policy, each), folder) for each in ("name", "dispatch", "residency")}
    return msgspec.structs.replace(site, policy=msgspec.structs.replace(policy, **names))


_SHAPES = {
    "devices": 'write "auto", "gpu", "cpu", "cpu:N" with N from 1 to 9999, or GPUs and spare cores as "gpu+cpu:N"',
    "gpus": 'write a number of GPUs per node, 2, or with their type, "a10:2"',
    "ports": 'write a range, "21000-21999"',
    "name": "up to 40 letters, digits, dots, dashes and underscores",
}


def read_unit(kind: type, value: Any) -> Any:
    """Convert a Size or a Duration of a file: a `dec_hook` for msgspec.

    Args:
        kind: `Size` or `Duration`.
        value: The value in the file.

    Returns:
        Bytes or seconds.

    Raises:
        UnitError: The value cannot be read.
    """
    what = "a size" if kind is Size else "a duration"
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UnitError(f"{json.dumps(value, default=str)} is not {what}; write a number and a unit, in quotes")
    if isinstance(value, float) and not math.isfinite(value):
        raise UnitError(f"{value} is not {what}")
    if kind is Size:
        return Size(parse_bytes(value))
    if not isinstance(value, str) and value > 0:  # in a program a number is seconds; in a file it may be meant as hours
        raise without_unit(str(value), number=str(value))
    return Duration(parse_seconds(value))


def _near_file(path: Path) -> str:
    """Suggest a file with a similar name, or list the site files of that folder."""
    folder = path.parent
    if not folder.is_dir():
        return f" (there is no folder {folder})"
    here = sorted(file.stem for file in folder.glob("*.toml"))
    shipped = [] if path.suffix or folder != Path() else shipped_sites()
    close = difflib.get_close_matches(path.name.removesuffix(".toml"), [*here, *shipped], n=1, cutoff=0.6)
    if close:
        return f"; did you mean {folder / close[0]}.toml?" if close[0] in here else f"; did you mean {close[0]}?"
    files = [f"{folder} has {', '.join(f'{stem}.toml' for stem in here[:_SHOWN_FILES])}"] if here else []
    return "".join(f"; {text}" for text in [*files, *([f"by name there are {', '.join(shipped)}"] if shipped else [])])


_SHOWN_FILES = 12


# ---- the sites of a session


PYTHON_PATH = "python-path"
"""The file next to the copies with further import folders of pilots, as in PYTHONPATH."""


def load_sites(site: str | os.PathLike[str] | Site | None = None) -> tuple[Site, ...]:
    """Load a site and, recursively, the sites that it names. Paths are relative to the file that has them. Raises
    ConfigError, also if two sites have one name."""
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
    """Write the sites of a session into a folder, one `NAME.toml` each."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for site in sites:
        (folder / f"{site.name}.toml").write_text(site_text(site), encoding="utf-8")
    (folder / PYTHON_PATH).write_text(python_path, encoding="utf-8", errors="surrogateescape")


def read_sites(folder: Path) -> dict[str, Site]:
    """Read the sites of a session, by name. Raises ConfigError."""
    sites = [load_site(file) for file in sorted(folder.glob("*.toml"))]
    return {site.name: site for site in sites}


def read_python_path(folder: Path) -> str:
    """Return the further import folders of pilots."""
    file = folder / PYTHON_PATH
    return file.read_text(encoding="utf-8", errors="surrogateescape") if file.exists() else ""


def site_text(site: Site) -> str:
    """Return a site as text of a site file, without `sites` and settings without effect."""
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
        case str():  # TOML uses JSON's escapes, and also escapes DEL
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case tuple():
            return f"[{', '.join(map(_value, value))}]"
        case _:  # a number
            return json.dumps(value)
