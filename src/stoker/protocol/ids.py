"""Identifiers, and their text form for users."""

from __future__ import annotations

from typing import NewType

CallId = NewType("CallId", int)
"""`client number << 40 | sequence number`. The client creates this number, which is unique in the session."""
ClientId = NewType("ClientId", str)
PilotId = NewType("PilotId", str)
DeviceId = NewType("DeviceId", str)
"""Device name, unique on its pilot: `cpu:0`, `cuda:1`."""
LibraryId = NewType("LibraryId", int)
"""Library number from the manager, unique in the session."""
RecipeKey = NewType("RecipeKey", str)
FunctionKey = NewType("FunctionKey", str)
"""Digest of the pickled bytes of a function."""
BlockId = NewType("BlockId", str)
"""Block name (`b7`), unique in the session. A block of a Parsl provider has its Parsl id instead."""

CLIENT_SHIFT = 40
_SEQUENCE = (1 << CLIENT_SHIFT) - 1


def make_call_id(*, client: int, sequence: int) -> CallId:
    return CallId(client << CLIENT_SHIFT | sequence)


def format_call_id(call: int) -> str:
    """Return `c-31877`, or `c-1.31877` for the second client."""
    client, sequence = call >> CLIENT_SHIFT, call & _SEQUENCE
    return f"c-{client}.{sequence}" if client else f"c-{sequence}"


def parse_call_id(text: str) -> CallId:
    """Parse the call id `c-31877` or `31877`. Raises ValueError."""
    client, _, sequence = text.removeprefix("c-").rpartition(".")
    return make_call_id(client=int(client or 0), sequence=int(sequence))


def format_library_id(library: int) -> str:
    return f"lib-{library}"


def format_block_name(block: str) -> str:
    """Return a block's name: `b7` for Parsl's block `7`."""
    return f"b{block}" if block.isdecimal() else block
