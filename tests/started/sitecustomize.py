"""Shorten imports of test programs: load Parsl without monitoring (half of its time) and type checks (a quarter of the
rest), Transformers without SciPy (a tenth). Two tests of monitoring and Parsl's own suite disable this by an
environment variable.
"""

import os
import sys
import types

# The workers of pytest-xdist count as test programs: execnet starts each worker with this line.
_IS_WORKER = any("exec(eval(sys.stdin.readline()))" in argument for argument in sys.orig_argv)


def _unchecked() -> types.ModuleType:
    """Return a typeguard that checks nothing, because the real typeguard compiles each of Parsl's checked functions
    again.
    """
    module = types.ModuleType("typeguard")
    module.typechecked = lambda target=None, **_: target or (lambda function: function)  # type: ignore[attr-defined]
    module.TypeCheckError = type("TypeCheckError", (Exception,), {})  # type: ignore[attr-defined]
    return module


if not (_IS_WORKER or os.environ.get("STOKER_TESTS_MONITORING")):
    for absent in ("sqlalchemy", "scipy"):
        sys.modules[absent] = None  # type: ignore[assignment]  # so Python reports a missing module
    if not any("pytest" in argument for argument in sys.orig_argv):  # pytest needs the real typeguard for a plugin
        sys.modules["typeguard"] = _unchecked()
