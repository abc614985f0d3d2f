"""What happened in a simulated run, one row an event, in columns: small enough for millions of calls.

A row has a time in seconds, what happened, and whom it concerns: a call, a library, a pilot, a block, each by number
(-1 = none); `value` depends on the event. Whoever wants text gets it from `Happened` and the tables of names.
"""

from __future__ import annotations

import enum
from array import array
from hashlib import blake2b


class Happened(enum.IntEnum):
    """Events of a run, and what `value` is."""

    CALL_CAME = 0
    """Its items."""
    CALL_BEGAN = 1
    """Its items."""
    CALL_ENDED = 2
    """Its items: they are done."""
    CALL_FAILED = 3
    """Its items."""
    LIBRARY_STARTED = 4
    """Its devices; 0 in old logs, where it has one."""
    LIBRARY_READY = 5
    """Seconds from the order to load."""
    LIBRARY_ENDED = 6
    PILOT_CAME = 7
    """Devices."""
    PILOT_WENT = 8
    """Devices."""
    BLOCK_ASKED = 9
    BLOCK_STARTED = 10
    BLOCK_OVER = 11
    CAPACITY = 12
    """Blocks that a source may have, from now on; `block` is the source's number."""
    BYTES_SHARED = 13
    """Bytes that were read from the shared file system."""
    BYTES_PEER = 14
    """Bytes that came from another pilot."""
    CALLS_CAME = 15
    """Where calls are counted: calls since the row of this kind before. So for those that follow."""
    CALLS_BEGAN = 16
    """Calls."""
    CALLS_BACK = 17
    """Calls that ran and wait again."""
    CALLS_ENDED = 18
    """Their items; `call` is their number."""
    CALLS_FAILED = 19
    """Calls."""
    SECONDS_USED = 20
    """Device-seconds of calls that ended."""
    SECONDS_LOST = 21
    """Device-seconds of calls that were cut off."""
    WAITED = 22
    """Seconds that `call` calls waited before they began, in the last rows of a run."""
    TOOK = 23
    """Seconds from the coming of `call` calls to their end, in the last rows of a run."""
    CALL_DUE = 24
    """When its deadline is, in seconds: a row beside that of its coming, for calls that have one."""
    CALL_LEFT = 25
    """Seconds of its run that were not for nothing: it runs no more, and goes on from a checkpoint, or from its
    beginning (0)."""
    PART_BEGAN = 26
    """The rank of another member of the gang that runs it; rank 0 has the rows of a call that runs alone."""
    PART_ENDED = 27
    """As above."""
    PART_LEFT = 28
    """As CALL_LEFT."""
    TOKEN_FIRST = 29
    """A call's time to first token, in seconds. This row and the next two stand beside the end of a call to an engine;
    one that failed has none."""
    TOKEN_MEAN = 30
    """Its mean time per output token, of those after the first."""
    TOKEN_GAP = 31
    """Its longest time from one token to the next."""
    TOKEN_LATE = 32
    """How late its latest token was, in seconds; 0 or less: it has met its objective. For calls that have one; infinity
    for one that failed. Where calls are counted, `call` calls of a class."""


class EventLog:
    """Rows, in order of time."""

    def __init__(self) -> None:
        self.at_s = array("d")
        self.what = array("B")
        self.call = array("q")
        self.library = array("l")
        self.pilot = array("l")
        self.block = array("l")
        self.value = array("d")

    def note(
        self, at_s: float, what: Happened, *, call: int = -1, library: int = -1, pilot: int = -1, block: int = -1,
        value: float = 0.0,
    ) -> None:  # fmt: skip
        """Add a row."""
        self.at_s.append(at_s)
        self.what.append(what)
        self.call.append(call)
        self.library.append(library)
        self.pilot.append(pilot)
        self.block.append(block)
        self.value.append(value)

    def __len__(self) -> int:
        """Rows."""
        return len(self.at_s)

    def digest(self) -> str:
        """The same for two runs in which the same happened."""
        digest = blake2b(digest_size=16)
        for column in (self.at_s, self.what, self.call, self.library, self.pilot, self.block, self.value):
            digest.update(column.tobytes())
        return digest.hexdigest()
