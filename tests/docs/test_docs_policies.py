"""docs/policies.md keeps its promises: its policy is the one in the file, does what it says, and can be deployed."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import fmean

import msgspec
import pytest

from stoker.config import load_site
from stoker.manager import policies
from stoker.manager.live.chosen import check_policies
from stoker.manager.study.running import run_one
from stoker.manager.study.scenario import load_scenario
from stoker.site import Duration

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "policies.md").read_text()
EXAMPLES = DOCS / "examples"


def test_the_table_has_those_that_ship() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \| (.*) \|$", TEXT, re.MULTILINE)
    assert rows == [(policy.name, policy.about) for policy in policies.SHIPPED.values()]


def test_the_policy_on_the_page_is_the_one_in_the_file_and_has_twenty_lines() -> None:
    (shown,) = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    assert shown == (EXAMPLES / "spare.py").read_text()
    assert len(shown.splitlines()) <= 20


def test_its_methods_are_those_that_the_page_names() -> None:
    assert "worth_loading" in vars(policies.LoadWhereWanted)
    row = r"^\| (?:dispatch|residency|provisioning) \|.*\| ((?:`\w+`(?:, )?)+) \| `(\w+)` \|$"
    rows = re.findall(row, TEXT, re.MULTILINE)
    assert len(rows) == 3
    for methods, base in rows:
        assert all(hasattr(getattr(policies, base), method) for method in re.findall(r"\w+", methods))


def test_it_makes_calls_in_bursts_wait_for_less(tmp_path: Path) -> None:
    scenario = load_scenario(EXAMPLES / "bursts.toml")
    workload = msgspec.structs.replace(scenario.workload, for_s=Duration(1200.0))
    short = msgspec.structs.replace(scenario, workload=workload)
    waits = {
        policy: fmean(run_one(short, policy=policy, seed=seed, folder=tmp_path).figures.wait_p95_s for seed in range(3))
        for policy in short.policies[:2]
    }
    default, spare = waits.values()
    assert spare < 0.9 * default


def test_the_site_file_on_the_page_deploys_it(tmp_path: Path) -> None:
    (text,) = re.findall(r"^```toml\n(\[policy\]\n.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    (tmp_path / "site.toml").write_text(text)
    (tmp_path / "spare.py").write_text((EXAMPLES / "spare.py").read_text())
    site = load_site(tmp_path / "site.toml")
    assert site.policy.name == f"{tmp_path}/spare.py:Spare"
    check_policies([site])


@pytest.mark.parametrize("name", re.findall(r"policies = \[.*\]", TEXT))
def test_the_scenario_names_it_as_the_page_says(name: str) -> None:
    assert name in (EXAMPLES / "bursts.toml").read_text()
