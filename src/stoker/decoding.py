"""What decoders raise for bytes that they cannot read.

msgspec raises more than its DecodeError: UnicodeDecodeError (a ValueError) for text that is not UTF-8, RecursionError
for values nested too deep, MemoryError and OverflowError for a length that no machine has. So does `json`.
"""

from __future__ import annotations

import msgspec

__all__ = ["UNREADABLE"]

UNREADABLE = (
    msgspec.DecodeError,
    ValueError,
    RecursionError,
    MemoryError,
    OverflowError,
)
"""Every exception that a decoder of msgspec or of `json` raises for damaged bytes."""
