"""Make test programs import Parsl without its monitoring, which takes half of the import time, and transformers without
SciPy, which takes a tenth. Two tests of the monitoring disable this by an environment variable.
"""

import os
import sys

# pytest's workers count as such programs; execnet starts them with this line, and the tests run in them.
_IS_WORKER = any("exec(eval(sys.stdin.readline()))" in argument for argument in sys.orig_argv)

if not (_IS_WORKER or os.environ.get("STOKER_TESTS_MONITORING")):
    for absent in ("sqlalchemy", "scipy"):
        sys.modules[absent] = None  # type: ignore[assignment]  # so Python reports none
