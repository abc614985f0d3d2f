"""Why a run failed, from its log (SchedMate §3.3): the first lines that matter, and whose fault they are.

    located = locate(Path("slurm-4711.out"))
    if located is not None and classify(located).kind is FaultKind.INFRASTRUCTURE: ...

failures.py    the table of failures: texts of logs, of exceptions and of the session, whose fault, what to do
reading.py     the lines of a log, how bad each looks, and tracebacks
locator.py     the first lines that matter
classifier.py  whose fault they are, by the table or by a learned scorer
"""

from stoker.manager.advice.logs.classifier import classify
from stoker.manager.advice.logs.failures import Fault, FaultKind, Located, LogLine
from stoker.manager.advice.logs.locator import locate

__all__ = ["Fault", "FaultKind", "Located", "LogLine", "classify", "locate"]
