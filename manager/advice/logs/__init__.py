"""The cause of a failed run, from its log (SchedMate §3.3): the first relevant lines, and the party at fault.

    located = locate(Path("slurm-4711.out"))
    if located is not None and classify(located).kind is FaultKind.INFRASTRUCTURE: ...

failures.py    the table of known texts, each with the party at fault and the remedy
reading.py     the lines of a log, their severity, and tracebacks
locator.py     the first relevant lines
classifier.py  the party at fault, found by the table or by a learned scorer
opinion.py     a language model's opinion on verdicts of low confidence
"""

from stoker.manager.advice.logs.classifier import classify_failure
from stoker.manager.advice.logs.failures import Fault, FaultKind, LocatedFailure, LogLine
from stoker.manager.advice.logs.locator import locate_failure

__all__ = ["Fault", "FaultKind", "LocatedFailure", "LogLine", "classify_failure", "locate_failure"]
