"""Why a run failed, from its log (SchedMate §3.3): the first lines that matter, and whose fault they are.

`locate(path or lines, known=None)` gives the first lines that matter, or None for a log without a failure;
`classify(located)` says whose fault they are, with the lines that prove it; `LineTemplates` are the lines of good runs.

    known = LineTemplates.load(folder / "templates.json")      # of good runs of the same function
    located = locate(Path("slurm-4711.out"), known)
    if located is not None and classify(located).kind is FaultKind.INFRASTRUCTURE: ...
"""

from stoker.manager.advice.logs.classifier import classify
from stoker.manager.advice.logs.fault import Fault, FaultKind, Located, LogLine
from stoker.manager.advice.logs.locator import chunked_search, locate
from stoker.manager.advice.logs.templates import LineTemplates

__all__ = ["Fault", "FaultKind", "LineTemplates", "Located", "LogLine", "chunked_search", "classify", "locate"]
