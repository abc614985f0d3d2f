"""What a child of the zygote does between its birth and its first line as a library."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import traceback
from typing import Any, NoReturn

from stoker.pilot.core import infrastructure
from stoker.pilot.zygote import processes
from stoker.pilot.zygote.messages import Fork

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "RAYON_NUM_THREADS",
)
"""What numeric libraries read, when they are imported, to size their thread pools."""


def become_library(order: Fork, sock: int, *, parent: int) -> NoReturn:
    """Run a library in this process; never returns."""
    code = infrastructure.NOT_SETTLED
    try:
        _settle(order, parent)
        code = 1
        if order.fresh:
            os.set_inheritable(sock, True)
            module = order.entry.rpartition(".")[0]
            os.execv(sys.executable, [sys.executable, "-P", "-m", module, str(sock)])
        set_threads(order.threads)
        _reseed()
        module, _, name = order.entry.partition(":")
        getattr(importlib.import_module(module), name)(sock)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        # Without the interpreter's own farewell: handlers that were registered before the fork are the zygote's.
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def _settle(order: Fork, parent: int) -> None:
    processes.die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    os.setsid()
    processes.adopt_orphans()
    for how in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(how, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(null)
    os.close(log)
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(order.threads)) | order.environment)
    os.chdir(order.folder)
    if order.cores:
        os.sched_setaffinity(0, order.cores)
    try:
        with open("/proc/self/oom_score_adj", "w") as file:  # when memory runs out: a library, never the agent
            file.write("500")
    except OSError:
        pass


def set_threads(count: int) -> None:
    """Size the thread pools that this process will have (PyTorch's too, if it is imported), before there is one."""
    for name in THREAD_VARIABLES:
        os.environ[name] = str(count)
    torch: Any = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "set_num_threads"):
        torch.set_num_threads(count)


def _reseed() -> None:
    """Forks of one process must not draw the same numbers (the standard library sees to its own)."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        numpy.random.seed()
