"""Where the `stoker` command begins: Ctrl-C while Python still imports ends it without a word."""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command line and exit, as `stoker.manager.cli.main.main` does."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # else somebody wants it otherwise: a shell ignores it in the background
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from stoker.manager.cli.main import main as run

    signal.signal(signal.SIGINT, before)
    run()


if __name__ == "__main__":
    main()
