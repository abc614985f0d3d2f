"""Scenarios: a world, the calls that come, and the policies to compare in it. One TOML file each.

    name = "pool"
    about = "one line for those who choose among scenarios"
    policies = ["default"]               shipped ones by name, one's own as "module:Class" or "path.py:Class"
    seeds = 10                           how often each is simulated: seeds 0 to 9
    until = "2 h"                        where a run is cut off; left out: when the last call has ended

    [workload]                           `stoker.manager.sim.workload`
    kind = "sweep"
    context = "llm"
    inputs = 10_000
    items = 10

    [world.devices.a10]                  `stoker.manager.sim.world`
    memory = "24 GB"

    [[world.sources]]
    name = "backfill"
    kind = "a10"
    capacity = [[0, 8], [900, 4]]        blocks that may run, from these seconds on
    max_blocks = 8

    [world.contexts.llm]
    device_memory = "7 GB"
    load = { "" = "20 s" }               by kind of device; "" stands for all others
    item = { "" = "0.5 s" }

    [world.links]
    shared = "2 GB/s"

    [outputs]
    plots = true
    timeline = true

A file is checked as a whole when it is read, as a site file is; and the world is one in which runs can end
(`stoker.manager.sim.check`).
"""

from __future__ import annotations

import difflib
import enum
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from stoker.config import read_unit
from stoker.config_errors import explain, line_of, parse_toml
from stoker.decoding import read_text
from stoker.errors import ConfigError
from stoker.manager.sim.check import impossible, nearest
from stoker.manager.sim.families import contexts_named
from stoker.manager.sim.workload import Workload, contexts_of
from stoker.manager.sim.world import NO_TIME, Rate, World
from stoker.manager.study import overrides, step_profiles
from stoker.manager.study.overrides import Override
from stoker.site import Duration, Name, absolute_policy, check_policy_name, policy_file
from stoker.units import parse_rate

Seeds = Annotated[int, msgspec.Meta(ge=1, le=10_000)]


class CallDetail(enum.Enum):
    """What a run's event log says of calls."""

    EACH = "each"
    COUNTED = "counted"


class Outputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is written. `calls`: a row in the event log for all that happens to each call, or counts for every second,
    which is for millions of short requests. Beside the logs, `plots`: PNG and SVG; `timeline`: of the first run, for
    Perfetto."""

    calls: CallDetail = CallDetail.EACH
    plots: bool = True
    timeline: bool = True


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A scenario file that was read and found possible. `until_s`: where runs are cut off; 0 = nowhere."""

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
    """Raise ValueError for policies that cannot be compared: there are none, one has an impossible name, or two are
    called the same. `setting`: where they were named."""
    if not policies:
        raise ValueError(f"{setting}: name at least one")
    for policy in policies:
        check_policy_name(policy, setting=setting)
    [(called, times)] = Counter(map(label, policies)).most_common(1)
    if times > 1:
        raise ValueError(f"{setting}: {called} stands there twice")


def label(policy: str) -> str:
    """What people read: a policy in a file goes by the file's name, wherever it lies."""
    file = policy_file(policy)
    return f"{Path(file).name}{policy[len(file) :]}" if file else policy


def shipped() -> dict[str, Path]:
    """Scenario files that come with Stoker, by name."""
    return {path.stem: path for path in sorted((Path(__file__).parent / "scenarios").glob("*.toml"))}


def find_scenario(text: str | os.PathLike[str]) -> Path:
    """The file that is meant: a path, or the name of a shipped scenario. Raises ConfigError with the nearest name."""
    path, known = Path(text).expanduser(), shipped()
    if path.is_file():
        return path
    if str(text) in known:
        return known[str(text)]
    if path.is_dir():
        raise ConfigError(f"{text} is a folder; name the scenario's file, or one that ships: {', '.join(known)}")
    close = difflib.get_close_matches(path.stem, known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}?" if close else f"shipped are {', '.join(known)}"
    raise ConfigError(f"{text}: no such file, and no scenario of this name; {hint}", file=str(text))


def load_scenario(path: str | os.PathLike[str], *, changes: Sequence[str] = ()) -> Scenario:
    """The scenario of a file, with settings changed (`stoker.manager.study.overrides`). Files of traces and policies
    count from the scenario's folder; in what is given back their paths are absolute.

    Raises ConfigError with facts `file`, `line` and `key`, where known.
    """
    path = Path(path)
    try:
        text = read_text(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error}", file=str(path)) from None
    return parse_scenario(text, file=str(path), folder=path.absolute().parent, changes=changes)


def parse_scenario(text: str, *, file: str, folder: Path, changes: Sequence[str] = ()) -> Scenario:
    """The scenario that `text` describes; `file` is what an error calls it. Raises ConfigError."""
    data = parse_toml(text, file=file)
    made = [overrides.apply(data, change, top=_TOP, world=_WORLD) for change in changes]
    _make_absolute(data, folder)
    step_profiles.read_into(data, folder)
    try:
        scenario: Scenario = msgspec.convert(data, type=Scenario, dec_hook=read)
    except msgspec.ValidationError as error:
        fault = explain(str(error), text=text, root=Scenario, shapes=_SHAPES, data=data, read=read)
        raise _refused(fault.problem, fault.path, made, text=text, file=file) from None
    _refuse_impossible(scenario, made, text=text, file=file)
    return scenario


def read(kind: type, value: Any) -> Any:
    """What a scenario file says in words: rates, sizes, durations, each with its unit. A `dec_hook` for msgspec. Raises
    UnitError."""
    return Rate(parse_rate(value)) if kind is Rate else read_unit(kind, value)


_SHAPES = {"name": "up to 40 letters, digits, dots, dashes and underscores"}
_TOP = frozenset(field.encode_name for field in msgspec.structs.fields(Scenario))
_WORLD = frozenset(field.encode_name for field in msgspec.structs.fields(World))


def _refuse_impossible(scenario: Scenario, made: Sequence[Override], *, text: str, file: str) -> None:
    world = scenario.world
    wanted = contexts_named(world, contexts_of(scenario.workload))
    for name in wanted:
        if name not in world.contexts:
            hint = nearest(name, world.contexts)
            problem = f"[workload] context: {name} is no context of this world; {hint}"
            raise _refused(problem, ("workload", "context"), made, text=text, file=file)
    for at, problem, named in impossible(world, wanted=wanted, until_s=scenario.until_s):
        table = ".".join(("world", *named[:-1]))
        raise _refused(f"[{table}] {problem}", ("world", *at), made, text=text, file=file)


def _refused(problem: str, path: tuple[str, ...], made: Sequence[Override], *, text: str, file: str) -> ConfigError:
    """An error that names what is to be mended: what was given as `--set`, or a line of the file."""
    line, key = line_of(path, text), path[-1]
    for change in reversed(made):
        if change.path[: len(path)] == path or path[: len(change.path)] == change.path:
            return ConfigError(f"--set {change.text}: {problem}", file=file, key=key)
    given = f" (with --set {', '.join(change.text for change in made)})" if made else ""
    return ConfigError(f"{file}: line {line}: {problem}{given}", file=file, line=line, key=key)


def _make_absolute(data: dict[str, Any], folder: Path) -> None:
    policies = data.get("policies")
    if isinstance(policies, list):
        data["policies"] = [absolute_policy(each, folder) if isinstance(each, str) else each for each in policies]
    workload = data.get("workload")
    if isinstance(workload, dict) and isinstance(workload.get("file"), str) and workload["file"]:
        workload["file"] = str(folder / Path(workload["file"]).expanduser())
