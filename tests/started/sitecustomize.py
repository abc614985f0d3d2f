"""Make test programs import Parsl without its monitoring (half of the import time) and type checks (a quarter of the
rest), and transformers without SciPy (a tenth). Two tests of the monitoring and Parsl's own suite disable this by an
environment variable.
"""

import os
import sys
import types

# pytest's workers count as such programs; execnet starts them with this line, and the tests run in them.
_IS_WORKER = any("exec(eval(sys.stdin.readline()))" in argument for argument in sys.orig_argv)


def _unchecked() -> types.ModuleType:
    """Return a typeguard that checks nothing: the real one compiles each of Parsl's checked functions again."""
    module = types.ModuleType("typeguard")
    module.typechecked = lambda target=None, **_: target or (lambda function: function)  # type: ignore[attr-defined]
    module.TypeCheckError = type("TypeCheckError", (Exception,), {})  # type: ignore[attr-defined]
    return module


if not (_IS_WORKER or os.environ.get("STOKER_TESTS_MONITORING")):
    for absent in ("sqlalchemy", "scipy"):
        sys.modules[absent] = None  # type: ignore[assignment]  # so Python reports none
    if not any("pytest" in argument for argument in sys.orig_argv):  # typeguard has a plugin of pytest
        sys.modules["typeguard"] = _unchecked()
