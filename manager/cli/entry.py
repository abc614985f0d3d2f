"""Where the `stoker` command begins: Ctrl-C while Python still imports ends it without a word, and later SIGTERM and
SIGHUP end it as Ctrl-C does, so that it leaves nothing behind."""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command line and exit, as `stoker.manager.cli.main.main` does."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # else somebody wants it otherwise: a shell ignores it in the background
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from stoker.manager.cli.endings import as_ctrl_c, drop_unwritten
    from stoker.manager.cli.main import main as run

    signal.signal(signal.SIGINT, before)
    with as_ctrl_c() as came:
        try:
            run()
        except (SystemExit, OSError) as ending:  # OSError: the terminal that something was said to is closed
            if came and (isinstance(ending, OSError) or ending.code == 130):
                drop_unwritten()
                raise SystemExit(128 + came[0]) from None
            raise


if __name__ == "__main__":
    main()
