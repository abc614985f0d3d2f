"""Entry point of the `stoker` command. Ctrl-C during imports ends the command silently. After the imports, SIGTERM and
SIGHUP act like Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType

# ---- signals


_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_IGNORE_SIGNALS_S = 5.0
"""Seconds after a signal for which further signals are ignored, because a closing terminal may send SIGHUP twice. Later
signals kill the process.
"""


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP arrived (from `scancel`, `timeout`, or a closed terminal)."""


@contextlib.contextmanager
def treat_signals_as_ctrl_c() -> Iterator[list[int]]:
    """Raise Terminated in the `with` block at the first SIGTERM or SIGHUP. Yield a list that gets the received signal.

    Signals that are ignored (`nohup`), or that have a handler already, are left alone.
    """
    received: list[int] = []
    owner, ended_at = os.getpid(), 0.0

    def handle_signal(number: int, frame: FrameType | None) -> None:
        del frame
        nonlocal ended_at
        if os.getpid() == owner and not received:
            received.append(number)
            ended_at = time.monotonic()
            raise Terminated
        if os.getpid() != owner or time.monotonic() - ended_at > _IGNORE_SIGNALS_S:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    ours = [number for number in _SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, handle_signal)
    try:
        yield received
    finally:
        for number in ours:
            if signal.getsignal(number) is handle_signal:
                signal.signal(number, signal.SIG_DFL)


def flush_or_discard_output() -> None:
    """If the terminal is closed, discard the output."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def main() -> None:
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # otherwise SIGINT is ignored, as shells do for background jobs
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from stoker.manager.cli.main import main as run

    signal.signal(signal.SIGINT, before)
    with treat_signals_as_ctrl_c() as received:
        try:
            run()
        except (SystemExit, OSError) as ending:  # an OSError comes from a closed terminal
            if received and (isinstance(ending, OSError) or ending.code == 130):
                flush_or_discard_output()
                raise SystemExit(128 + received[0]) from None
            raise


if __name__ == "__main__":
    main()
