"""`python -P -m stoker.pilot.zygote SOCKET PARENT SCRATCH`: the zygote that an agent starts."""

from __future__ import annotations

import os
import signal
import socket
import sys

from stoker.folders import working_folder_if_exists
from stoker.pilot.zygote import processes
from stoker.pilot.zygote.server import ZygoteServer


def main() -> None:
    number, parent, scratch = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    del sys.argv[1:]  # hidden from user functions that read sys.argv
    processes.die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        return
    os.set_inheritable(number, False)
    for folder in working_folder_if_exists():
        if folder not in sys.path:
            sys.path.append(folder)  # for modules next to the user's program
    ZygoteServer(socket.socket(fileno=number), scratch=scratch).run()


if __name__ == "__main__":
    main()
