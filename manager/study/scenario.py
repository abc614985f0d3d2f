"""Scenarios: a world, calls, and the policies to compare, in one TOML file (docs/scenarios.md).

`--set key=value` changes a setting. A key is a path with dots: `world.links.shared`, or for a table in a list
`world.sources.pool.capacity`. A value that is not valid TOML is read as text.
"""

from __future__ import annotations

import enum
import json
import math
import os
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from stoker.config import read_unit
from stoker.config_errors import explain_msgspec_error, find_setting_line, parse_toml, suggest_similar_name
from stoker.contexts.step_times import StepTimes
from stoker.decoding import read_text, why_not_json
from stoker.errors import ConfigError
from stoker.manager.sim.check import find_impossible_settings, suggest_name
from stoker.manager.sim.workload import Workload, context_names_of_workload, expand_family_names
from stoker.manager.sim.world import NO_TIME, Rate, World
from stoker.site import Duration, Name, Size, check_policy_name, make_policy_path_absolute, policy_file
from stoker.units import parse_rate


class SettingChange(NamedTuple):
    text: str
    path: tuple[str, ...]


_TABLES_WITH_FIXED_NAMES = (("world", "contexts"), ("world", "devices"))
"""Tables to which `--set` cannot add entries."""


def apply_setting_change(data: dict[str, Any], text: str) -> SettingChange:
    """Apply one `key=value` change to `data` in place. Raises ConfigError."""
    key, equals, value = text.partition("=")
    written = [part.strip() for part in key.split(".")]
    if not equals or not all(written):
        raise ConfigError(f"--set {text}: write key=value, as in --set world.links.shared='2 GB/s'", key="set")
    parts = [part.strip("\"'") for part in written]
    if parts[0] not in _SCENARIO_SETTINGS and parts[0] in _WORLD_SETTINGS:
        parts.insert(0, "world")
    here: Any = data
    for place, part in enumerate(parts):
        if isinstance(here, list):
            parts[place] = _find_table_index(here, part, text)
        elif not isinstance(here, dict):
            raise ConfigError(f"--set {text}: {'.'.join(parts[:place])} is not a table", key=part)
        elif tuple(parts[:place]) in _TABLES_WITH_FIXED_NAMES and part not in here and place < len(parts) - 1:
            raise _unknown_name_error(part, here, text)
        at: Any = int(parts[place]) if isinstance(here, list) else part
        if place == len(parts) - 1:
            here[at] = _parse_toml_value(value)
        else:
            here = here[at] if isinstance(here, list) else here.setdefault(at, {})
    return SettingChange(text, tuple(parts))


def _find_table_index(tables: list[Any], part: str, text: str) -> str:
    names = [str(table.get("name", "")) if isinstance(table, dict) else "" for table in tables]
    if part in names:
        return str(names.index(part))
    if part.isdigit() and int(part) < len(tables):
        return part
    raise _unknown_name_error(part, [name or str(number) for number, name in enumerate(names)], text)


def _unknown_name_error(part: str, names: Iterable[str], text: str) -> ConfigError:
    known = list(names)
    hint = suggest_similar_name(part, known, cutoff=0.5, otherwise=f"there are {', '.join(known) or 'none'}")
    return ConfigError(f"--set {text}: there is no {part}; {hint}", key=part)


def _parse_toml_value(text: str) -> Any:
    try:
        read = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text.strip()
    return read["value"] if len(read) == 1 else text.strip()


def inline_step_time_files(data: dict[str, Any], folder: Path) -> None:
    """Replace the names of step-time files by the files' content."""
    found: list[Any] = [data]
    for key in ("world", "contexts", "*", "engine", "*"):
        inner = [each.values() if key == "*" else [each.get(key)] for each in found]
        found = [one for each in inner for one in each if isinstance(one, dict)]
    for engine in found:
        if isinstance(engine.get("times"), str):
            engine["times"] = msgspec.to_builtins(_read_step_times(folder / Path(engine["times"]).expanduser()))


def _read_step_times(path: Path) -> StepTimes:
    try:
        data = path.read_bytes()
        found = msgspec.json.decode(data)
        times = msgspec.convert(found.get("times", found) if isinstance(found, dict) else found, StepTimes)
        if times.prefill and times.decode and times.has_plausible_numbers():
            return times
        problem = "has no valid step times: prefill and decode, each [tokens, length, seconds, count]"
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        problem = f"is not a profile of stoker profile --json: {why_not_json(data, error)}"
    raise ConfigError(f"times: {path}: {problem}", file=str(path), key="times")


Seeds = Annotated[int, msgspec.Meta(ge=1, le=10_000)]


class CallDetail(enum.Enum):
    EACH = "each"
    COUNTED = "counted"


class Outputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The files that a simulation writes. `calls`: log one row per event of a call, or the call count per second."""

    calls: CallDetail = CallDetail.EACH
    plots: bool = True
    timeline: bool = True


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The settings of a valid scenario file. `until_s`: time at which each run is stopped; 0 = no limit."""

    name: Name
    about: str = ""
    world: World
    workload: Workload
    policies: tuple[str, ...] = ("default",)
    seeds: Seeds = 10
    until_s: Duration = msgspec.field(default=NO_TIME, name="until")
    outputs: Outputs = Outputs()

    def __post_init__(self) -> None:
        check_policies(self.policies)


def check_policies(policies: Sequence[str], *, setting: str = "policies") -> None:
    """Raise ValueError for an empty list, an invalid name, or equal labels. `setting`: the list's name in errors."""
    if not policies:
        raise ValueError(f"{setting}: name at least one policy")
    for policy in policies:
        check_policy_name(policy, setting=setting)
    [(called, times)] = Counter(map(policy_label, policies)).most_common(1)
    if times > 1:
        raise ValueError(f"{setting}: {called} is listed twice")


def policy_label(policy: str) -> str:
    file = policy_file(policy)
    return f"{Path(file).name}{policy[len(file) :]}" if file else policy


def shipped_scenarios() -> dict[str, Path]:
    return {path.stem: path for path in sorted((Path(__file__).parent / "scenarios").glob("*.toml"))}


def find_scenario(text: str | os.PathLike[str]) -> Path:
    """Return the scenario file for a path or a shipped scenario's name. Raises ConfigError with a suggested name."""
    path, known = Path(text).expanduser(), shipped_scenarios()
    if path.is_file():
        return path
    if str(text) in known:
        return known[str(text)]
    if path.is_dir():
        raise ConfigError(f"{text} is a folder; name the file of a scenario, or a shipped scenario: {', '.join(known)}")
    hint = suggest_similar_name(path.stem, known, cutoff=0.5, otherwise=f"shipped are {', '.join(known)}")
    raise ConfigError(f"{text}: no such file, and no scenario of this name; {hint}", file=str(text))


def load_scenario(path: str | os.PathLike[str], *, changes: Sequence[str] = ()) -> Scenario:
    """Return the scenario of a file, with `changes` applied and paths made absolute. Raises ConfigError."""
    path = Path(path)
    try:
        text = read_text(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error}", file=str(path)) from None
    return parse_scenario(text, file=str(path), folder=path.absolute().parent, changes=changes)


def parse_scenario(text: str, *, file: str, folder: Path, changes: Sequence[str] = ()) -> Scenario:
    """Return the scenario in `text`, with `changes` applied. `file`: the file's name in error messages."""
    data = parse_toml(text, file=file)
    made = [apply_setting_change(data, change) for change in changes]
    _make_paths_absolute(data, folder)
    inline_step_time_files(data, folder)
    try:
        scenario: Scenario = msgspec.convert(data, type=Scenario, dec_hook=convert_unit_value)
    except msgspec.ValidationError as error:
        problem, path, _ = explain_msgspec_error(
            str(error), root=Scenario, shapes=_FORMATS_OF_SETTINGS, data=data, read=convert_unit_value
        )
        raise _make_setting_error(problem, path, made, text=text, file=file) from None
    _raise_for_impossible_setting(scenario, made, text=text, file=file)
    return scenario


def convert_unit_value(kind: type, value: Any) -> Any:
    """Convert rates, sizes and durations with units (`dec_hook` of msgspec). Raises UnitError."""
    return Rate(parse_rate(value)) if kind is Rate else read_unit(kind, value)


_FORMATS_OF_SETTINGS = {"name": "up to 40 letters, digits, dots, dashes and underscores"}
_SCENARIO_SETTINGS = frozenset(field.encode_name for field in msgspec.structs.fields(Scenario))
_WORLD_SETTINGS = frozenset(field.encode_name for field in msgspec.structs.fields(World))


def _raise_for_impossible_setting(scenario: Scenario, made: Sequence[SettingChange], *, text: str, file: str) -> None:
    world = scenario.world
    wanted = expand_family_names(world, context_names_of_workload(scenario.workload))
    if unknown := next((name for name in wanted if name not in world.contexts), ""):
        problem = (
            f"[workload] context: {unknown} is not a context of this world; {suggest_name(unknown, world.contexts)}"
        )
        raise _make_setting_error(problem, ("workload", "context"), made, text=text, file=file)
    for at, problem, named in find_impossible_settings(world, wanted=wanted, until_s=scenario.until_s):
        table = ".".join(("world", *named[:-1]))
        raise _make_setting_error(f"[{table}] {problem}", ("world", *at), made, text=text, file=file)


def _make_setting_error(
    problem: str, path: tuple[str, ...], made: Sequence[SettingChange], *, text: str, file: str
) -> ConfigError:
    line, key = find_setting_line(path, text), path[-1]
    for change in reversed(made):
        if change.path[: len(path)] == path or path[: len(change.path)] == change.path:
            return ConfigError(f"--set {change.text}: {problem}", file=file, key=key)
    given = f" (with --set {', '.join(change.text for change in made)})" if made else ""
    return ConfigError(f"{file}: line {line}: {problem}{given}", file=file, line=line, key=key)


def _make_paths_absolute(data: dict[str, Any], folder: Path) -> None:
    policies = data.get("policies")
    if isinstance(policies, list):
        data["policies"] = [
            make_policy_path_absolute(each, folder) if isinstance(each, str) else each for each in policies
        ]
    workload = data.get("workload")
    if isinstance(workload, dict) and isinstance(workload.get("file"), str) and workload["file"]:
        workload["file"] = str(folder / Path(workload["file"]).expanduser())


_BARE_TOML_KEY = re.compile(r"[A-Za-z0-9_-]+")


def scenario_to_toml(scenario: Scenario) -> str:
    return "\n".join(_table_lines(scenario, at="")) + "\n"


def _table_lines(struct: msgspec.Struct, *, at: str) -> Iterator[str]:
    kind = struct.__struct_config__.tag_field
    if kind:
        yield f"{kind} = {_toml_value(struct.__struct_config__.tag)}"
    below: list[tuple[str, Any]] = []
    for field in msgspec.structs.fields(struct):
        value = getattr(struct, field.name)
        default = field.default_factory() if field.default_factory is not msgspec.NODEFAULT else field.default
        if not field.required and value == default:
            continue
        if _is_table(value):
            below.append((field.encode_name, value))
        else:
            yield f"{field.encode_name} = {_toml_value(value)}"
    for name, value in below:
        yield from _nested_table_lines(value, at=f"{at}.{name}" if at else name)


def _is_table(value: Any) -> bool:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else (value,)
    return any(isinstance(each, msgspec.Struct) and not each.__struct_config__.array_like for each in inside)


def _nested_table_lines(value: Any, *, at: str) -> Iterator[str]:
    match value:
        case dict():
            for name, inner in value.items():
                yield from _nested_table_lines(inner, at=f"{at}.{_toml_key(name)}")
        case tuple():
            for inner in value:
                yield from ("", f"[[{at}]]", *_table_lines(inner, at=at))
        case _:
            yield from ("", f"[{at}]", *_table_lines(value, at=at))


def _toml_key(name: str) -> str:
    return name if _BARE_TOML_KEY.fullmatch(name) else _toml_value(name)


def _toml_value(value: Any) -> str:
    match value:
        case enum.Enum():
            return _toml_value(value.value)
        case Duration():
            return f'"{_decimal_text(value)} s"'
        case Rate():
            if math.isinf(value):
                return '"unlimited"'
            return f'"{_format_size(int(value)) if value.is_integer() else f"{_decimal_text(value)} B"}/s"'
        case Size():
            return f'"{_format_size(value)}"'
        case str():  # TOML escapes the characters that JSON escapes, and DEL
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case dict():
            return f"{{ {', '.join(f'{_toml_key(name)} = {_toml_value(inner)}' for name, inner in value.items())} }}"
        case tuple():
            return f"[{', '.join(map(_toml_value, value))}]"
        case msgspec.Struct():  # write a struct as a list of its fields
            return _toml_value(msgspec.structs.astuple(value))
        case _:  # a number, true or false
            return json.dumps(value)


def _decimal_text(number: float) -> str:
    return f"{Decimal(repr(float(number))):f}".removesuffix(".0")


def _format_size(size: int) -> str:
    for factor, unit in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size and not size % factor:
            return f"{size // factor} {unit}"
    return f"{size} B"
