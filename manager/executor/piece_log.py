"""What a program was handed of a call's pieces, so that a second run of the call can be held against it. Pure.

Of each piece eight bytes are kept. Those of the last 64 thousand pieces stay as they are; of older ones eight bytes
stand for a block of 1,024. So a stream may be endless, and a second run that differs is noticed at the piece, or, far
back, at the end of its block: always before the first piece that is new.
"""

from __future__ import annotations

import hashlib
from array import array

BLOCK = 1024
RECENT = 65_536


def digest_of(piece: bytes) -> int:
    """Eight bytes that stand for a piece."""
    return int.from_bytes(hashlib.blake2b(piece, digest_size=8).digest())


class PieceLog:
    """The digests of pieces, in order. `recent`: of how many the digests stay as they are."""

    def __init__(self, *, recent: int = RECENT) -> None:
        self.blocks: array[int] = array("Q")
        self.latest: array[int] = array("Q")
        """Of the pieces after the blocks."""
        self._recent = recent

    def __len__(self) -> int:
        return len(self.blocks) * BLOCK + len(self.latest)

    def add(self, piece: bytes) -> None:
        """One more piece was handed on."""
        self.latest.append(digest_of(piece))
        if len(self.latest) >= self._recent + BLOCK:
            self.blocks.append(digest_of(self.latest[:BLOCK].tobytes()))
            del self.latest[:BLOCK]


class Rerun:
    """A run of a call whose pieces are held against a log, in order."""

    def __init__(self, log: PieceLog) -> None:
        self._log = log
        self._block: array[int] = array("Q")
        """The digests of its pieces in the block that it is in, if it has given that from its beginning."""

    def first_difference(self, number: int, piece: bytes) -> int | None:
        """The number of the first piece that is known to differ, now that this one, which was handed on before, has
        come
        again; None if there is none. Far back it is the first one of a block."""
        log, digest = self._log, digest_of(piece)
        if not number % BLOCK:
            del self._block[:]
        if number % BLOCK == len(self._block):
            self._block.append(digest)
        kept_from = len(log.blocks) * BLOCK
        if number >= kept_from:
            return number if log.latest[number - kept_from] != digest else None
        if len(self._block) == BLOCK and log.blocks[number // BLOCK] != digest_of(self._block.tobytes()):
            return number + 1 - BLOCK
        return None
