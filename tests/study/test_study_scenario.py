"""Shipped scenario files load, each error is one line, and docs/workloads.md shows valid files."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import msgspec
import pytest

from stoker.config import read_unit
from stoker.config_errors import setting_names
from stoker.contexts.step_times import StepCell
from stoker.errors import ConfigError
from stoker.manager.sim.check import find_world_warnings
from stoker.manager.sim.workload import SweepCalls, Trace, TraceFormat, Workload, context_names_of_workload
from stoker.manager.sim.world import ContextModel, Delays, DeviceKind, EngineModel, Files, Links, SourceModel
from stoker.manager.study.scenario import (
    Scenario,
    find_scenario,
    load_scenario,
    parse_scenario,
    policy_label,
    scenario_to_toml,
    shipped_scenarios,
)

TEXT = """\
name = "small"

[workload]
kind = "sweep"
context = "llm"
inputs = 100

[world.devices.a10]
memory = "24 GB"

[world.devices."NVIDIA TITAN X"]
memory = "12 GB"

[[world.sources]]
name = "new"
kind = "a10"
capacity = 4
max_blocks = 4

[[world.sources]]
name = "old"
kind = "NVIDIA TITAN X"
capacity = [[0, 2], [900.5, 1]]
preempt = "oldest"

[world.contexts.llm]
device_memory = "7 GB"
load = { "" = "20 s", a10 = "10 s" }
files = [{ name = "weights", size = "3.4 GB" }]

[world.contexts.other]

[world.links]
shared = "1.2 GB/s"
network = "10 Gbit/s"
"""


def parse(text: str = TEXT, *changes: str) -> Scenario:
    return parse_scenario(text, file="s.toml", folder=Path("/folder"), changes=changes)


def test_gangs_are_read_and_invalid_gangs_refused_with_their_line() -> None:
    changed = parse(
        TEXT, "workload.gang=[1, 4]", "contexts.llm.devices=1", "contexts.llm.gang=2 s",
        "contexts.llm.gang_efficiency=0.9", "world.delays.progress=5 s",
    )  # fmt: skip
    llm = changed.world.contexts["llm"]
    assert (changed.workload.gang, llm.devices, llm.gang_s, llm.gang_efficiency) == ((1, 4), 1, 2.0, 0.9)
    assert changed.world.delays.progress_s == 5.0
    with pytest.raises(ConfigError, match=r"s\.toml: line \d+: .*gang: at least 4 libraries and at most 2"):
        parse(TEXT.replace("inputs = 100", "inputs = 100\ngang = [4, 2]"))
    with pytest.raises(ConfigError, match="no suitable node has more than 1"):
        parse(TEXT, "contexts.llm.devices=2")


def test_scenario_has_the_values_of_its_file() -> None:
    scenario = parse()
    new, old = scenario.world.sources
    assert (new.steps, old.steps) == (((0.0, 4),), ((0.0, 2), (900.5, 1)))
    assert scenario.world.links.shared == 1.2e9
    assert scenario.world.links.network == 1.25e9
    assert scenario.world.contexts["llm"].load_s == {"": 20.0, "a10": 10.0}
    assert scenario.world.contexts["llm"].files[0].size_bytes == 3_400_000_000
    assert scenario.workload == SweepCalls(context="llm", inputs=100)
    assert (scenario.policies, scenario.seeds, scenario.until_s) == (("default",), 10, 0.0)


@pytest.mark.parametrize("name", [*shipped_scenarios(), ""])
def test_scenario_written_as_text_reads_back_as_itself(name: str) -> None:
    scenario = (
        load_scenario(find_scenario(name)) if name else parse(TEXT, "until=1h30m", 'policies=["exclusive", "b:C"]')
    )
    assert parse(scenario_to_toml(scenario)) == scenario
    if name:
        assert (scenario.name, bool(scenario.about)) == (name, True)
        assert list(find_world_warnings(scenario.world, wanted=context_names_of_workload(scenario.workload))) == []


WITH_ENGINE = """
[world.contexts.llm.engine.""]
times = { prefill = [[16, 8, 0.02], [512, 256, 0.4]], decode = [[1, 512, 0.014], [32, 512, 0.026, 5]] }
rows = 8
"""


def test_engine_has_step_times_from_the_scenario_or_a_profile(tmp_path: Path) -> None:
    written = parse(TEXT.replace("load =", "slots = 0\nload =") + WITH_ENGINE)
    engine = written.world.contexts["llm"].engine_on_device_kind("a10")
    assert engine.times.decode == (StepCell(1, 512, 0.014), StepCell(32, 512, 0.026, 5))
    assert written.world.contexts["llm"].slots_on_device_kind("a10") == 8
    assert parse(scenario_to_toml(written)) == written
    profile = {"model": "llm", "recipe": "ab", "took_s": 60.0, "times": msgspec.to_builtins(engine.times)}
    (tmp_path / "a10.json").write_bytes(msgspec.json.encode(profile))
    inline = WITH_ENGINE.splitlines()[2]
    named = (TEXT + WITH_ENGINE).replace(inline, 'times = "a10.json"')
    read = parse_scenario(named, file="s.toml", folder=tmp_path)
    assert read.world.contexts["llm"].engine == written.world.contexts["llm"].engine


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read"),
        ("[1", "is not a profile"),
        ("{}", "no valid step times"),
        ('{"times": 3}', "is not a profile"),
    ],
)
def test_error_of_an_invalid_engine_profile_names_its_file(text: str | None, said: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "a10.json").write_text(text)
    named = (TEXT + WITH_ENGINE).replace(WITH_ENGINE.splitlines()[2], 'times = "a10.json"')
    with pytest.raises(ConfigError, match=rf"times: .*a10.json: .*{said}"):
        parse_scenario(named, file="s.toml", folder=tmp_path)


def test_impossible_engine_is_refused() -> None:
    with pytest.raises(ConfigError, match="an engine needs prefill and decode"):
        parse((TEXT + WITH_ENGINE).replace(WITH_ENGINE.splitlines()[2], "times = { }"))
    with pytest.raises(ConfigError, match="whose step times are not known"):
        parse((TEXT + WITH_ENGINE).replace('engine.""', "engine.a10"))
    with pytest.raises(ConfigError, match="tpot: a time per token counts from the first token"):
        parse(TEXT, "workload.tokens.tpot=250ms")


def test_trace_path_is_relative_to_the_scenario_folder() -> None:
    trace = ("workload.kind=trace", "workload.format=csv", "workload.file=day/trace.csv")
    changed = TEXT.replace("inputs = 100", "")
    scenario = parse(changed, *trace)
    assert isinstance(scenario.workload, Trace)
    assert scenario.workload.file == "/folder/day/trace.csv"
    absolute = parse(changed, *trace[:2], "workload.file=/data/trace.csv").workload
    assert isinstance(absolute, Trace)
    assert absolute.file == "/data/trace.csv"


def test_policies_in_files_are_relative_to_the_scenario() -> None:
    policies = parse(TEXT, 'policies=["default", "mine/best.py:Best", "package.module:Other"]').policies
    assert policies == ("default", "/folder/mine/best.py:Best", "package.module:Other")
    assert [policy_label(policy) for policy in policies] == ["default", "best.py:Best", "package.module:Other"]


# ---- faults

FAULTS = {
    ('"1.2 GB/s"', '"0 GB/s"'): "line 34: [world.links] shared: the bandwidth must be more than 0",
    ('memory = "12 GB"', ""): "line 11: [world.devices.NVIDIA TITAN X] memory is missing",
    ("[world.devices.a10]\n", "[world.devices.a10]\nspeed = 0.0\n"): "line 9: [world.devices.a10] speed = 0.0: it must"
    " be more than 0",
    ("[900.5, 1]", "[0, 1]"): "line 23: [world.sources.old] capacity: 0 s does not come after 0 s",
    ("[900.5, 1]", "[-0.5, 1]"): "line 23: [world.sources.old] capacity: -0.5 s does not come after 0 s",
    ('"oldest"', '"oldes"'): "line 24: [world.sources.old] preempt = 'oldes' is not available; did you mean 'oldest'?",
    ('kind = "sweep"\n', ""): "line 3: [workload] kind is missing; there are 'sweep', 'constant', 'poisson', 'bursts',"
    " 'diurnal', 'trace'",
    ('name = "small"\n', 'name = "small"\npolicies = ["defalt"]\n'): "line 2: policies = 'defalt' is not a policy; did"
    " you mean 'default'? (a policy of your own: \"module:Class\" or \"path.py:Class\")",
    ('name = "small"\n', 'name = "small"\npolicies = ["a.py:B", "b/a.py:B"]\n'): "line 2: policies: a.py:B is listed"
    " twice",
    ('kind = "a10"', 'kind = "a100"'): "line 16: [world.sources.new] kind = 'a100' is not a device of this world; did"
    " you mean a10?",
    ('"new"', '"old"'): "line 21: [world.sources.old] name = 'old': another source has the same name",
    ("max_blocks = 4", "max_blocks = 4\ninit_blocks = 5"): "line 19: [world.sources.new] init_blocks = 5 is more than"
    " max_blocks = 4",
    ('context = "llm"', 'context = "lm"'): "line 5: [workload] context: lm is not a context of this world; did you"
    " mean llm?",
    ("a10 =", "a11 ="): "line 28: [world.contexts.llm] load has a time for 'a11', which is not a device; did you"
    " mean a10?",
    ('device_memory = "7 GB"', 'device_memory = "70 GB"'): "line 27: [world.contexts.llm] device_memory: no device can"
    " hold llm: it needs 70.0 GB; devices: a10 24.0 GB, NVIDIA TITAN X 12.0 GB",
    ('device_memory = "7 GB"', 'device_memory = "14 GB"\nkinds = ["NVIDIA"]'): "line 27: [world.contexts.llm]"
    " device_memory: no device can hold llm: it needs 14.0 GB on NVIDIA; devices: a10 24.0 GB, NVIDIA TITAN X 12.0 GB",
}  # fmt: skip


@pytest.mark.parametrize("change", FAULTS, ids=lambda change: change[1][:30])
def test_error_is_one_line_with_location_and_advice(change: tuple[str, str]) -> None:
    assert TEXT.count(change[0]) >= 1
    with pytest.raises(ConfigError) as caught:
        parse(TEXT.replace(*change, 1))
    assert str(caught.value) == f"s.toml: {FAULTS[change]}"
    assert f"line {caught.value.line}:" in str(caught.value)
    assert caught.value.file == "s.toml"


def test_scenario_whose_devices_all_end_needs_a_time_limit() -> None:
    out_of_calls = TEXT.replace("capacity = 4", "capacity = [[0, 4], [60, 0]]").replace("[900.5, 1]", "[900.5, 0]")
    with pytest.raises(
        ConfigError, match=r"^s\.toml: line 17: \[world\.sources\.new\] capacity: from 900\.5 s on, .*until"
    ):
        parse(out_of_calls)
    assert parse(out_of_calls, "until=2 h").until_s == 7200
    with pytest.raises(ConfigError, match="no call could ever run"):
        parse(TEXT, "sources.new.capacity=0", "sources.old.capacity=0")


def test_walltime_too_short_for_every_load_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"walltime: a block lasts 10 s, and llm takes 13 s until it is loaded"):
        parse(TEXT, "sources.new.walltime=10 s", "sources.old.walltime=10 s")
    # the other source has no walltime, so calls can run there
    assert parse(TEXT, "sources.new.walltime=10 s").world.sources[0].walltime_s == 10


DOUBTS = {
    ("sources.old.capacity=0",): "source old never serves a call: its capacity is always 0",
    ("sources.new.capacity=40",): "source new: its capacity is 40 blocks, but max_blocks = 4 limits the"
    " submitted blocks",
    ("sources.new.walltime=10 s",): "source new never serves a call: a block lasts 10 s, and llm takes 13 s until it is"
    " loaded there",
    ('contexts.llm.kinds=["a10"]', "sources.old.max_blocks=2"): "source old never serves a call: its devices (NVIDIA"
    " TITAN X) cannot hold llm",
}  # fmt: skip


@pytest.mark.parametrize("changes", DOUBTS, ids=lambda changes: changes[0])
def test_source_setting_without_effect_causes_a_warning(changes: tuple[str, ...]) -> None:
    plain = parse(TEXT, "sources.old.max_blocks=2")
    assert list(find_world_warnings(plain.world, wanted=["llm"])) == []
    changed = parse(TEXT, "sources.old.max_blocks=2", *changes)
    assert list(find_world_warnings(changed.world, wanted=["llm"])) == [DOUBTS[changes]]


def test_file_name_with_two_different_sizes_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"line 32: \[world\.contexts\.other\] files: weights is 1\.0 GB here and 3\.4"
    ):
        parse(TEXT.replace("[world.contexts.other]", '[world.contexts.other]\nfiles = [{name="weights", size="1 GB"}]'))


# ---- changed settings


def test_settings_are_changed_by_path() -> None:
    scenario = parse(
        TEXT, "workload.inputs=5", "links.shared=2 GB/s", "world.sources.old.capacity=[[0, 1]]", "sources.0.nodes=2",
        "seeds=3", "contexts.llm.load.a10='1 s'",
        'contexts.llm.load.""=2 s', 'about=it is "so"', "delays.poll=1 s",
    )  # fmt: skip
    new, old = scenario.world.sources
    assert scenario.workload == SweepCalls(context="llm", inputs=5)
    assert (scenario.world.links.shared, scenario.seeds, scenario.about) == (2e9, 3, 'it is "so"')
    assert (new.nodes, old.steps) == (2, ((0.0, 1),))
    assert scenario.world.contexts["llm"].load_s == {"": 2.0, "a10": 1.0}
    assert scenario.world.delays.poll_s == 1.0


CHANGES = {
    "links.shred=1 GB/s": "--set links.shred=1 GB/s: [world.links] shred is not a setting; did you mean shared?",
    "world.links.shared=1": "--set world.links.shared=1: [world.links] shared: 1 is not a rate: the unit of 1 is"
    ' missing; write "1 GB/s" or "1 Gbit/s"',
    "sources.nw.nodes=1": "--set sources.nw.nodes=1: there is no nw; did you mean new?",
    "workload.context=lm": "--set workload.context=lm: [workload] context: lm is not a context of this world; did you"
    " mean llm?",
    "name.x=1": "--set name.x=1: name is not a table",
    "seeds": "--set seeds: write key=value, as in --set world.links.shared='2 GB/s'",
    "seeds=many": "--set seeds=many: seeds must be a whole number, not text in quotes",
    "sources.old.capacity=[[5,1],[3,1]]": "--set sources.old.capacity=[[5,1],[3,1]]: [world.sources.old] capacity: 3 s"
    " does not come after 5 s",
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_error_of_a_changed_setting_names_the_change(change: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(TEXT, "seeds=2", change)
    assert str(caught.value) == CHANGES[change]


def test_error_in_an_unchanged_setting_also_names_the_changes() -> None:
    with pytest.raises(
        ConfigError, match=r"^s\.toml: line 16: \[world\.sources\.new\] kind = .* \(with --set seeds=2\)$"
    ):
        parse(TEXT.replace('kind = "a10"', 'kind = "b"'), "seeds=2")


def test_scenario_is_found_by_name_and_a_typo_gets_a_suggestion(tmp_path: Path) -> None:
    assert find_scenario("static-pool").name == "static-pool.toml"
    mine = tmp_path / "static-pool"
    mine.write_text(TEXT)
    assert find_scenario(mine) == mine
    with pytest.raises(ConfigError, match=r"^statik-pool: no such file, .*; did you mean static-pool\?$"):
        find_scenario("statik-pool")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_scenario(tmp_path)


# ---- the documentation

DOCUMENT = (Path(__file__).parents[2] / "docs" / "scenarios.md").read_text()


def test_documented_scenario_is_valid() -> None:
    [text] = re.findall(r"```toml\n(.*?)```", DOCUMENT, re.DOTALL)
    assert parse(text).world.sources[0].steps == ((0.0, 8), (900.0, 4))


def test_documented_settings_are_exactly_the_settings() -> None:
    tables = re.findall(r"^\| (at the top|`\[+world[^|]*) \|.*\n\|---\|---\|\n((?:\|.*\n)+)", DOCUMENT, re.MULTILINE)
    named = {
        head.strip("`[] ").removesuffix(".NAME"): set(re.findall(r"`([a-z_]+)`", " ".join(firsts(rows))))
        for head, rows in tables
    }
    assert named == {
        "at the top": set(setting_names(Scenario)),
        "world.devices": set(setting_names(DeviceKind)),
        "world.sources": set(setting_names(SourceModel)),
        "world.contexts": set(setting_names(ContextModel)),
        "world.contexts.NAME.engine.KIND": set(setting_names(EngineModel)),
        "world.links": set(setting_names(Links)),
        "world.delays": set(setting_names(Delays)),
    }
    assert all(f"`{name}`" in DOCUMENT for name in setting_names(Files))


def firsts(rows: str) -> list[str]:
    return [row.split("|")[1] for row in rows.splitlines()]


WORKLOADS = (Path(__file__).parents[2] / "docs" / "workloads.md").read_text()


def test_documented_workload_examples_are_valid() -> None:
    examples = re.findall(r"^```toml\n(.*?)^```", WORKLOADS, re.MULTILINE | re.DOTALL)
    assert len(examples) == 3
    for example in examples:
        msgspec.convert(tomllib.loads(example)["workload"], Workload, dec_hook=read_unit)  # type: ignore[call-overload]


def test_workload_page_names_every_kind_format_and_setting() -> None:
    kinds = {kind.__struct_config__.tag for kind in Workload.__args__}
    formats = {format.value for format in TraceFormat}
    settings = {field.encode_name for kind in Workload.__args__ for field in msgspec.structs.fields(kind)}
    assert kinds | formats | settings <= set(re.findall(r"\w+", WORKLOADS))
    told = {
        name for row in re.findall(r"^\| (`.*?) \|", WORKLOADS, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    }
    assert told <= kinds | formats | settings | {"kind"}
