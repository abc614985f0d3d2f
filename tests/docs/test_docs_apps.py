"""Run the files and commands of docs/apps.md, which create applications for `stoker run`. `pip install` runs offline
and outside this environment.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from stoker.errors import StokerError
from stoker.manager.cli import apps
from stoker.manager.cli.main import cli

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "apps.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
LIMIT_S = 170


def block(language: str, text: str) -> str:
    return next(body for kind, body in BLOCKS if kind == language and text in body)


@pytest.fixture
def shell(tmp_path):
    tools, site = tmp_path / "tools", tmp_path / "installed"
    tools.mkdir()
    options = f"--quiet --no-deps --no-build-isolation --no-index --target {site}"
    for name, line in {
        "pip": f'"{sys.executable}" -m pip "$@" {options}',
        "python": f'"{sys.executable}" "$@"',
        "stoker": f'"{sys.executable}" -m stoker.manager.cli.main "$@"',
    }.items():
        (tools / name).write_text(f"#!/bin/sh\nexec {line}\n")
        (tools / name).chmod(0o755)
    path = f"{tools}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(site), "STOKER_HOME": str(tmp_path / "home")}
    environment.pop("MAKELEVEL", None)

    def run(commands: str) -> str:
        done = subprocess.run(
            ["bash", "-ec", commands], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT_S
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.mark.long
def test_application_of_the_page_is_found_and_runs(shell, tmp_path):
    folder = tmp_path / "word-scores"
    folder.mkdir()
    (folder / "word_scores.py").write_text(block("python", "def letters"))
    (folder / "pyproject.toml").write_text(block("toml", "word-scores"))
    shown = shell(block("bash", "pip install ./word-scores"))
    assert [line for line in shown.splitlines() if line] == ["quiz 12", "jazz 16", "tree 4"]
    assert re.search(r"word_scores +Score WORDS by how rare their letters are\.", shell("stoker run --help"))
    assert "--limit N" in shell("stoker run word-scores --help")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")),
    reason="needs torch and transformers",
)
def test_copy_of_a_shipped_application_is_found_and_runs(shell, tmp_path):
    from tuning import tiny

    tiny.put_into(tmp_path)
    (tmp_path / "claims.jsonl").write_text(
        '{"claim": "Water is wet.", "label": "SUPPORTS"}\n{"claim": "Fire is cold.", "label": "REFUTES"}\n'
    )
    shown = shell(block("bash", "mkdir my-facts"))
    assert "Find the prompt with which a model checks claims best." in shown
    assert "stoker.apps.fact_verification" not in "".join(
        path.read_text() for path in (tmp_path / "my-facts" / "my_facts").glob("*.py")
    )
    shown = shell("stoker run my_facts --model model --claims claims.jsonl --out run --format jsonl")
    assert "3 prompts x 2 claims = 6 inferences" in shown
    assert "stoker run my_facts " in shown
    rows = [json.loads(line) for line in (tmp_path / "run" / "results.jsonl").read_text().splitlines()]
    assert sorted({row["claim"] for row in rows}) == ["Fire is cold.", "Water is wet."]
    assert len(rows) == 6
    assert json.loads((tmp_path / "run" / "run.json").read_text())["app"] == "my_facts"


def test_page_names_every_public_module():
    import stoker

    named = set(re.findall(r"`stoker\.([a-z_]+)`", PAGE))
    assert set(stoker._MODULES) <= named


# ---- broken entry points


class Package:
    def __init__(self, name):
        self.name = name


@pytest.fixture
def declare(monkeypatch, tmp_path):
    """Declare additional entry points with modules in the test folder."""
    extra: list[EntryPoint] = []
    monkeypatch.syspath_prepend(tmp_path)

    def found(**wanted: str):
        mine = [one for one in extra if all(getattr(one, key) == value for key, value in wanted.items())]
        return [*entry_points(**wanted), *mine]

    monkeypatch.setattr(importlib.metadata, "entry_points", found)

    def add(group: str, name: str, value: str, package: str = "odd") -> None:
        point = EntryPoint(name, value, group)
        vars(point).update(dist=Package(package))
        extra.append(point)

    return add


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("1 / 0", "cannot be imported (odd_one:command, of the package odd): ZeroDivisionError: division by zero"),
        ("import no_such_thing", "odd_one needs the module no_such_thing, which is not installed"),
        ("", "cannot be imported (odd_one:command, of the package odd): AttributeError"),
        ("command = 3", "odd_one in stoker.apps is of type int, and must be a click command"),
        (None, "cannot be imported (odd_one:command, of the package odd): ModuleNotFoundError: No module named"),
    ],
)
def test_unusable_application_is_reported_in_one_sentence(declare, tmp_path, monkeypatch, text, says):
    if text is not None:
        (tmp_path / "odd_one.py").write_text(text)
    declare("stoker.apps", "odd_one", "odd_one:command")
    try:
        result = CliRunner().invoke(cli, ["run", "odd_one"])
        assert isinstance(result.exception, StokerError)
        assert says in str(result.exception)
        shown = " ".join(CliRunner().invoke(cli, ["run", "--help"]).output.split())
        assert "fact_verification Find the prompt" in shown
        assert "odd_one odd_one" in shown
    finally:
        sys.modules.pop("odd_one", None)


def test_unimportable_command_does_not_affect_other_commands(declare):
    declare("stoker.commands", "odd", "odd_two:command")
    shown = CliRunner().invoke(cli, ["--help"])
    assert shown.exit_code == 0
    assert "odd_two" in shown.output
    assert "tune" in shown.output
    assert CliRunner().invoke(cli, ["status", "--help"]).exit_code == 0


def test_package_cannot_replace_a_built_in_command(declare):
    before = CliRunner().invoke(cli, ["status", "--help"]).output
    assert "SESSION" in before
    declare("stoker.commands", "status", "odd_two:command")
    assert CliRunner().invoke(cli, ["status", "--help"]).output == before


def test_error_names_both_packages_that_declare_the_same_command(declare):
    declare("stoker.apps", "twice", "one:command", "one")
    declare("stoker.apps", "twice", "two:command", "two")
    result = CliRunner().invoke(cli, ["run", "twice"])
    assert "twice is declared twice in stoker.apps, by one (one:command) and two (two:command)" in str(result.exception)


def test_checkout_newer_than_its_installation_finds_its_apps(monkeypatch):
    before = {group: apps.list_entry_point_names(group) for group in (apps.APPS, apps.COMMANDS, apps.FORECASTS)}
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: [])
    assert {group: apps.list_entry_point_names(group) for group in before} == before
    assert CliRunner().invoke(cli, ["run", "fact_verification", "--help"]).exit_code == 0


def test_installation_without_entry_points_reports_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: [])
    monkeypatch.setattr(apps, "CHECKOUT_SETUP_FILE", tmp_path / "setup.cfg")
    result = CliRunner().invoke(cli, ["run", "fact_verification"])
    assert result.exit_code == 2
    assert "is older than Stoker's code: install Stoker again" in " ".join(result.output.split())


def test_command_groups_contain_click_commands():
    for group in (apps.APPS, apps.COMMANDS):
        for name in apps.list_entry_point_names(group):
            assert isinstance(apps.load_command(group, name), click.Command)
