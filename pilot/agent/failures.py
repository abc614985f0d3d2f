"""What the manager is told of a library or a call that failed here, and whose fault it was."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from stoker.manager.protocol.calls import Failure, FailureKind
from stoker.pilot.agent.library import Library
from stoker.pilot.agent.usage import tail
from stoker.pilot.cache import DiskError
from stoker.pilot.core.disk import takes_no_writes

if TYPE_CHECKING:
    from stoker.pilot.agent.agent import Agent


def is_ours(error: BaseException) -> bool:
    """Whether this pilot's disk is to blame for an error: another pilot may do better."""
    return isinstance(error, DiskError) or takes_no_writes(error)


def lacks_processes(error: BaseException) -> bool:
    """True if the node has no room for another process: its user's limit is reached, or there is no memory."""
    return isinstance(error, OSError) and error.errno in (errno.EAGAIN, errno.ENOMEM)


def no_process(reason: object) -> str:
    """What to say of a library whose process could not be made."""
    return (
        f"no process could be made for it: {reason}; end other processes there, or raise the limit of processes"
        " (ulimit -u) or of memory"
    )


def failure_of(agent: Agent, library: Library, kind: FailureKind, message: str, *, printed: bool = False) -> Failure:
    """The failure of a library, or of a call on it; `printed`: with the last lines of its log."""
    return Failure(
        kind=kind,
        message=message,
        pilot=agent.options.pilot,
        library=library.state.library,
        tail=tail(library.log) if printed else "",
        log=library.log,
    )


def load_failure(agent: Agent, library: Library, what: str, *, ours: bool) -> Failure:
    """Why a library will hold nothing; `ours`: for what this pilot lacks."""
    kind = FailureKind.PILOT if ours else FailureKind.CONTEXT
    return failure_of(agent, library, kind, f"{library.state.recipe.name} on {agent.options.pilot}: {what}")
