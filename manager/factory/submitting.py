"""Submission through one of Parsl's providers, and what its failure means: not now, or not at all."""

from __future__ import annotations

import re

from parsl.providers.errors import ExecutionProviderException

from stoker.manager.factory.batch import BatchTrouble, SubmissionRefused
from stoker.manager.factory.providers import Bounded

_NOT_NOW = re.compile(
    r"unable to contact|cannot connect|can't connect|could not connect|connect(ion)? (failure|refused|timed out|reset)"
    r"|timed out|zero bytes were transmitted|temporarily un|not responding|commlib error|LSF is down|standby mode"
    r"|no route to host|try again|please wait",
    re.IGNORECASE,
)
"""Scheduler errors that say nothing about the job. All others would be said of it again."""


def submit_through(provider: Bounded, *, name: str, command: str) -> str:
    """Submit a job of this name; its id. Raises SubmissionRefused and BatchTrouble, in the batch system's own words."""
    provider.begin(name)
    try:
        job = provider.submit(command, 1, name)
    except ExecutionProviderException as error:
        job = None
        if provider.said is None:
            raise SubmissionRefused(f"{provider.label}: {error}") from error
    if job:
        return str(job)
    said = provider.said
    words = said.words if said is not None else f"{provider.label} has not said why"
    if said is not None and said.code == 0:
        raise BatchTrouble(f"no job id in what it printed: {words}")
    if is_not_now(words):
        raise BatchTrouble(words)
    raise SubmissionRefused(words)


def is_not_now(words: str) -> bool:
    """Whether an error of a batch system says that it cannot be reached, and nothing about what was asked."""
    return _NOT_NOW.search(words) is not None
