"""PBS, LSF and Grid Engine, for the factory: Parsl's providers submit, one listing tells of all jobs.

PBS and LSF list jobs for a while after their ends. Of a job that a listing lacks, the accounting is asked (`qacct`,
`bhist`); where that does not know it either, the job is absent, and only its output may say how it ended.
"""

from __future__ import annotations

import getpass
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from stoker.manager.factory.batch import BatchJobStatus, BatchTrouble, block_of, job_name
from stoker.manager.factory.listings import (
    LSF_FIELDS,
    ListedJob,
    Read,
    read_bhist,
    read_grid_engine,
    read_lsf,
    read_pbs,
    read_qacct,
)
from stoker.manager.factory.output import last_lines
from stoker.manager.factory.pacing import Pacer
from stoker.manager.factory.submitting import Submitter, is_not_now
from stoker.protocol.blocks import BlockPhase
from stoker.protocol.ids import BlockId
from stoker.site import ProviderKind, Site

log = logging.getLogger("stoker.factory")

_CANCEL = {ProviderKind.PBS: "qdel", ProviderKind.LSF: "bkill", ProviderKind.GRID_ENGINE: "qdel"}
_ACCOUNTING: dict[ProviderKind, tuple[list[str], Callable[[str], ListedJob | None]]] = {
    ProviderKind.LSF: (["bhist", "-l"], read_bhist),
    ProviderKind.GRID_ENGINE: (["qacct", "-j"], read_qacct),
}
"""The command that shows a job that is no longer listed. PBS lists such jobs itself (`qstat -x`)."""
_ONE_BY_ONE = 3
"""One query asks the accounting about up to this many jobs: the command may read a long file each time."""
_PBS_ID = re.compile(r"\d+(\[\d*\])?(\.\S+)?")


class ListedBatch:
    """A `Batch`. `command` gives the pilot's command of a block; scripts and output lie in `folder`."""

    def __init__(
        self,
        site: Site,
        *,
        session: str,
        folder: Path,
        command: Callable[[BlockId], str],
        pacer: Pacer | None = None,
    ) -> None:
        self._kind = site.provider.kind
        self._accounting = True
        self._jobs = Submitter(site, session=session, folder=folder, command=command, pacer=pacer)

    def submit(self, block: BlockId) -> str:
        """Submit the job of a block; its id. Raises SubmissionRefused, BatchTrouble."""
        return self._jobs.submit(block)

    def query(self, jobs: Sequence[str]) -> Mapping[str, BatchJobStatus]:
        """The present state of these jobs. Raises BatchTrouble."""
        listed = self._list(jobs)
        listed |= self._accounted([job for job in jobs if job not in listed])
        return {job: self._status_of(job, listed.get(job)) for job in jobs}

    def cancel(self, jobs: Sequence[str]) -> None:
        """Cancel these jobs. Raises BatchTrouble."""
        self._cancel([_CANCEL[self._kind], *jobs])

    def cancel_named(self, blocks: Sequence[BlockId]) -> None:
        """Cancel every job of these blocks, also jobs that no listing shows. Raises BatchTrouble."""
        for block in blocks:
            name = job_name(self._jobs.session, block)
            match self._kind:
                case ProviderKind.PBS:
                    if jobs := self._select(["-N", name]):
                        self.cancel(jobs)
                case ProviderKind.LSF:
                    self._cancel(["bkill", "-J", name, "0"])
                case _:
                    self._cancel(["qdel", name])

    def _cancel(self, words: list[str]) -> None:
        said = self._jobs.commands.run(words)
        if said.code and is_not_now(said.words):
            raise BatchTrouble(f"{words[0]}: {said.words}")

    def find(self) -> Mapping[str, BlockId]:
        """Jobs of the session that are listed, by their id. Raises BatchTrouble."""
        found = {}
        for job, entry in self._list(None).items():
            block = block_of(entry.name, session=self._jobs.session)
            if block is not None:
                found[job] = block
                self._jobs.names[job] = entry.name
        return found

    def _status_of(self, job: str, entry: ListedJob | None) -> BatchJobStatus:
        name = self._jobs.names.get(job, entry.name if entry else "")
        if entry is None:
            output = last_lines(self._jobs.folder, name) if name else []
            how = "no longer in the queue"
            return BatchJobStatus(BlockPhase.ENDED, f"{how}: {'; '.join(output)}" if output else how, absent=True)
        over = entry.phase is BlockPhase.ENDED
        return entry.status(now=time.time(), output=last_lines(self._jobs.folder, name) if over and name else [])

    def _list(self, jobs: Sequence[str] | None) -> dict[str, ListedJob]:
        """These jobs, or all jobs of this user that are not over."""
        match self._kind:
            case ProviderKind.PBS:
                if jobs is None:
                    jobs = self._select([])
                # Of a job that PBS has forgotten it complains, and lists the others.
                return self._read(["qstat", "-x", "-f", "-F", "json", *jobs], read_pbs) if jobs else {}
            case ProviderKind.LSF:
                return self._read(["bjobs", "-a", "-noheader", "-o", LSF_FIELDS], read_lsf)
            case ProviderKind.GRID_ENGINE:
                return self._read(["qstat", "-xml", "-u", getpass.getuser()], read_grid_engine)
            case kind:
                raise ValueError(f"{kind.value} jobs are not listed here")

    def _select(self, options: list[str]) -> list[str]:
        """Jobs of this user that PBS lists as not over; `options` choose among them."""
        words = self._say(["qselect", "-u", getpass.getuser(), *options]).split()
        return [word for word in words if _PBS_ID.fullmatch(word)]

    def _accounted(self, jobs: Sequence[str]) -> dict[str, ListedJob]:
        """Ask the accounting about these jobs, which the listing lacks."""
        if not self._accounting or self._kind not in _ACCOUNTING:
            return {}
        command, read = _ACCOUNTING[self._kind]
        found = {}
        for job in jobs[:_ONE_BY_ONE]:
            try:
                row = read(self._jobs.commands.run([*command, job]).out)
            except BatchTrouble as error:
                self._accounting = False
                log.warning("how jobs ended is not known from now on: %s", error)
                break
            # Grid Engine gives the numbers of old jobs to new ones.
            if row is not None and row.name in ("", self._jobs.names.get(job, row.name)):
                found[job] = row
        return found

    def _read(self, words: list[str], read: Read) -> dict[str, ListedJob]:
        text = self._say(words)
        try:
            return read(text)
        except (ValueError, RecursionError, AttributeError, KeyError, TypeError) as error:  # not what it always prints
            raise BatchTrouble(f"{words[0]} has printed what cannot be read ({error}): {text[:80]!r}") from error

    def _say(self, words: list[str]) -> str:
        said = self._jobs.commands.run(words)
        nothing = "no unfinished job found" in said.err.lower() or "no job found" in said.err.lower()
        if said.code and not said.out.strip() and not nothing and "Unknown Job Id" not in said.err:
            raise BatchTrouble(f"{words[0]}: {said.words}")
        return said.out
