"""Results that were computed, in one file: a release computes each case once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from benchmarks.papers.common import read_results, unknown
from benchmarks.papers.slinfer.cases import Case, Result, is_there, run
from stoker.whole_files import draft_of


class Records:
    """The results of a file, by case. Raises ValueError for a file that holds none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found = {result.case.name: result for result in read_results(path, list[Result]) or ()}

    def get(self, case: Case) -> Result | None:
        """What came of a case, whatever computed it; None if nobody has run it."""
        return self._found.get(case.name)

    def bring(self, cases: Iterable[Case], *, tell: Callable[[str], None]) -> None:
        """Run the cases that this release has not run, and keep each result at once. Systems that are not there are
        left out."""
        todo = unknown((case for case in cases if is_there(case.system)), self.get)
        for number, case in enumerate(todo, 1):
            tell(f"{number} of {len(todo)}: {case.system}, {case.models} x {', '.join(case.sizes)}, {case.workload}")
            self._found[case.name] = run(case)
            self._write()

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lines = b",\n".join(
            msgspec.json.encode(self._found[name], order="deterministic") for name in sorted(self._found)
        )
        with draft_of(self._path) as draft:
            draft.write_bytes(b"[" + lines + b"]\n")
