"""`stoker` with a pause for tests: `python held_run.py COUNT run APP ...` pauses after COUNT results until its folder
contains the file `go-on`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from pathlib import Path

del sys.path[0]  # `python -m stoker` does not search the folder of this file, so remove the folder

from stoker.manager.cli.main import main  # noqa: E402
from stoker.run_folder import Record, RecordLog  # noqa: E402

GO_ON = Path("go-on")
_append = RecordLog.append


def hold_after(count: int) -> None:
    """Make the log writer wait after `count` results."""
    left = count

    def append(self: RecordLog, records: Iterable[Record]) -> int:
        nonlocal left
        found = _append(self, records)
        left -= found
        while left <= 0 and not GO_ON.exists():
            time.sleep(0.02)
        return found

    RecordLog.append = append  # type: ignore[method-assign]


if __name__ == "__main__":
    hold_after(int(sys.argv.pop(1)))
    main(sys.argv[1:])
