"""Whether a pilot still has what its batch job gave it: its scratch folder, and the process that started it.

A pilot without either leaves at once: its node is not its own any more. What its libraries fail of by then is no fault
of the contexts and calls that they hold.
"""

from __future__ import annotations

import errno

from stoker.manager.protocol.blocks import LossReason
from stoker.pilot.agent.agent import Agent

_NO_FOLDER = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.EIO, errno.ENODEV, errno.ENXIO, errno.EACCES, errno.EPERM}
)


def look(agent: Agent) -> bool:
    """Have the pilot leave if it lacks something; whether it does."""
    if why := agent.scratch.fault():
        agent.leave(why, within_s=0.0, loss=LossReason.SCRATCH_GONE)
    elif why := agent.parent.fault():
        agent.leave(why, within_s=0.0, loss=LossReason.NODE_LOST)
    return bool(why)


def cannot_make(agent: Agent, error: OSError) -> bool:
    """Have the pilot leave if an error of making a folder says that no folder can be made here; whether it does. A disk
    that is full is another matter: it may have room later."""
    if look(agent):
        return True
    if error.errno in _NO_FOLDER:
        agent.leave(f"it can make no folder: {error}", within_s=0.0, loss=LossReason.SCRATCH_GONE)
        return True
    return False
