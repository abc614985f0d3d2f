"""Site files: each TOML file describes the machines of one site. `docs/clusters.md` lists the settings.

A setting that has no effect is an error, for example `walltime` for pilots on this machine.
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

from stoker.config_errors import find_setting_line, parse_toml, read_toml
from stoker.decoding import read_text
from stoker.errors import ConfigError, UnitError
from stoker.folders import working_folder
from stoker.site import (
    KINDS_THAT_EXCLUDE_NODES,
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
    make_policy_path_absolute,
)
from stoker.units import parse_bytes, parse_seconds, without_unit

# ---- settings without effect


def settings_without_effect(site: Site) -> dict[tuple[str, str], str]:
    """Return why settings have no effect on `site`, keyed by table and setting."""
    provider, pilot, rule = site.provider, site.pilot, site.policy.provisioning
    local, ours = provider.kind is ProviderKind.LOCAL, site.engine is Engine.STOKER
    here = f"kind is {provider.kind.value}" if ours else "TaskVine places the workers"
    excludes = ours and provider.kind in KINDS_THAT_EXCLUDE_NODES
    if rule is ProvisioningName.DEFAULT:
        rule = ProvisioningName.FIXED if local else ProvisioningName.OPPORTUNISTIC
    not_demand = ours and rule is not ProvisioningName.DEMAND  # `manager.taskvine.refusals` checks this for TaskVine
    not_opportunistic = ours and rule is not ProvisioningName.OPPORTUNISTIC
    gpus = f'it needs devices = "gpu+cpu"; with devices = "{pilot.devices}", the GPUs share all cores'
    rows = (
        (local, "provider", ["walltime"], "a pilot on this machine runs until its session ends"),
        (local and ours, "provider", ["command_limit"], "kind local has no batch system"),
        (not provider.exclude_nodes, "provider", ["probe_nodes"], "exclude_nodes = 0 excludes no node"),
        (not excludes, "provider", ["exclude_nodes", "probe_nodes"], f"it needs kind slurm or condor, but {here}"),
        (not_demand, "policy", ["finish_within"], f'it needs provisioning = "demand", not "{rule.value}"'),
        (not_opportunistic, "policy", ["keep_pending"], f'it needs provisioning = "opportunistic", not "{rule.value}"'),
        (not pilot.offers_gpus_and_cpus, "pilot", ["gpu_cores"], gpus),
        (not site.advice.url, "advice", ["model", "key_variable", "time_limit", "tokens"], "it needs url"),
        (pilot.probe == NO_PROBE, "pilot", ["probe_every"], f'probe = "{NO_PROBE}" probes no device'),
    )
    return {
        (table, setting): f"{why}; leave it out" for is_vain, table, names, why in rows if is_vain for setting in names
    }


def refuse_settings_without_effect(site: Site) -> None:
    """Return why settings of `site` have no effect, by table and setting."""
    for (table, setting), why in settings_without_effect(site).items():
        settings = getattr(site, table)
        field = next(each for each in msgspec.structs.fields(settings) if each.encode_name == setting)
        if getattr(settings, field.name) != field.default:
            raise ConfigError(f"site {site.name}: [{table}] {field.name} has no effect: {why}", key=setting)


# ---- reading one site file


__all__ = [
    "Duration", "Engine", "Pilot", "Policy", "Provider", "ProviderKind", "Session", "Site", "Size", "load_site",
    "parse_site", "read_unit", "with_default_policy",
]  # fmt: skip


def load_site(site: str | os.PathLike[str] | Site | None = None) -> Site:
    """Return the site for a path, a name or None.

    Args:
        site: None for this machine, the path of a site file, a shipped name (`"workstation"`), or a Site.

    Raises:
        ConfigError: The file or a setting is wrong. Facts, if known: `file`, `line`, `key`.
    """
    if site is None:
        return Site.default()
    if isinstance(site, Site):
        refuse_settings_without_effect(site)
        return site
    if not isinstance(site, str | os.PathLike):
        raise ConfigError(f"{site!r} is not a site; give the path of a site file, or nothing for this machine")
    if not os.fspath(site):
        raise ConfigError(
            "site: '' is not the path of a site file; leave site out to use this machine, or write a path"
        )
    path = find_site_file(site)
    try:
        text = read_text(path)
    except FileNotFoundError:
        raise ConfigError.in_file(path, f"no such file{_suggest_site_file(path)}") from None
    except OSError as error:
        raise ConfigError.in_file(path, f"cannot be read: {error}") from None
    return _with_absolute_paths(parse_site(text, file=str(path)), path.parent)


def with_default_policy(site: Site, policy: str) -> Site:
    """Return `site` with a shipped policy, unless the site has another engine, other sites or a policy.

    Args:
        site: A checked site.
        policy: Name of the policy.
    """
    plain = site.policy.name == Policy().name and not site.policy.dispatch and not site.policy.residency
    if policy not in POLICY_NAMES or not plain or site.sites or site.engine is not Engine.STOKER:
        return site
    return msgspec.structs.replace(site, policy=msgspec.structs.replace(site.policy, name=policy))


def find_site_file(site: str | os.PathLike[str]) -> Path:
    path = Path(site).expanduser()
    if path.parent == Path() and path.suffix == "" and not path.exists() and path.name in shipped_site_names():
        return _SHIPPED / f"{path.name}.toml"
    return path


def shipped_site_names() -> list[str]:
    return sorted(file.stem for file in _SHIPPED.glob("*.toml"))


_SHIPPED = Path(__file__).parent / "site_configs"


def parse_site(text: str, *, file: str) -> Site:
    """Return the site that TOML text describes.

    Args:
        text: TOML.
        file: Name of the file for error messages.

    Raises:
        ConfigError: The text or a setting is wrong. Facts, if known: `file`, `line`, `key`.
    """
    data = parse_toml(text, file=file)
    _convert_number_settings(data)
    site = read_toml(text, Site, file=file, shapes=_SHAPES, read=read_unit, data=data)
    for (table, setting), why in settings_without_effect(site).items():
        if setting in data.get(table, {}):
            line = find_setting_line((table, setting), text)
            raise ConfigError.in_file(file, f"[{table}] {setting} has no effect: {why}", line=line, key=setting)
    return site


def _convert_number_settings(data: dict[str, Any]) -> None:
    """Convert number settings in place: `nodes = "2"` becomes 2, `gpus = 2` becomes "2"."""
    for table, shape in (("provider", Provider), ("pilot", Pilot), ("policy", Policy)):
        fields = msgspec.structs.fields(shape)
        numbers = {field.encode_name for field in fields if (get_args(field.type) or (field.type,))[0] is int}
        settings: dict[str, Any] = data[table] if isinstance(data.get(table), dict) else {}
        for setting, value in settings.items():
            if setting in numbers and isinstance(value, str) and _DIGITS.fullmatch(value.strip()):
                settings[setting] = int(value)
            if setting == "gpus" and type(value) is int:
                settings[setting] = str(value) if value else ""


_DIGITS = re.compile(r"[0-9]{1,9}")


def _with_absolute_paths(site: Site, folder: Path) -> Site:
    """Make the paths of policies absolute, because the session runs in another folder."""
    policy, settings = site.policy, ("name", "dispatch", "residency")
    names = {each: make_policy_path_absolute(getattr(policy, each), folder) for each in settings}
    return msgspec.structs.replace(site, policy=msgspec.structs.replace(policy, **names))


_SHAPES = {
    "devices": 'write "auto", "gpu", "cpu", "cpu:N" with N from 1 to 9999, or GPUs and spare cores as "gpu+cpu:N"',
    "gpus": 'write a number of GPUs per node, 2, or with their type, "a10:2"',
    "ports": 'write a range, "21000-21999"',
    "name": "up to 40 letters, digits, dots, dashes and underscores",
}


def read_unit(kind: type, value: Any) -> Any:
    """Return bytes or seconds. msgspec calls this function as its `dec_hook`.

    Args:
        kind: `Size` or `Duration`.
        value: The value in the site file.

    Raises:
        UnitError: The value is invalid.
    """
    what = "a size" if kind is Size else "a duration"
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UnitError(f"{json.dumps(value, default=str)} is not {what}; write a number and a unit, in quotes")
    if isinstance(value, float) and not math.isfinite(value):
        raise UnitError(f"{value} is not {what}")
    if kind is Size:
        return Size(parse_bytes(value))
    if not isinstance(value, str) and value > 0:  # in a file, a number without a unit could mean hours
        raise without_unit(str(value), number=str(value))
    return Duration(parse_seconds(value))


def _suggest_site_file(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f" (there is no folder {folder})"
    here = sorted(file.stem for file in folder.glob("*.toml"))
    shipped = [] if path.suffix or folder != Path() else shipped_site_names()
    close = difflib.get_close_matches(path.name.removesuffix(".toml"), [*here, *shipped], n=1, cutoff=0.6)
    if close:
        return f"; did you mean {folder / close[0]}.toml?" if close[0] in here else f"; did you mean {close[0]}?"
    hint = f"; {folder} has {', '.join(f'{stem}.toml' for stem in here[:_MAX_SHOWN_FILES])}" if here else ""
    return hint + (f"; shipped sites are {', '.join(shipped)}" if shipped else "")


_MAX_SHOWN_FILES = 12


# ---- the sites of a session


PYTHON_PATH = "python-path"
"""Name of the file with pilots' extra import folders, like PYTHONPATH."""


def load_sites(site: str | os.PathLike[str] | Site | None = None) -> tuple[Site, ...]:
    """Load a site and, recursively, the sites in its `sites` setting."""
    found: dict[str, Site] = {}
    seen: set[Path] = set()
    todo: list[str | os.PathLike[str] | Site | None] = [site]
    while todo:
        given = todo.pop(0)
        base, file = working_folder(), None
        if isinstance(given, str | os.PathLike):
            file = find_site_file(given).resolve()
            if file in seen:
                continue
            seen.add(file)
            base = file.parent
        loaded = load_site(given)
        if loaded.name in found:
            raise ConfigError(f"two sites of the session are called {loaded.name}; rename one of them", key="name")
        found[loaded.name] = loaded
        named: set[Path] = set()
        for written in loaded.sites:
            other = base / Path(written).expanduser()
            path = find_site_file(other).resolve()
            if path == file:
                what = f"{file}: sites names {written!r}, which is this file itself; remove it"
                raise ConfigError(what, key="sites")
            if path in named:
                what = f"{file or loaded.name}: sites names {written!r} twice; remove one of them"
                raise ConfigError(what, key="sites")
            named.add(path)
            todo.append(other)
    return tuple(found.values())


def write_sites(folder: Path, sites: Iterable[Site], *, python_path: str = "") -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for site in sites:
        (folder / f"{site.name}.toml").write_text(format_site_toml(site), encoding="utf-8")
    (folder / PYTHON_PATH).write_text(python_path, encoding="utf-8", errors="surrogateescape")


def read_sites(folder: Path) -> dict[str, Site]:
    sites = [load_site(file) for file in sorted(folder.glob("*.toml"))]
    return {site.name: site for site in sites}


def read_python_path(folder: Path) -> str:
    file = folder / PYTHON_PATH
    return file.read_text(encoding="utf-8", errors="surrogateescape") if file.exists() else ""


def format_site_toml(site: Site) -> str:
    """Return a site as TOML text. Omit `sites`, and settings that have no effect."""
    lines, tables, vain = [], [], settings_without_effect(site)
    for field in msgspec.structs.fields(site):
        value = getattr(site, field.name)
        if isinstance(value, msgspec.Struct):
            tables += ["", f"[{field.encode_name}]"]
            for entry in msgspec.structs.fields(value):
                said = getattr(value, entry.name)
                if said is not None and (field.encode_name, entry.encode_name) not in vain:
                    tables.append(_format_toml_setting(entry, said))
        elif field.name != "sites":
            lines.append(_format_toml_setting(field, value))
    return "\n".join([*lines, *tables, ""])


def _format_toml_setting(field: FieldInfo, value: Any) -> str:
    if field.type is Duration:  # a site file does not allow exponents (`1e3 s`)
        value = f"{Decimal(repr(float(value))):f} s"
    elif field.type is Size:
        value = f"{int(value)} B"
    elif isinstance(value, enum.Enum):
        value = value.value
    # JSON and TOML write numbers, texts and lists alike, but only TOML requires an escape for the character DEL.
    return f"{field.encode_name} = {json.dumps(value, ensure_ascii=False)}".replace("\x7f", "\\u007f")
