"""Blocks that a program starts by itself, through Parsl: on this machine, or with a provider of Parsl's.

The program says now and then how they are; between two such words the manager knows better from the pilots that came.
People write such a block as they write the manager's own: Parsl's block 0 is `b0`.
"""

from __future__ import annotations

from stoker.manager.core.nouns import Note
from stoker.manager.core.state import State
from stoker.protocol.ids import show_block

_NOT_STARTED = ("pending", "unknown", "held")
_OVER = ("completed", "failed", "cancelled", "timeout", "missing", "scaled_in")
_RUNNING = "running"


def standing(state: State) -> dict[str, str]:
    """How each block is: what its program said last, unless its pilots or the end of the session say more."""
    came = {pilot.block for pilots in (state.pilots, state.gone_pilots) for pilot in pilots.values()}
    return {block: _now(state, text, came=block in came) for block, text in state.said_blocks.items()}


def emptied(state: State) -> tuple[str, ...]:
    """Blocks that have brought pilots and have none now, as their program calls them."""
    here = {pilot.block for pilot in state.pilots.values()}
    left = {pilot.block for pilot in state.gone_pilots.values()} - here
    return tuple(block for block in state.said_blocks if block in left)


def tell(state: State, subject: str) -> tuple[str, list[Note]] | None:
    """The headline of a block that is written as `b0`, and what happened to it; None if there is none."""
    found = next(((block, how) for block, how in standing(state).items() if show_block(block) == subject), None)
    if found is None:
        return None
    block, how = found
    pilots = [each for known in (state.gone_pilots, state.pilots) for each in known.values() if each.block == block]
    names = f", pilots {', '.join(pilot.id for pilot in pilots)}" if pilots else ", no pilot has come from it"
    notes = [(at, f"{pilot.id}: {text}") for pilot in pilots for at, text in pilot.notes]
    return f"block that the program started itself: {how}{names}", notes


def _now(state: State, said: str, *, came: bool) -> str:
    word = said.partition(":")[0]
    if word in _OVER:
        return said
    if state.ending:
        return "ended with the session" if came or word not in _NOT_STARTED else "ended before a pilot came"
    return _RUNNING if came and word in _NOT_STARTED else said
