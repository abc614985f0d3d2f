"""What a disk's refusal means."""

from __future__ import annotations

import errno

_NO_WRITES = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})


def takes_no_writes(error: BaseException | None) -> bool:
    """Whether this is a disk that is full, over its quota, or read-only."""
    return isinstance(error, OSError) and error.errno in _NO_WRITES
