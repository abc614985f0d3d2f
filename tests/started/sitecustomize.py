"""Programs that tests start import Parsl as it is where its monitoring is not installed: that saves half of the import.

Two tests are about the monitoring, and say so in the environment. Every other program, and every process of a session,
would import SQLAlchemy for nothing.
"""

import os
import sys

# pytest's own workers are such programs too; execnet starts them with this line, and the tests run in them.
_IS_WORKER = any("exec(eval(sys.stdin.readline()))" in argument for argument in sys.orig_argv)

if not (_IS_WORKER or os.environ.get("STOKER_TESTS_MONITORING")):
    sys.modules["sqlalchemy"] = None  # type: ignore[assignment]  # so Python reports none
