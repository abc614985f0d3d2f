"""Every step of docs/tutorial.md runs on this machine in order and prints the page's output."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from docs.pages import ROOT, blocks, text_of

PAGE = "docs/tutorial.md"
SESSION = "rwcz"
"""The session id on the page, which differs in each run."""
NOT_RUN = {
    "git clone REPOSITORY stoker": "REPOSITORY is the address of the page's repository",
    "cd stoker": "the shell of the reader",
    "make install EXTRAS= DEMO=": "minutes; test_install_of_the_page_takes_no_extras reads what it would run",
    ". .venv/bin/activate": "the shell of the reader; the walks put this environment on their PATH",
    "mkdir tutorial && cd tutorial": "the folder of the test",
}
FAILS = "stoker run ./factors.py --session rwcz"
"""This command succeeds at first, and fails after `numbers.txt` has got a wrong line."""

SLURM = frozenset(
    {
        "stoker init --output site.toml",
        "cat site.toml",
        "stoker doctor site.toml",
        "stoker up site.toml --dry-run",
        "stoker up site.toml",
    }
)
"""Commands whose output on the page comes from a cluster."""
BATCH_SYSTEMS = ("sbatch", "condor_submit", "bsub", "qconf", "qsub", "kubectl")
"""Commands that identify a batch system; the test hides these commands."""


@dataclass(frozen=True)
class Step:
    """A step of the page: a file to write, or a command with its output lines."""

    file: str = ""
    text: str = ""
    command: str = ""
    shown: tuple[str, ...] = ()


def steps() -> Iterator[Step]:
    """Yield the page's steps in order. A Python block begins with its file name."""
    for block in blocks(PAGE):
        if block.language == "python":
            yield Step(file=re.match(r'"""(\w+\.py): ', block.text)[1], text=block.text)  # type: ignore[index]
            continue
        for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
            command, *shown = part.splitlines()
            yield Step(command=" ".join(command.partition("  #")[0].split()), shown=tuple(filter(None, shown)))


_UNIT = r"(?:ms|s|min|h|KB|kB|MB|GB)"


def pattern(line: str) -> re.Pattern[str]:
    """Return a pattern for a line of the page. Words with a digit, units after such words, and session ids may differ.
    `…` is any text.
    """
    words = line.split()
    found = r"\s*"
    for before, word in zip(["", *words], words, strict=False):
        if word == "…":
            found += ".*"
            continue
        found += r"\s+" if before else ""
        if re.search(r"\d", word):
            found += r"\S+"
        elif before == "session":
            found += r"\w{4}"
        elif re.search(r"\d", before) and re.fullmatch(_UNIT, word):
            found += _UNIT
        else:
            found += re.escape(word)
    return re.compile(found)


def missing(shown: tuple[str, ...], output: str) -> list[str]:
    """Return the lines of the page that the output lacks, in order. A line `...` stands for any number of lines."""
    lines = iter(output.splitlines())
    return [
        line for line in shown if line.strip() != "..." and not any(pattern(line).fullmatch(real) for real in lines)
    ]


def walk(
    folder: Path, run: Callable[[str], subprocess.CompletedProcess[str]], *, differs: frozenset[str] = frozenset()
) -> None:
    """Write the files of the page and run its commands in this folder. Outputs of commands in `differs` depend on the
    machine and are not compared.
    """
    session = SESSION
    for step in steps():
        if step.file:
            (folder / step.file).write_text(step.text)
            continue
        if step.command in NOT_RUN:
            continue
        command = step.command.replace(SESSION, session)
        done = run(f"exec 2>&1; {command}")
        told = f"$ {command}\n{done.stdout}"
        fails = step.command == FAILS and "ninety" in (folder / "numbers.txt").read_text()
        if step.command != "stoker doctor":  # doctor may fail here: this machine may lack something
            assert (done.returncode != 0) == fails, told
        if step.command == "stoker up site.toml":
            session = re.findall(r"^session (\w{4}) is up", done.stdout, re.MULTILINE)[0]
        shown = () if step.command in differs else tuple(line.replace(SESSION, session) for line in step.shown)
        assert not (lacks := missing(shown, done.stdout)), f"{lacks}\n{told}"


def test_page_is_short_and_names_each_skipped_step() -> None:
    assert len(text_of(PAGE).split()) <= 1_230
    assert set(NOT_RUN) <= {step.command for step in steps()}


def test_install_of_the_page_takes_no_extras() -> None:
    (command,) = (step.command for step in steps() if step.command.startswith("make install"))
    said = subprocess.run(
        ["make", "-n", "-B", *command.split()[1:]], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert 'install --quiet -c constraints.txt -e "."' in said.stdout


@pytest.mark.long
def test_tutorial_steps_work_on_this_machine(tmp_path: Path) -> None:
    commands = tmp_path / "bin"
    commands.mkdir()
    for place in reversed(os.get_exec_path()):
        for program in Path(place).glob("*"):
            if program.name not in BATCH_SYSTEMS and not (commands / program.name).is_symlink():
                (commands / program.name).symlink_to(program)
    folder = tmp_path / "tutorial"
    folder.mkdir()
    environ = {
        **os.environ,
        "STOKER_HOME": str(tmp_path / "home"),
        "PYTHONUNBUFFERED": "1",
        "PATH": f"{Path(sys.executable).parent}:{commands}",
    }

    def run(command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", "-c", command], cwd=folder, env=environ, capture_output=True, text=True, timeout=120
        )

    try:
        walk(folder, run, differs=SLURM)
    finally:
        run("stoker down")
