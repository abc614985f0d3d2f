"""Shared parts of paper evaluations: options, exit status, processes, stored results and pages.

Each case runs once per release.
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
from benchmarks.tables import head, paragraph, row
from stoker.errors import StokerError
from stoker.manager.study.running import Tell, Workers
from stoker.whole_files import draft_of

RELEASE = stoker.__version__
DATA = ROOT.parent / "shared" / "data"
T = TypeVar("T")
U = TypeVar("U")


def number_parser(*, most: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isdecimal() or not 1 <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text}: a number from 1 to {most} is needed")
        return int(text)

    return read


OPTIONS: dict[str, dict[str, Any]] = {
    "out": {"type": Path, "help": "folder for page and records [docs/reproduction]"},
    "jobs": {"type": number_parser(most=1000), "default": os.cpu_count() or 1, "help": "processes [all cores]"},
    "skip": {"action": "store_true", "help": "exit with 0 if the data is missing"},
    "page-only": {"action": "store_true", "help": "write the page again from the record"},
    "quick": {"action": "store_true", "help": "a short run; needs --out"},
}


def options(paper: str, about: str | None, **own: dict[str, Any] | None) -> argparse.ArgumentParser:
    ask = argparse.ArgumentParser(prog=f"python -m benchmarks.papers.{paper}", description=about)
    for name, settings in own.items():
        option = name.replace("_", "-")
        ask.add_argument(f"--{option}", **(OPTIONS[option] if settings is None else settings))
    return ask


def parse_options(ask: argparse.ArgumentParser, arguments: list[str] | None) -> argparse.Namespace:
    asked = ask.parse_args(arguments)
    if getattr(asked, "quick", False) and asked.out is None and getattr(asked, "table", True):
        ask.error("--quick needs --out: its page must not replace the whole page")
    asked.out = asked.out or Path("docs/reproduction")
    if asked.out.exists() and not asked.out.is_dir():
        ask.error(f"--out {asked.out}: not a folder")
    return asked


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


def progress_printer(what: str) -> Callable[[int, int], None]:
    """Return a function that shows progress: one line in a terminal, up to ten lines elsewhere."""

    def tell(done: int, total: int) -> None:
        line = f"{what}: {done} of {total}"
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{line}\n" if done == total else f"\r{line}")
        elif done * 10 // total > (done - 1) * 10 // total:
            say(line)
        sys.stderr.flush()

    return tell


def run_tasks(do: Callable[[T], U], todo: Sequence[T], *, jobs: int) -> Iterator[tuple[int, U]]:
    """Call `do` for each task in up to `jobs` processes. Yield index and result of each task."""
    if jobs <= 1 or len(todo) <= 1:
        yield from ((place, do(task)) for place, task in enumerate(todo))
        return
    with Workers(partial(_run_task, do), count=min(jobs, len(todo))) as workers:
        yield from workers.each(list(enumerate(todo)), hear=lambda *_: None)


def _run_task(do: Callable[[T], U], task: tuple[int, T], tell: Tell) -> tuple[int, U]:  # noqa: ARG001 (Workers)
    return task[0], do(task[1])


def read_results(path: Path, kind: type[T]) -> T | None:
    """Return the content of a file, or None. Raises ValueError for another format."""
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} holds no results: {error}; remove it to compute them again") from error


def json_lines(several: Iterable[Any]) -> bytes:
    return b",\n".join(msgspec.json.encode(row, order="deterministic") for row in several)


def write_bytes(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with draft_of(path) as draft:
        draft.write_bytes(content)


def _name(case: Any) -> str:
    return str(case.name)


def write_parts(path: Path, parts: Mapping[str, Any]) -> None:
    """Write a JSON object with one line per part and per item of `runs`."""
    lines = [
        b'"%s": %s' % (name.encode(), b"[\n%s]" % json_lines(part) if name == "runs" else msgspec.json.encode(part))
        for name, part in parts.items()
    ]
    write_bytes(path, b"{\n" + b",\n".join(lines) + b"\n}\n")


class Store(Generic[T, U]):
    """Results by case name. `write` is called after each new result."""

    def __init__(self, found: Iterable[U], *, write: Callable[[], None]) -> None:
        self.found: dict[str, Any] = {result.case.name: result for result in list[Any](found)}
        self._write = write

    def get(self, case: T) -> U | None:
        return self.found.get(_name(case))

    def in_order(self) -> list[U]:
        return [self.found[name] for name in sorted(self.found)]

    def missing(self, cases: Iterable[T]) -> list[T]:
        every = {_name(case): case for case in cases}
        return [case for name, case in every.items() if name not in self.found or self.found[name].release != RELEASE]

    def bring(self, cases: Iterable[T], run: Callable[[T], U], *, tell: Callable[[str], None], jobs: int = 1) -> None:
        todo = self.missing(cases)
        for done, (place, result) in enumerate(run_tasks(run, todo, jobs=jobs), 1):
            self.found[_name(todo[place])] = result
            self._write()
            tell(f"{done} of {len(todo)}: {todo[place]}")

    def drop_others(self, cases: Iterable[T]) -> None:
        names = set(map(_name, cases))
        others = [name for name in self.found if name not in names]
        for name in others:
            del self.found[name]
        if others:
            self._write()


WIDTH = 120
_CODE, _KEPT = re.compile("`[^`]*`"), "\0"
"""Pattern of code between backquotes, which is not wrapped: `_KEPT` replaces its spaces."""


def write_page(path: Path, text: str) -> None:
    write_bytes(path, text.encode())
    sys.stdout.write(f"{path}\n")


def page(template: Path, **values: Any) -> str:
    """Return a template with its values; wrap paragraphs that start with a pilcrow."""
    blocks = template.read_text().format(**values).split("\n\n")
    return "\n\n".join(paragraph(block[2:]) if block.startswith("¶ ") else block for block in blocks)


def table(columns: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    return "\n".join([*head(*columns), *(row(*line) for line in lines), ""])


def wrapped_text(text: str) -> str:
    return "\n\n".join(map(_filled_block, text.split("\n\n")))


def _filled_block(block: str) -> str:
    head = block.partition("\n")[0]
    if head.startswith(("#", "|")):
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
