"""What every test may rely on."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Ctrl-C works in the programs that tests start, also where the tests themselves run in the background: a shell
    starts `pytest &` with SIGINT ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
