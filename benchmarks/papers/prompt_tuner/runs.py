"""Many runs, over all cores. Each is kept in a folder, by its case and the release: an evaluation that was stopped goes
on where it was."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from pathlib import Path

import msgspec

from benchmarks.papers.common import RELEASE
from benchmarks.papers.prompt_tuner.cases import Case
from benchmarks.papers.prompt_tuner.simulate import Result, simulate
from stoker.errors import StokerError
from stoker.manager.sim.run import SimulationError
from stoker.manager.study.running import DiedError, Tell, Workers
from stoker.whole_files import draft_of

Found = dict[Case, Result]


class Runs:
    """The outcomes of runs, kept in a folder. `jobs` processes make the runs that are missing."""

    def __init__(self, folder: Path, *, jobs: int) -> None:
        self._folder = folder
        self._jobs = jobs

    def each(self, cases: Iterable[Case], *, tell: Callable[[int, int], None]) -> Found:
        every = list(dict.fromkeys(cases))
        found = {case: kept for case in every if (kept := self._kept(case)) is not None}
        for case, result in self._do([case for case in every if case not in found]):
            found[case] = result
            self.keep(case, result)
            tell(len(found), len(every))
        return found

    def keep(self, case: Case, result: Result) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with draft_of(self._path(case)) as draft:
            draft.write_bytes(msgspec.json.encode(_Kept(case, result)))

    def _do(self, todo: list[Case]) -> Iterator[tuple[Case, Result]]:
        if self._jobs <= 1 or len(todo) <= 1:
            yield from (_do(case, _deaf) for case in todo)
            return
        try:
            with Workers(_do, count=min(self._jobs, len(todo))) as workers:
                yield from workers.each(todo, hear=_deaf)
        except DiedError as error:
            raise SimulationError(f"the process that simulated {error.task} died ({error.how})") from None

    def _path(self, case: Case) -> Path:
        digest = blake2b(RELEASE.encode() + msgspec.json.encode(case), digest_size=12).hexdigest()
        return self._folder / f"{digest}.json"

    def _kept(self, case: Case) -> Result | None:
        try:
            kept = msgspec.json.decode(self._path(case).read_bytes(), type=_Kept)
        except (OSError, msgspec.DecodeError):
            return None
        return kept.result


class _Kept(msgspec.Struct, frozen=True):
    case: Case
    result: Result


def _do(case: Case, tell: Tell) -> tuple[Case, Result]:  # noqa: ARG001 (Workers)
    try:
        return case, simulate(case)
    except StokerError as error:
        raise SimulationError(f"{case}: {error}") from error
    except Exception as error:
        raise SimulationError(f"{case}: {type(error).__name__}: {error}") from error


def _deaf(*_: object) -> None:
    pass
