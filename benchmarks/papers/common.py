"""What the programs that write the pages on papers are asked with.

How the evaluation of a paper ends: its exit status, and what is said of a stop or a failure.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from stoker.errors import StokerError

# ---- asking


def number(*, most: int) -> Callable[[str], int]:
    """What reads a whole number from 1 to `most`."""

    def read(text: str) -> int:
        if not text.isdecimal() or not 1 <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text}: a number from 1 to {most} is wanted")
        return int(text)

    return read


# ---- evaluating


def exit_status(evaluate: Callable[[], int], *, what: str, kept: Path, missing: str = "", skip: bool = False) -> int:
    """Run an evaluation. Returns what it returns, 1 when it fails, 130 after Ctrl-C. `what`: the evaluation, in words;
    `kept`: where its results are kept. `missing`: the data that is not there, if any: then it is not run, and 2 is
    returned, or 0 with `skip`."""
    if missing:
        sys.stderr.write(f"{missing}: {what} is skipped\n")
        return 0 if skip else 2
    try:
        return evaluate()
    except (StokerError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write(f"\nstopped: the same again goes on with {kept}\n")
        return 130
