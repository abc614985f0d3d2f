"""Results that were computed, in one file: a case is computed again only if what computes it has changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from benchmarks.papers.slinfer.cases import Case, Result, code_digest, is_there, run
from stoker.whole_files import draft_of


class Records:
    """The results of a file, by case. Raises ValueError for a file that holds none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[str, Result] = {}
        if path.is_file():
            try:
                results = msgspec.json.decode(path.read_bytes(), type=list[Result])
            except msgspec.DecodeError as error:
                raise ValueError(f"{path} holds no results: {error}; remove it, and all is computed anew") from error
            self._found = {result.case.name: result for result in results}

    def get(self, case: Case) -> Result | None:
        """What came of a case, whatever computed it; None if nobody has run it."""
        return self._found.get(case.name)

    def bring(self, cases: Iterable[Case], *, tell: Callable[[str], None]) -> None:
        """Run the cases that were not run by the code that stands here, and keep each result at once. Systems that are
        not there are left out."""
        digests: dict[str, str] = {}
        todo = list({case.name: case for case in cases if is_there(case.system)}.values())
        for number, case in enumerate(todo, 1):
            code = digests.setdefault(case.system, code_digest(case.system))
            known = self.get(case)
            if known is not None and known.code == code:
                continue
            tell(f"{number} of {len(todo)}: {case.system}, {case.models} x {', '.join(case.sizes)}, {case.workload}")
            self._found[case.name] = msgspec.structs.replace(run(case), code=code)  # files may change meanwhile
            self._write()

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lines = b",\n".join(
            msgspec.json.encode(self._found[name], order="deterministic") for name in sorted(self._found)
        )
        with draft_of(self._path) as draft:
            draft.write_bytes(b"[" + lines + b"]\n")
