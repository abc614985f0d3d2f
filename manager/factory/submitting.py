"""Submission through one of Parsl's providers, and what its failure means: not now, or not at all."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from parsl.providers.errors import ExecutionProviderException

from stoker.manager.factory import advice, job_ids
from stoker.manager.factory.batch import BatchTrouble, SubmissionRefused, Unanswered, UnnamedJob, job_name
from stoker.manager.factory.commands import CommandRunner
from stoker.manager.factory.pacing import Pacer
from stoker.manager.factory.providers import BoundedProvider, provider_of
from stoker.protocol.ids import BlockId
from stoker.site import ProviderKind, Site

_NOT_NOW = re.compile(
    r"unable to contact|cannot connect|can't connect|could not connect|connect(ion)? (failure|refused|timed out|reset)"
    r"|timed out|zero bytes were transmitted|temporarily un|not responding|commlib error|LSF is down|standby mode"
    r"|no route to host|try again|please wait|could not establish a configuration source",
    re.IGNORECASE,
)
"""Scheduler errors that say nothing about the job."""
_NO_ANSWER = re.compile(r"timed out on send/recv|zero bytes were transmitted|connection reset", re.IGNORECASE)
"""Errors of these after which the scheduler may have taken the job."""


class Submitter:
    """Submits a session's blocks to a batch system. `command` gives the pilot's command of a block.

    `commands` run in `folder`, where scripts and output lie under the jobs' `names`, which are kept by job id.
    """

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
        self.session = session
        self.folder = folder
        self.commands = CommandRunner(limit_s=site.provider.command_limit_s, folder=folder, pacer=pacer)
        self.names: dict[str, str] = {}
        self._command = command
        self._provider = provider_of(site, shell=self.commands.shell, folder=folder)

    def submit(self, block: BlockId) -> str:
        """Submit the job of a block; its id. Raises SubmissionRefused, BatchTrouble."""
        name = job_name(self.session, block)
        job = _submit_through(self._provider, kind=self._kind, name=name, command=self._command(block))
        self.names[job] = name
        return job


def _submit_through(provider: BoundedProvider, *, kind: ProviderKind, name: str, command: str) -> str:
    """Submit a job of this name; its id. Raises SubmissionRefused and BatchTrouble, in the batch system's own words."""
    provider.begin(name)
    try:
        provider.submit(command, 1, name)
        why = "has not said why"
    except Unanswered as error:
        if advice.WAITS_FOR_ROOM.search(str(error)):
            raise BatchTrouble(advice.of_submission(str(error))) from error
        raise
    except ExecutionProviderException as error:
        why = str(error)
    said = provider.said
    if said is None:
        raise SubmissionRefused(f"{provider.label}: {why}")
    # Parsl takes some line of a banner for the id.
    if job := job_ids.in_sentence(kind, said.out) or job_ids.in_sentence(kind, said.err):
        return job
    words, job = said.words, job_ids.on_own_line(kind, said.out)
    if job and said.code == 0:
        return job
    if job or said.code == 0:
        raise UnnamedJob(f"no job id is certain in what it printed: {words}")
    if _NO_ANSWER.search(words):
        raise Unanswered(words)
    if is_not_now(words):
        raise BatchTrouble(advice.of_submission(words))
    raise SubmissionRefused(words)


def is_not_now(words: str) -> bool:
    """Whether an error of a batch system says that it is away or full, and nothing about what was asked."""
    return _NOT_NOW.search(words) is not None or advice.FULL.search(words) is not None
