"""What every test may rely on."""

from __future__ import annotations

import os
import signal


def pytest_configure() -> None:
    """Programs that tests start behave alike wherever the tests run.

    Ctrl-C works in them: a shell starts `pytest &` with SIGINT ignored, and children inherit that. And they do not
    think that make started them: `make test` says so in the environment, and hints are worded by it.
    """
    os.environ.pop("MAKELEVEL", None)
    signal.signal(signal.SIGINT, signal.default_int_handler)
