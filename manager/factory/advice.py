"""What to do about a reason that the batch system gives, for reasons that do not end by themselves or concern a limit
of this user (pure)."""

from __future__ import annotations

import re

_NEVER = (
    (r"PartitionTimeLimit|\w*MaxWall\w*", "walltime is longer than is allowed there; shorten [provider] walltime"),
    (r"PartitionNodeLimit|\w*MaxNode\w*PerJob\w*", "nodes is more than is allowed there; lower [provider] nodes"),
    (r"\w*MaxGRES\w*PerJob\w*", "gpus is more than is allowed there; lower [provider] gpus"),
    (r"\w*MaxCpu\w*PerJob\w*", "cores is more than is allowed there; lower [provider] cores"),
    (r"\w*MaxMem\w*PerJob\w*", "memory is more than is allowed there; lower [provider] memory"),
    (r"BadConstraints", "no node has what [provider] constraint, cores, memory and gpus ask for; change them"),
    (r"InvalidAccount|AccountNotAllowed", "the account may not be used there; change [provider] account"),
    (r"InvalidQOS|QOSNotAllowed", "the QOS may not be used there; change [provider] qos"),
    (r"PartitionInactive|PartitionDown", ""),
)
"""Slurm's reasons for a pending job that stay until a person changes something, and what."""
_PARTITION = "the partition takes no jobs now; the job waits until an administrator opens it"

WAITS_FOR_ROOM = re.compile(r"temporarily unable to accept job|resource temporarily unavailable", re.IGNORECASE)
"""What `sbatch` says while it waits for room in Slurm's queue, and when it no longer does. Slurm has taken no job."""
FULL = re.compile(
    # Slurm says which limit it is; before 20.11 it did not, and its sentence names all of them.
    r"\b(Assoc|QOS)\w*Submit\w*Limit\b|^(?!.*\b(Assoc|QOS)\w).*job submit limit"
    r"|would exceed .*\blimit|maximum number of jobs already in queue"  # PBS
    r"|pending (job|slot)s? (threshold|limit)"  # LSF
    r"|only \d+ jobs are allowed",  # Grid Engine
    re.IGNORECASE,
)
"""Errors of a submission when there are too many jobs at the moment, of this user or of all. The batch system takes the
same job when others have ended. All other errors would be the same the next time."""


def of_pending(reason: str) -> str:
    """A pending job's reason; where it does not end by itself, with that fact and what to do."""
    word = reason.partition(",")[0].strip()
    for pattern, what in _NEVER:
        if re.fullmatch(pattern, word):
            return f"{reason}: the job never starts like this: {what}" if what else f"{reason}: {_PARTITION}"
    return reason


def of_submission(words: str) -> str:
    """The error of a submission that may succeed later; where a limit is the cause, with what to do."""
    if WAITS_FOR_ROOM.search(words):
        return f"{words}: Slurm's own queue is full (MaxJobCount), for all users; Stoker tries until Slurm takes jobs"
    if FULL.search(words):
        return (
            f"{words}: a limit of jobs in the queue is reached; Stoker submits again when some of them end; to stay"
            " below the limit lower [pilot] max_blocks"
        )
    return words
