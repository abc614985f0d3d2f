"""Blocks and sources in words."""

from __future__ import annotations

from stoker.manager.core.sources import Block, SourceState
from stoker.protocol.blocks import BlockPhase, BlockStatus
from stoker.protocol.show_status import READ_JOB, SILENT_S, is_suspended
from stoker.units import show_seconds


def tell(now: float, block: Block) -> BlockStatus:
    """A block for `stoker status`."""
    return BlockStatus(
        block=block.id,
        source=block.source.source.name,
        phase=block.phase.value,
        job=block.job,
        reason=block.leaving if block.leaving and not block.reason else block.reason,
        since_s=now - block.since,
        expected_in_s=max(0.0, block.expected_at - now) if block.expected_at else 0.0,
        pilots=tuple(block.pilots),
        emptied_s=max(0.001, now - block.emptied_at) if block.emptied_at is not None else 0.0,
        leaving=bool(block.leaving),
    )


def in_words(now: float, block: Block) -> str:
    """`pending: Priority, expected to start in 11 min`."""
    words = block.phase.value + (f": {block.reason}" if block.reason else "")
    if block.expected_at > now and block.phase is BlockPhase.PENDING:
        words += f", expected to start in {show_seconds(block.expected_at - now)}"
    silent = block.phase is BlockPhase.RUNNING and block.coming and now - block.since > SILENT_S
    if silent and not is_suspended(block.reason):
        words += f" for {show_seconds(now - block.since)} without a pilot: {READ_JOB}"
    return words


def failing(source: SourceState) -> str:
    """What the last blocks of a source say that were of no use; empty if there is nothing to say."""
    if source.stopped:
        return f"no more jobs are asked for: {source.stopped}"
    if source.hold:
        return f"a job was held: {source.hold}"
    times = source.failures or source.short_lived
    if source.failures:
        often = f", {times} times in a row" if times > 1 else ""
        said = f"its last block was of no use{often}" if source.useless else f"no pilot came of its last block{often}"
    elif times > 1:
        said = f"{times} blocks in a row brought pilots that loaded nothing"
    else:
        return ""
    return f"{said}: {source.last_failure}"
