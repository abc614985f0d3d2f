"""What becomes of the first blocks of a session that has just come up, as far as it is known within seconds."""

from __future__ import annotations

import time
from collections.abc import Sequence

from stoker.manager.cli.ask import Observer
from stoker.protocol import show_blocks
from stoker.protocol.blocks import BlockPhase
from stoker.protocol.session import SessionFolder
from stoker.protocol.to_client import Status
from stoker.site import Site

_ANSWER_S = 20.0
"""How long to wait for what the batch systems say to the first blocks."""
_REASONS_S = 5.0
"""How long to wait for why they are in the queue: batch systems tell that at their next look."""
_ASK_EVERY_S = 0.25
_REFUSED = "refused"


def heard(folder: SessionFolder, sites: Sequence[Site], *, wait: bool) -> Status:
    """The session, once the batch systems have answered for all blocks that are asked for, or take too long."""
    first = sum(site.pilot.init_blocks for site in sites)
    until = time.monotonic() + (_ANSWER_S if first and wait else 0)
    answered = False
    with Observer(folder) as observer:
        while True:
            status = observer.status()
            asked = [job for job in status.jobs if job.phase == BlockPhase.ASKED.value]
            silent = [job for job in show_blocks.pending_of(status.jobs) if not job.reason]
            if status.trouble or (not asked and (status.jobs or status.ended_blocks or status.pilots)):
                if not answered:
                    answered, until = True, time.monotonic() + _REASONS_S
                if not silent:
                    return status
            if time.monotonic() > until:
                return status
            time.sleep(_ASK_EVERY_S)


def nothing_came(status: Status) -> bool:
    """Whether blocks are over, and there is nothing else."""
    return bool(status.ended_blocks) and not status.jobs and not status.pilots


def refused(status: Status) -> bool:
    """Whether all that was submitted was refused. What is asked for meanwhile would be, too."""
    taken = [job for job in status.jobs if job.phase != BlockPhase.ASKED.value]
    return list(status.ended_blocks) == [_REFUSED] and not taken and not status.pilots


def story(folder: SessionFolder) -> str:
    """What became of the first block."""
    with Observer(folder) as observer:
        return observer.story("b1").headline
