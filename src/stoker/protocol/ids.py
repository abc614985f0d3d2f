"""Identifiers, and their form for users."""

from __future__ import annotations

from typing import NewType

CallId = NewType("CallId", int)
"""`client number << 40 | sequence number`: made by the client, unique in its session."""
ClientId = NewType("ClientId", str)
PilotId = NewType("PilotId", str)
DeviceId = NewType("DeviceId", str)
"""`cpu:0`, `cuda:1`: unique on its pilot."""
LibraryId = NewType("LibraryId", int)
"""Numbered by the manager, unique in its session."""
RecipeKey = NewType("RecipeKey", str)
FunctionKey = NewType("FunctionKey", str)
"""Digest of the function's pickled bytes."""
BlockId = NewType("BlockId", str)
"""`b7`: numbered by the manager, unique in its session. For a Parsl provider's blocks: Parsl's numbers."""
SessionId = NewType("SessionId", str)

CLIENT_SHIFT = 40
_SEQUENCE = (1 << CLIENT_SHIFT) - 1


def make_call_id(*, client: int, sequence: int) -> CallId:
    return CallId(client << CLIENT_SHIFT | sequence)


def show_call(call: int) -> str:
    """Return `c-31877`, or `c-1.31877` for the second client."""
    client, sequence = call >> CLIENT_SHIFT, call & _SEQUENCE
    return f"c-{client}.{sequence}" if client else f"c-{sequence}"


def parse_call(text: str) -> CallId:
    """Return the id of `c-31877` or `31877`. Raises ValueError."""
    client, _, sequence = text.removeprefix("c-").rpartition(".")
    return make_call_id(client=int(client or 0), sequence=int(sequence))


def show_library(library: int) -> str:
    return f"lib-{library}"


def show_block(block: str) -> str:
    """Add the letter to Parsl's block numbers."""
    return f"b{block}" if block.isdecimal() else block
