"""What an executor does about its blocks whenever Parsl asks for their status.

It cancels the jobs of drained blocks and of blocks whose pilots are all lost, and tells the manager how its blocks are.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Container, Iterable, Mapping
from typing import Protocol

from parsl.jobs.states import TERMINAL_STATES, JobState, JobStatus
from parsl.providers.base import ExecutionProvider

from stoker.manager.executor.blocks import Silent, most_pilots, show
from stoker.manager.executor.link import Link
from stoker.manager.factory import block_keys
from stoker.protocol.to_manager import ReleaseBlock, WantPilots
from stoker.units import show_seconds

logger = logging.getLogger(__name__)


class JobOwner(Protocol):
    """An executor, as far as the jobs of its blocks are concerned."""

    provider: ExecutionProvider
    blocks_to_job_id: dict[str, str]


class BlockUpkeep:
    """`lease_s`: how long a block's pilots may be away before its job is cancelled."""

    def __init__(self, owner: JobOwner, *, lease_s: float) -> None:
        self._owner = owner
        self._cancel_at: dict[str, float] = {}
        """When the job of each draining block is cancelled, on the monotonic clock."""
        self._silent = Silent(limit_s=lease_s)
        self._told: dict[str, str] = {}
        """The state of each block, as the manager was told last."""
        self._without_key: set[str] = set()
        """Blocks that have ended, whose key is removed."""

    def drain(self, blocks: Iterable[str], link: Link, *, within_s: float) -> None:
        """Have the pilots of these blocks end; their jobs are cancelled `within_s` later."""
        for block in blocks:
            self._cancel_at[block] = time.monotonic() + within_s
            link.tell(ReleaseBlock(block))

    def cancel_silent(self, status: Mapping[str, JobStatus], *, emptied: Container[str]) -> None:
        """Cancel running jobs whose pilots are all lost. `emptied`: blocks that had pilots and have none."""
        running = [block for block, job in status.items() if job.state is JobState.RUNNING]
        for block in self._silent.blocks_to_cancel(running, emptied=emptied, now=time.monotonic()):
            gone_s = show_seconds(self._silent.limit_s)
            if self._cancel(block):
                logger.warning("block %s: its pilots went %s ago, and its job still runs: cancelled", block, gone_s)

    def cancel_drained(self) -> None:
        """Cancel the jobs of blocks that have drained for long enough."""
        for block, at in list(self._cancel_at.items()):
            if time.monotonic() >= at:
                del self._cancel_at[block]
                self._cancel(block)

    def tell(self, status: Mapping[str, JobStatus], link: Link) -> None:
        """Tell the manager, for `stoker status`, how the blocks are, if that has changed. Ended ones lose their key."""
        said = {block: show(job) for block, job in status.items()}
        if said == self._told:
            return
        self._told = said
        ended = tuple(block for block, job in status.items() if job.state in TERMINAL_STATES)
        for block in set(ended) - self._without_key:
            block_keys.revoke(link.folder, block)
            self._without_key.add(block)
        link.tell(WantPilots(said, ended, most_pilots(self._owner.provider)))

    def _cancel(self, block: str) -> bool:
        job = self._owner.blocks_to_job_id.get(block)
        if job is None:
            return False
        self._owner.provider.cancel([job])
        return True
