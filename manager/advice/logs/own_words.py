"""What Stoker itself says of failures, and what `stoker explain` tells a newcomer more exactly than a log's rules do.

`SAID` judges what the manager and its pilots say of a call, a pilot or a block: words that stand in its story. `MORE`
are rows for logs and exceptions beside those of `rules`: they name the data or the package where the others say
"code". `JOB` are rows for what the job of a block prints before there is a pilot: there a name that is not found is no
mistake of the program's, which has not begun.
"""

from __future__ import annotations

from stoker.manager.advice.logs.fault import FaultKind
from stoker.manager.advice.logs.rules import ROWS, FaultRule

_I, _F, _U = FaultKind.INFRASTRUCTURE, FaultKind.FRAMEWORK, FaultKind.USER
_CALLS, _PILOTS, _BLOCKS = "pilot/core/limits.py, lifecycle.py", "LossReason", "the factory"
_TABLE = "pilot/core/infrastructure.py"

SAID: tuple[FaultRule, ...] = (
    # ---- calls
    FaultRule(_U, "declared_memory", r"took .{1,60} and declares ",
              "the call took more memory than its context declares", _CALLS, sure=0.97),
    FaultRule(_I, "memory", r"the node had no memory left: .* which are not the pilot's hold",
              "other processes took the node's memory", _CALLS),
    FaultRule(_U, "memory", r"was killed by SIGKILL", "its process was killed, most often because no memory was left",
              _CALLS, sure=0.75),
    FaultRule(_U, "crash", r"was killed by SIG(?:SEGV|ABRT|BUS|ILL|FPE|SYS)", "its process crashed in compiled code",
              _CALLS, sure=0.8),
    FaultRule(_U, "crash", r"ended by itself with exit code", "something that it called ended its process", _CALLS,
              sure=0.8),
    FaultRule(_U, "time", r"the call ran for .*; its limit is ", "it ran for longer than its `timeout`", _CALLS,
              sure=0.99),
    FaultRule(_U, "walltime", r"was cut off by the .* walltime", "it runs for longer than pilots live", _CALLS,
              sure=0.97),
    FaultRule(_F, "package", r"could not be unpickled on .*must be installed there",
              "a package of the program is not installed where pilots run", _CALLS),
    FaultRule(_U, "result", r"can't be sent back|could not be pickled|cannot be unpickled here",
              "what it returns cannot travel", "pilot/library/functions.py", sure=0.97),
    FaultRule(_U, "context", r"^(?:context .* could not be loaded: )?the loader of .* raised",
              "its context's loader failed", _CALLS, sure=0.7),
    FaultRule(_I, "disk", r"a disk of the node is full", "others have filled a disk of the node", _TABLE, sure=0.97),
    FaultRule(_I, "disk", r"a disk or file server failed", "a disk or file server failed", _TABLE, sure=0.97),
    FaultRule(_I, "filesystem", r"a file that is there could not be opened|a file server (?:lost|failed|has dropped)"
              r"|a file system is damaged|a file system's server has ended",
              "a file server failed", _TABLE, sure=0.97),
    FaultRule(_I, "nvlink", r"a link between devices failed", "a link between devices failed", _TABLE, sure=0.97),
    FaultRule(_I, "gpu", r"the device met a memory error|the device is lost|the device failed |the device cannot be"
              r" reached|fabric of devices is not up", "a device failed", _TABLE, sure=0.97),
    FaultRule(_I, "gpu_memory", r"another process holds the device's memory",
              "other processes hold the device's memory", _TABLE, sure=0.97),
    FaultRule(_I, "network", r"(?:NCCL|Gloo) lost a connection|NCCL was refused by the system",
              "a connection between ranks failed", _TABLE, sure=0.97),
    # ---- pilots
    FaultRule(_I, "scheduler", r"counted as lost: (?:preempted|vacated|held)", "the batch system took its job away",
              _PILOTS),
    FaultRule(_I, "scheduler", r"counted as lost: cancelled", "somebody cancelled its job", _PILOTS),
    FaultRule(_I, "scheduler", r"counted as lost: told to end by a signal", "it was told to end by a signal", _PILOTS,
              sure=0.7),
    FaultRule(_I, "node", r"counted as lost: node lost", "its node failed", _PILOTS),
    FaultRule(_I, "disk", r"counted as lost: scratch folder gone", "its scratch folder was removed", _PILOTS),
    FaultRule(_U, "walltime", r"counted as lost: out of walltime", "its walltime was over", _PILOTS),
    FaultRule(_U, "memory", r"counted as lost: out of memory", "its job took more memory than it was granted", _PILOTS),
    FaultRule(_I, "node", r"counted as lost: unexplained",
              "its process or its node vanished, and nobody says why", _PILOTS, sure=0.6),
    # ---- blocks
    FaultRule(_U, "site", r"refused: ", "the batch system did not take its job", _BLOCKS, sure=0.9),
    FaultRule(_U, "memory", r"ended: .*(?:OUT_OF_MEMORY|out of memory)",
              "its job took more memory than it was granted", _BLOCKS),
    FaultRule(_I, "node", r"ended: .*(?:NODE_FAIL|BOOT_FAIL|node failed)", "its node failed", _BLOCKS),
    FaultRule(_U, "walltime", r"ended: .*out of walltime", "its walltime was over", _BLOCKS),
    FaultRule(_I, "scheduler", r"ended: .*(?:PREEMPTED|preempted|vacated|held)",
              "the batch system took its job away", _BLOCKS),
)  # fmt: skip

JOB: tuple[FaultRule, ...] = (
    FaultRule(_U, "site", r"stoker-pilot: .*(?:--devices|no GPU was granted)",
              "the site file asks for devices that the job was not given", "pilot/main.py", sure=0.97),
    FaultRule(_U, "site", r"(?:sbatch|srun|qsub|bsub): .{0,20}error|invalid (?:partition|account|qos)|"
              r"Unable to allocate resources", "the batch system did not take what the site file asks for",
              "Slurm: sbatch", sure=0.96),
    FaultRule(_U, "other_user", r"is not a session folder that you can read: .*Permission denied",
              "its job runs as another user, who may not read the session's folder", "protocol/session.py", sure=0.97),
    FaultRule(_U, "other_user", r"[Pp]ermission denied",
              "what the job begins with is closed to the user that the job runs as", "bash; env; CPython", sure=0.85),
    FaultRule(_F, "environment", r"command not found|[Nn]o such file or directory|No module named|cannot execute"
              r"|[Nn]ot found$",
              "what the job begins with is not on its node", "bash; env; CPython", sure=0.94),
)  # fmt: skip

MORE: tuple[FaultRule, ...] = (
    FaultRule(_U, "command", r"bash_app .{1,200} failed with unix exit code", "its command failed", "Parsl, bash.py",
              sure=0.8),
    FaultRule(_U, "code", r"while the (?:function|arguments of) .{1,200} (?:was|were) unpickled on ",
              "the program's own code raised it while the call was unpickled", "pilot/library/functions.py", sure=0.84),
    FaultRule(_U, "package", r"No module named '", "a module is not installed where the call ran", "CPython",
              sure=0.92),
    FaultRule(_U, "data", r"FileNotFoundError|\[Errno 2\] No such file or directory|(?:IsA|NotA)DirectoryError",
              "a file that the program names is not there", "errno(3), strerror, 2, 20, 21", sure=0.85),
    FaultRule(_U, "code", r"matmul: Input operand|could not be broadcast together|shapes .{1,40} not aligned"
              r"|dimensions .{0,60} must match exactly", "arrays do not fit together", "NumPy, ufuncs", sure=0.9),
    FaultRule(_U, "service", r"\[Errno 111\] Connection refused|URLError|NewConnectionError|Max retries exceeded with",
              "a service that the program calls does not answer", "urllib; requests", sure=0.8),
    FaultRule(_F, "versions", r"was removed in the NumPy|has been removed (?:from|in) (?:version|v)?[\d.]+",
              "a package lacks a name: another version of it is meant", "NumPy, _expired_attrs_2_0.py", sure=0.95),
    FaultRule(_U, "damaged_file", r"JSONDecodeError|UnicodeDecodeError|UnpicklingError|ParserError: Error tokenizing",
              "what it read is cut short, or of another format", "json; pickle; pandas", sure=0.87),
    FaultRule(_U, "damaged_file", r"incomplete metadata, file not fully covered|HeaderTooLarge|invalid load key"
              r"|not a zip file|Invalid(?:Header|magic)|PytorchStreamReader failed",
              "a file is cut short, or no file of this kind", "safetensors; PyTorch; pickle", sure=0.9),
)  # fmt: skip

OF_CALLS = (*MORE, *ROWS)
OF_JOBS = (*JOB, *ROWS)
