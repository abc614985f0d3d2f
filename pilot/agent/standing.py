"""Whether a pilot still has what its batch job gave it: its scratch folder, and the process that started it.

A pilot without either leaves at once: its node is not its own any more. What its libraries fail of by then is no fault
of the contexts and calls that they hold.
"""

from __future__ import annotations

import errno

from stoker.pilot.agent.agent import Agent
from stoker.pilot.core.events import Unfit
from stoker.protocol.blocks import LossReason

_NO_FOLDER = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.EIO, errno.ENODEV, errno.ENXIO, errno.EACCES, errno.EPERM}
)


def check(agent: Agent) -> bool:
    """Tell the core if the pilot lacks something; whether it does."""
    agent.oom_kills.note_kills()
    if why := agent.scratch.fault():
        agent.handle(Unfit(why, LossReason.SCRATCH_GONE))
    elif why := agent.parent.fault():
        agent.handle(Unfit(why, LossReason.NODE_LOST))
    return bool(why)


def cannot_make(agent: Agent, error: OSError) -> bool:
    """Tell the core if an error of making a folder says that no folder can be made here; whether it does. A disk that
    is full is another matter: it may have room later."""
    if check(agent):
        return True
    if error.errno in _NO_FOLDER:
        agent.handle(Unfit(f"it can make no folder: {error}", LossReason.SCRATCH_GONE))
        return True
    return False
