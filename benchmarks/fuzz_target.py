"""What a fuzzer needs to know of one reader of bytes."""

from __future__ import annotations

from collections.abc import Callable

Errors = tuple[type[BaseException], ...]


class Target:
    """One reader. `read` gets an input; it may raise `declared` errors and no others."""

    def __init__(
        self,
        name: str,
        *,
        read: Callable[[bytes], object],
        declared: Errors,
        right: list[bytes],
        share: int = 1,
        complete: bool = True,
    ) -> None:
        self.name = name
        self.read = read
        self.declared = declared
        self.right = right
        """Right inputs, to be damaged."""
        self.complete = complete
        """Right inputs are read without an error: they are no half of a conversation."""
        self.share = share
        """How many inputs it gets for each one of the others."""
