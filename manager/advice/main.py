"""The advisor process: `python -m stoker.manager.advice.main --session DIR --channel FD`. `stoker.manager.live.advisor`
starts it. It runs at low priority and ends when the channel closes."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys

NICE = 10


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="stoker-advisor", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--session", required=True, metavar="DIR", help="session folder")
    parser.add_argument("--channel", required=True, type=int, metavar="FD", help="the socket of the manager")
    options = parser.parse_args(arguments)
    with contextlib.suppress(OSError):
        os.nice(NICE)  # lower the priority before the imports, which take most of the time
    from stoker.manager.advice.answers import serve_questions

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the client handles Ctrl-C in the user's terminal
    with socket.socket(fileno=options.channel) as channel:
        serve_questions(options.session, channel)
    return 0


if __name__ == "__main__":
    sys.exit(main())
