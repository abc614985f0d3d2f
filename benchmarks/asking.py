"""What the programs that write the pages on papers are asked with."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def number(*, most: int) -> Callable[[str], int]:
    """What reads a whole number from 1 to `most`."""

    def read(text: str) -> int:
        if not text.isdecimal() or not 1 <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text}: a number from 1 to {most} is wanted")
        return int(text)

    return read
