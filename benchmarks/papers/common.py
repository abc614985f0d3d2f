"""Shared parts of paper evaluations: the command line, the record of runs, processes and the page.

A case runs once per release. The record is written after each run, so a stopped evaluation continues.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from textwrap import wrap
from typing import Any, Generic, TypeVar

import msgspec

import stoker
from benchmarks.harness import ROOT
from benchmarks.tables import row
from stoker.errors import StokerError
from stoker.manager.sim.world import SourceModel
from stoker.manager.study.running import Tell, Workers
from stoker.protocol.blocks import ProvisioningRule
from stoker.whole_files import draft_file

RELEASE = stoker.__version__
DATA = ROOT.parent / "shared" / "data"
"""Traces of other authors, which are not in this repository."""
Case = TypeVar("Case")
Result = TypeVar("Result")


def missing(path: Path, what: str) -> str:
    return "" if path.is_file() else f"{what} not here: {path}"


def number(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1000:
        raise argparse.ArgumentTypeError(f"{text}: a number from 1 to 1000 is needed")
    return int(text)


def folder(text: str) -> Path:
    if Path(text).exists() and not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text}: not a folder")
    return Path(text)


OPTIONS: dict[str, dict[str, Any]] = {
    "out": {"type": folder, "help": "folder for page and record [docs/reproduction]"},
    "jobs": {"type": number, "default": os.cpu_count() or 1, "help": "processes [all cores]"},
    "table": {"default": "all", "help": "what to run [%(default)s]"},
    "skip": {"action": "store_true", "help": "exit with 0 if the data is missing"},
    "page-only": {"action": "store_true", "help": "write the page again from the record"},
    "quick": {"action": "store_true", "help": "a short run; needs --out"},
}


def reproduce(
    paper: str, page: str, about: str | None, evaluate: Callable[[argparse.Namespace], str],
    arguments: list[str] | None, *, missing: str = "",
    check: Callable[[argparse.ArgumentParser, argparse.Namespace], None] = lambda *_: None, **own: Mapping[str, Any],
) -> int:  # fmt: skip
    """Run the command of a paper: write the page that `evaluate` returns. `own`: settings of each option."""
    ask = argparse.ArgumentParser(prog=f"python -m benchmarks.papers.{paper}", description=about)
    for name, settings in own.items():
        option = name.replace("_", "-")
        ask.add_argument(f"--{option}", **{**OPTIONS.get(option, {}), **settings})
    asked = ask.parse_args(arguments)
    if getattr(asked, "quick", False) and asked.out is None:
        ask.error("--quick needs --out: its page must not replace the whole page")
    asked.out = asked.out or Path("docs/reproduction")
    check(ask, asked)

    def written() -> int:
        asked.out.mkdir(parents=True, exist_ok=True)
        write_bytes(asked.out / page, evaluate(asked).encode())
        sys.stdout.write(f"{asked.out / page}\n")
        return 0

    stopped = "the page is unchanged; the same command continues"
    return exit_status(written, stopped=stopped, missing=missing, skip=getattr(asked, "skip", False))


def exit_status(evaluate: Callable[[], int], *, stopped: str, missing: str = "", skip: bool = False) -> int:
    """Run an evaluation. Return its status: 1 if it fails, 130 after Ctrl-C, 2 without data (0 with `skip`)."""
    if missing:
        say(f"{missing}: the evaluation is skipped")
        return 0 if skip else 2
    try:
        return evaluate()
    except (StokerError, ValueError) as error:
        say(f"{error}")
        return 1
    except KeyboardInterrupt:
        say(f"\nstopped: {stopped}")
        return 130


def say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def run_tasks(do: Callable[[Case], Result], todo: Sequence[Case], *, jobs: int) -> Iterator[tuple[int, Result]]:
    """Call `do` for each task in up to `jobs` processes. Yield index and result of each task."""
    if jobs <= 1 or len(todo) <= 1:
        yield from ((place, do(task)) for place, task in enumerate(todo))
        return
    with Workers(partial(_run_task, do), count=min(jobs, len(todo))) as workers:
        yield from workers.iterate_results(list(enumerate(todo)), on_progress=lambda *_: None)


def _run_task(do: Callable[[Case], Result], task: tuple[int, Case], tell: Tell) -> tuple[int, Result]:  # noqa: ARG001
    return task[0], do(task[1])


def run_all(what: str, do: Callable[[Case], Result], todo: Sequence[Case], *, jobs: int) -> list[Result]:
    """Call `do` for each task. Return the results in the order of the tasks."""
    found: dict[int, Result] = {}
    for place, result in run_tasks(do, todo, jobs=jobs):
        found[place] = result
        say(f"{what}: {len(found)} of {len(todo)}")
    return [found[place] for place in range(len(todo))]


def fixed_source(name: str, kind: str, blocks: int, *, devices: int = 1) -> SourceModel:
    """Return a simulated source whose blocks all start at once."""
    return SourceModel(
        name, kind, capacity=blocks, max_blocks=blocks, init_blocks=blocks, rule=ProvisioningRule.FIXED, devices=devices
    )


def write_bytes(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with draft_file(path) as draft:
        draft.write_bytes(content)


def write_record(path: Path, record: msgspec.Struct) -> None:
    """Write a struct as a JSON object, with one line per field and one line per item of a list of results."""
    lines = []
    for name in record.__struct_fields__:
        value = getattr(record, name)
        if isinstance(value, list | tuple) and value and not isinstance(value[0], int | float | str):
            text = b"[\n%s\n]" % b",\n".join(msgspec.json.encode(item, order="deterministic") for item in value)
        else:
            text = msgspec.json.encode(value, order="deterministic")
        lines.append(b'"%s":%s' % (name.encode(), text))
    write_bytes(path, b"{\n" + b",\n".join(lines) + b"\n}\n")


def case_name(case: msgspec.Struct) -> str:
    return msgspec.json.encode(case, order="deterministic").decode()


class Store(Generic[Case, Result]):
    """The record of a paper: a struct whose `runs` are results by case name."""

    def __init__(self, path: Path, kind: Callable[[], Any]) -> None:
        """Read the record, if there is one. Raises ValueError for another format."""
        self._path, self.kept = path, kind()
        if path.is_file():
            try:
                self.kept = msgspec.json.decode(path.read_bytes(), type=type(self.kept))
            except msgspec.DecodeError as error:
                raise ValueError(f"{path} holds no results: {error}; remove it to compute them again") from error
        self.found: dict[str, Any] = {result.case.name: result for result in self.kept.runs}

    def get(self, case: Any) -> Result | None:
        return self.found.get(case.name)

    def missing(self, cases: Iterable[Any]) -> list[Case]:
        every = {case.name: case for case in cases}
        return [case for name, case in every.items() if name not in self.found or self.found[name].release != RELEASE]

    def bring(self, cases: Iterable[Case], run: Callable[[Case], Result], *, jobs: int = 1) -> None:
        """Run the missing cases. Write the record after each case."""
        todo: list[Any] = self.missing(cases)
        for done, (place, result) in enumerate(run_tasks(run, todo, jobs=jobs), 1):
            self.found[todo[place].name] = result
            self.write()
            say(f"{done} of {len(todo)}: {todo[place]}")

    def drop_others(self, cases: Iterable[Any]) -> None:
        """Remove the results of cases that no table has."""
        names = {case.name for case in cases}
        if others := self.found.keys() - names:
            self.found = {name: result for name, result in self.found.items() if name not in others}
            self.write()

    def write(self) -> None:
        self.kept.runs = [self.found[name] for name in sorted(self.found)]
        write_record(self._path, self.kept)


WIDTH = 120
MISSING = "–"
"""Cell of a case that has not been run."""
_CODE, _KEPT = re.compile("`[^`]*`"), "\0"
"""Pattern of code between backquotes; `_KEPT` replaces spaces, so that code is not wrapped."""


def page(template: Path, **values: Any) -> str:
    """Insert the values into a template, and wrap its paragraphs.

    An iterator in `values` gives the rows of a table; the template has the table's head.
    """
    shown = {name: rows_text(value) if isinstance(value, Iterator) else value for name, value in values.items()}
    return wrapped_text(template.read_text().format(**shown))


def rows_text(rows: Iterable[Iterable[str]]) -> str:
    return "\n".join(row(*cells) for cells in rows)


def bullets(several: Iterable[str]) -> str:
    return "\n".join(f"- {one}" for one in several)


def wrapped_text(text: str) -> str:
    return "\n\n".join(map(_filled_block, text.split("\n\n")))


def _filled_block(block: str) -> str:
    head = block.partition("\n")[0]
    if head.startswith(("#", "|", "![")):
        return block
    is_list = head.startswith("- ")
    lines = []
    for item in block.split("\n- ") if is_list else [block]:
        words = _CODE.sub(lambda code: code[0].replace(" ", _KEPT), " ".join(item.removeprefix("- ").split()))
        lines += wrap(
            words, WIDTH, initial_indent="- " * is_list, subsequent_indent="  " * is_list, break_long_words=False,
            break_on_hyphens=False,
        )  # fmt: skip
    return "\n".join(lines).replace(_KEPT, " ") + "\n" * block.endswith("\n")
