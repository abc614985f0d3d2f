"""A manager whose fdatasync waits for the file GO and adds a line to SYNCED."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from stoker.manager import main

go, synced, really = Path(sys.argv[1]), Path(sys.argv[2]), os.fdatasync


def fdatasync(fd: int) -> None:
    while not go.exists():
        time.sleep(0.01)
    really(fd)
    with synced.open("a") as file:
        file.write("once\n")


if __name__ == "__main__":
    os.fdatasync = fdatasync
    sys.exit(main.main(sys.argv[3:]))
