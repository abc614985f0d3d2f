"""PBS, LSF and Grid Engine, for the factory: Parsl's providers submit, one listing tells of all jobs.

A job that is not listed any more is over; how it ended is in what it printed, if anywhere.
"""

from __future__ import annotations

import getpass
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from stoker.manager.factory.batch import BatchJobStatus, BatchTrouble, block_of
from stoker.manager.factory.listings import LSF_FIELDS, ListedJob, Read, read_grid_engine, read_lsf, read_pbs
from stoker.manager.factory.output import last_lines
from stoker.manager.factory.pacing import Pacer
from stoker.manager.factory.submitting import Submitter, is_not_now
from stoker.manager.protocol.blocks import BlockPhase
from stoker.manager.protocol.ids import BlockId
from stoker.site import ProviderKind, Site

_CANCEL = {ProviderKind.PBS: "qdel", ProviderKind.LSF: "bkill", ProviderKind.GRID_ENGINE: "qdel"}


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
        self._jobs = Submitter(site, session=session, folder=folder, command=command, pacer=pacer)

    def submit(self, block: BlockId) -> str:
        """Submit the job of a block; its id. Raises SubmissionRefused, BatchTrouble."""
        return self._jobs.submit(block)

    def query(self, jobs: Sequence[str]) -> Mapping[str, BatchJobStatus]:
        """The present state of these jobs. Raises BatchTrouble."""
        listed = self._list(jobs)
        return {job: self._status_of(job, listed.get(job)) for job in jobs}

    def cancel(self, jobs: Sequence[str]) -> None:
        """Cancel these jobs. Raises BatchTrouble."""
        command = _CANCEL[self._kind]
        said = self._jobs.commands.run([command, *jobs])
        if said.code and is_not_now(said.words):
            raise BatchTrouble(f"{command}: {said.words}")

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
            return BatchJobStatus(BlockPhase.ENDED, f"{how}: {'; '.join(output)}" if output else how)
        over = entry.phase is BlockPhase.ENDED
        return entry.status(now=time.time(), output=last_lines(self._jobs.folder, name) if over and name else [])

    def _list(self, jobs: Sequence[str] | None) -> dict[str, ListedJob]:
        """These jobs, or all jobs of this user that are not over."""
        match self._kind:
            case ProviderKind.PBS:
                if jobs is None:
                    jobs = self._say(["qselect", "-u", getpass.getuser()]).split()
                # Of a job that PBS has forgotten it complains, and lists the others.
                return self._read(["qstat", "-x", "-f", "-F", "json", *jobs], read_pbs) if jobs else {}
            case ProviderKind.LSF:
                return self._read(["bjobs", "-a", "-noheader", "-o", LSF_FIELDS], read_lsf)
            case ProviderKind.GRID_ENGINE:
                return self._read(["qstat", "-xml", "-u", getpass.getuser()], read_grid_engine)
            case kind:
                raise ValueError(f"{kind.value} jobs are not listed here")

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
