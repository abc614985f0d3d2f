from __future__ import annotations

import inspect
import re
from collections import Counter
from pathlib import Path
from statistics import fmean

import msgspec
import pytest
from cli.command_line import Stoker
from core.builders import Cluster, devices, recipe
from sim.worlds import calls, model, source, world

from stoker.config import load_site
from stoker.manager import policies
from stoker.manager.live.session_policies import SEAM_MEMBERS, create_policies_for_sites, find_policy
from stoker.manager.sim.client import Arrival
from stoker.manager.sim.log import LoggedEvent
from stoker.manager.sim.run import Simulation
from stoker.manager.study.running import simulate_once
from stoker.manager.study.scenario import load_scenario
from stoker.site import Duration

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "policies.md").read_text()
EXAMPLES = DOCS / "examples"
PROGRAMS = re.findall(r"^```python\n(.*?)^```", TEXT[TEXT.index("## One of your own") :], re.MULTILINE | re.DOTALL)


def test_table_has_the_shipped_policies() -> None:
    table = TEXT[TEXT.index("| `default` |") :].partition("\n\n")[0]
    rows = re.findall(r"^\| `([a-z-]+)` \| (.*) \|$", table, re.MULTILINE)
    assert rows == [(policy.name, policy.about) for policy in policies.SHIPPED.values()]


def test_policy_on_the_page_equals_the_file_and_has_twenty_lines() -> None:
    shown = PROGRAMS[0]
    assert shown == (EXAMPLES / "spare.py").read_text()
    assert len(shown.splitlines()) <= 20


DISPATCH = TEXT[TEXT.index("## A dispatch policy, on one page") :].partition("\n## ")[0].rstrip()


def test_dispatch_policy_chapter_has_one_page() -> None:
    assert len(DISPATCH.splitlines()) <= 100
    assert (EXAMPLES / "least_served.py").read_text() in DISPATCH


def test_page_names_the_required_methods_of_a_dispatch_policy() -> None:
    asked = re.findall(r"^(?:- |\| )`(\w+)(?:\([^`]*\))?`(?:: | \|)", DISPATCH, re.MULTILINE)
    assert {*SEAM_MEMBERS["dispatch"]} <= {*asked}


def test_dispatch_policy_of_the_page_runs_in_the_simulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(DOCS.parent)
    (command,) = re.findall(r"^\$ stoker (.*)$", DISPATCH, re.MULTILINE)
    small = ["--seeds", "1", "--jobs", "1", "--set", "workload.inputs=400", "--set", "outputs.plots=false"]
    said = Stoker().ok(*command.split(), *small, "--out", str(tmp_path / "out")).stdout
    assert re.search(r"^ +least_served\.py:LeastServed ", said, re.MULTILINE)


def test_dispatch_policy_of_the_page_spreads_calls_and_starts_gangs() -> None:
    find_it = find_policy("least_served.py:LeastServed", folder=EXAMPLES)
    lab = world(source(4, init_blocks=4), model(load_s=1.0))
    alone = [*calls(8), *(Arrival(20.0 + 2.0 * n, "llm") for n in range(20))]
    gangs = [Arrival(60.0 + 5.0 * n, "llm", gang=(2, 3)) for n in range(3)]
    together = Simulation(lab, gangs, find_it.make()).run()
    assert (together.complete, together.failed) == (True, {})
    run = Simulation(lab, alone, find_it.make())
    outcome = run.run()
    assert (outcome.complete, outcome.failed) == (True, {})
    began = (p for p, what in zip(run.log.pilot, run.log.what, strict=True) if what == LoggedEvent.CALL_BEGAN)
    counts = Counter(began).values()
    assert len(counts) == 4
    assert max(counts) - min(counts) <= 2


def test_methods_in_the_table_of_base_classes_exist() -> None:
    assert "worth_loading" in vars(policies.LoadWhereWanted)
    row = r"^\| (?:dispatch|residency|provisioning) \|.*\| ((?:`\w+`(?:, )?)+) \| `(\w+)` \|$"
    rows = re.findall(row, TEXT, re.MULTILINE)
    assert len(rows) == 3
    for methods, base in rows:
        assert all(hasattr(getattr(policies, base), method) for method in re.findall(r"\w+", methods))


def test_hooks_and_settings_of_the_page_exist() -> None:
    told = dict(re.findall(r"^\| `(\w+)\((.*?)\)` \|", TEXT[TEXT.index("## Hooks and settings") :], re.MULTILINE))
    settings = {name for name, given in told.items() if given == "…"}
    hooks = {name: given for name, given in told.items() if name not in settings}
    base = policies.LoadWhereWanted
    asked = {
        "on_waiting_calls", "reservation_after_load", "on_idle_library", "honours", "lets_sleep", "on_timer",
        "on_failure_verdict", "on_pace_advice",
    }  # fmt: skip
    assert hooks.keys() == {name for name in vars(base) if not name.startswith("_")} - asked
    for name, given in hooks.items():
        assert [*inspect.signature(getattr(base, name)).parameters][1:] == given.split(", ")
    for name in settings:
        (row,) = re.findall(rf"^\| `{name}\(…\)` \| (.*)", TEXT, re.MULTILINE)
        has = [*inspect.signature(getattr(policies, name)).parameters.values()]
        assert set(re.findall(r"`(\w+)`", row)) == {each.name for each in has}
        values = {each.name: float(each.default) for each in has if each.default is not None}
        shown = {name: float(value) for name, value in re.findall(r"`(\w+)` \(([\d.]+)\)", row)}
        assert shown == values


def test_example_functions_and_classes_are_valid_policies(tmp_path: Path) -> None:
    (tmp_path / "policies.py").write_text(PROGRAMS[1])
    patient, prompt, favourites = (
        find_policy(f"policies.py:{name}", folder=tmp_path).make()
        for name in ("patient", "without_backlog", "Favourites")
    )
    residency = patient.residency
    assert isinstance(residency, policies.LoadWhereWanted)
    assert residency.patience_s == 60.0
    assert residency.provisioning is patient.provisioning
    assert isinstance(prompt.dispatch, policies.HottestFirst)
    assert prompt.dispatch.prefetch_s == 0.0
    here = Cluster(policies=lambda: favourites).define(recipe("a"))
    here.join("p1", of=devices(1)).join("p2", of=devices(1, kind="NVIDIA A10")).calls(1, context="a")
    assert [library.pilot.id for library in here.core.state.libraries.values()] == ["p2"]


def test_example_policy_shortens_the_wait_of_bursts(tmp_path: Path) -> None:
    scenario = load_scenario(EXAMPLES / "bursts.toml")
    workload = msgspec.structs.replace(scenario.workload, for_s=Duration(1200.0))
    short = msgspec.structs.replace(scenario, workload=workload)
    waits = {
        policy: fmean(
            simulate_once(short, policy=policy, seed=seed, folder=tmp_path).figures.wait_p95_s for seed in range(3)
        )
        for policy in short.policies[:2]
    }
    default, spare = waits.values()
    assert spare < 0.9 * default


def test_site_file_of_the_page_loads_the_example_policy(tmp_path: Path) -> None:
    files = re.findall(r"^```toml\n(\[policy\]\n.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    (text,) = [file for file in files if "spare.py" in file]
    (tmp_path / "site.toml").write_text(text)
    (tmp_path / "spare.py").write_text((EXAMPLES / "spare.py").read_text())
    site = load_site(tmp_path / "site.toml")
    assert site.policy.name == f"{tmp_path}/spare.py:Spare"
    create_policies_for_sites([site])
