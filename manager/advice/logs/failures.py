"""The table of failures: texts of logs, exceptions and sessions, the party at fault, and the remedy.

`sure` is the share of correct verdicts if a log contains only this text. A `secondary` row describes messages of other
ranks after one rank's death, and counts only if no other row matches. A text with several causes needs `besides` or
`unless`: patterns for the surrounding lines.
"""

from __future__ import annotations

import enum
import re
from functools import cached_property

import msgspec

from stoker.manager.advice.logs.reading import compile_lowercase_pattern


class FaultKind(enum.Enum):
    """The party at fault (SchedMate §3.3, after Acme's taxonomy)."""

    INFRASTRUCTURE = "infrastructure"
    """Hardware, network, file systems, nodes, the batch system, or other users of a device. The same run may succeed on
    other nodes."""
    FRAMEWORK = "framework"
    """The installed packages do not fit together or do not fit the machine."""
    USER = "user"
    """The program, its data, its settings, or its requests."""


class LogLine(msgspec.Struct, frozen=True):
    number: int
    text: str


class Located(msgspec.Struct, frozen=True):
    """The first relevant lines of a log: the failure's first line, the lines around it, its error lines (one per kind
    of message), and its first complete traceback.
    """

    first: LogLine
    before: tuple[LogLine, ...] = ()
    after: tuple[LogLine, ...] = ()
    signs: tuple[LogLine, ...] = ()
    traceback: tuple[LogLine, ...] = ()
    lines: int = 0

    @property
    def window(self) -> tuple[LogLine, ...]:
        return (*self.before, self.first, *self.after)


class Fault(msgspec.Struct, frozen=True):
    """The party at fault. `component`: for example `gpu`, `network`, `code`. `sure`: certainty from 0 to 1. `means`: a
    description. `proof`: at least one line that shows the fault, with masked secrets."""

    kind: FaultKind
    component: str
    sure: float
    means: str
    proof: tuple[LogLine, ...]


# ---- texts of libraries, kernels and batch systems


_I, _F, _U = FaultKind.INFRASTRUCTURE, FaultKind.FRAMEWORK, FaultKind.USER


class FaultRule(msgspec.Struct, frozen=True, dict=True):
    """A row of the table of failures. The lines around a match must match `besides`, and must not match `unless`."""

    kind: FaultKind
    component: str
    text: str
    means: str
    source: str
    sure: float = 0.95
    secondary: bool = False
    besides: str = ""
    unless: str = ""

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        return compile_lowercase_pattern(self.text)

    def holds_in(self, context: str) -> bool:
        return (not self.besides or re.search(self.besides, context, re.IGNORECASE) is not None) and (
            not self.unless or re.search(self.unless, context, re.IGNORECASE) is None
        )


_CUDA = "NVIDIA's CUDA runtime API, cudaError_t"
_XID = "NVIDIA's XID Errors, the kernel's log"
_NVML = "NVML, nvmlErrorString"
_NCCL = "NCCL: ncclGetErrorString, debug.cc"
_WATCHDOG = "PyTorch, ProcessGroupNCCL.cpp"
_GLOO = "Gloo, gloo/transport/tcp/pair.cc"
_LINUX = "errno(3), strerror"
_KERNEL = "Linux: the kernel's log"
_SLURM = "Slurm: slurmstepd, srun, slurmctld"
_MPI = "Open MPI: help files, mpi4py"
_CONDOR = "HTCondor: user log events, condor_event.cpp"
_SSH = "OpenSSH: sshconnect.c"
_TORCH = "PyTorch"
_DATALOADER = "PyTorch, torch/utils/data/_utils/signal_handling.py"
_PYTHON = "CPython"

ROWS: tuple[FaultRule, ...] = (
    # ---- devices
    FaultRule(_I, "gpu", r"uncorrectable ECC error|double[- ]bit ECC|ECC_UNCORRECTABLE|Xid.{0,40}: (?:48|63|64|94|95),",
         "a GPU reported an uncorrectable memory error", _CUDA + ", 214; " + _XID),
    FaultRule(_I, "nvlink", r"uncorrectable NVLink error|NVSwitch.{0,40}fatal|Xid.{0,40}: (?:74|144|145|149),"
        r"|NVLink: fatal",
         "a link between GPUs failed", _CUDA + ", 220; " + _XID),
    FaultRule(_I, "gpu", r"fallen off the bus|GPU is lost|Xid.{0,40}: 79,|Unable to determine the device handle "
        r"for gpu",
         "a GPU is lost", _NVML + "; " + _XID),
    FaultRule(_I, "gpu", r"NVRM: Xid.{0,40}: (?:32|38|56|57|61|62|69|92|109|119|120|121|122|123|140|158),"
        r"|GSP.{0,20}RPC timeout",
         "the driver reports that a GPU failed in hardware or firmware", _XID),
    FaultRule(_I, "gpu", r"CUDA error: (?:unknown error|hardware stack error)|CUDA unknown error"
         r"|CUDA-capable device\(s\) is/are busy or unavailable|system not yet initialized"
         r"|nvidia-smi has failed because it couldn't communicate", "a GPU cannot be reached", _CUDA + ", 46, 714, "
         "802, 999"),
    FaultRule(_I, "gpu", r"Unable to register to device plugin|GPU.{0,40}requires? (?:a )?reset|GPU.{0,30}thermal "
        r"(?:slowdown|shutdown)",
         "a GPU needs a reset", _NVML),
    # ---- device memory: another process or the program uses it
    FaultRule(_I, "gpu_memory", r"CUDA out of memory|CUDA error: out of memory",
         "another process holds the device's memory", _TORCH + ", c10/cuda/CUDACachingAllocator.cpp",
         besides=r"Process \d+ has (?:[1-9]\d*(?:\.\d+)?) GiB memory in use", sure=0.9),
    FaultRule(_U, "gpu_memory", r"CUDA out of memory|CUDA error: out of memory|OutOfMemoryError: CUDA",
         "the program needs more device memory than the device has", _TORCH + ", c10/cuda/CUDACachingAllocator.cpp",
         sure=0.9),
    # ---- connections of ranks
    FaultRule(_I, "network", r"NET/IB ?:.{0,80}(?:error|failed|timeout|async event)|IBV_WC_(?:RETRY_EXC|WR_FLUSH"
        r"|REM_ACCESS)\w*"
         r"|ibv_(?:poll_cq|modify_qp|reg_mr)\S* failed|mlx5_\d.{0,60}(?:port.{0,10}down|link down|error)|Got async "
         r"event",
         "the InfiniBand network failed", _NCCL + ", transport/net_ib.cc"),
    FaultRule(_I, "network", r"ncclSystemError|unhandled system error", "NCCL was refused by the system", _NCCL,
        sure=0.85),
    FaultRule(_I, "network", r"Watchdog caught collective operation timeout|Timeout at NCCL work|collective "
        r"operation timeout"
         r"|taking the entire process down|watchdog thread terminated|instance of 'c10::DistBackendError'"
         r"|\[rank\d+\].{0,60}(?:TCPStore|ProcessGroupNCCL)\.cpp",
         "a collective operation timed out", _WATCHDOG, sure=0.75, secondary=True),
    FaultRule(_I, "network", r"ncclRemoteError|remote process exited or there was a network error",
         "NCCL lost a connection", _NCCL, sure=0.7, secondary=True),
    FaultRule(_I, "network", r"(?:gloo/transport|Gloo).{0,200}(?:Connection (?:closed|reset) by peer|Broken pipe"
        r"|No route to host|"
         r"Network is (?:unreachable|down)|Connection refused|timed out)",
         "Gloo lost a connection", _GLOO, sure=0.7, secondary=True),
    FaultRule(_I, "network", r"No route to host|Network is (?:unreachable|down)|Host is down|ENETUNREACH|EHOSTUNREACH",
         "the network does not reach a host", _LINUX + ", 100, 101, 112, 113"),
    FaultRule(_I, "network", r"Temporary failure in name resolution|Name or service not known|Could not resolve host"
         r"|nodename nor servname provided", "a host's name cannot be resolved", "getaddrinfo(3), gai_strerror",
         sure=0.8),
    FaultRule(_I, "network", r"EADDRINUSE|Address already in use", "a port of the node is already in use",
         _LINUX + ", 98", sure=0.8),
    FaultRule(_I, "network", r"Host key verification failed|REMOTE HOST IDENTIFICATION HAS CHANGED"
        r"|kex_exchange_identification"
         r"|ssh: connect to host|ssh_exchange_identification", "ssh cannot reach or trust a node", _SSH, sure=0.9),
    FaultRule(_I, "network", r"ORTE (?:has lost communication|was unable to reliably start)|PRTE has lost communication"
         r"|an ORTE daemon has unexpectedly failed", "MPI's daemon on a node is lost", "Open MPI, "
         "help-errmgr-base.txt"),
    # ---- files
    FaultRule(_I, "filesystem", r"Stale (?:NFS )?file handle|ESTALE|os error 116|Errno 116",
         "a file server lost a file that was open", _LINUX + ", 116"),
    FaultRule(_I, "disk", r"(?<!\w)(?:EIO|Errno 5\]|os error 5\)|Input/output error|Remote I/O error|Errno 121)",
         "a disk or file server failed", _LINUX + ", 5, 121"),
    FaultRule(_I, "filesystem", r"Structure needs cleaning|Read-only file system|EXT4-fs error"
        r"|XFS.{0,40}(?:corrupt|shut ?down)|I/O error, dev"
         r"|Buffer I/O error|remounting filesystem read-only", "a file system is damaged",
         _LINUX + ", 30, 117; " + _KERNEL),
    FaultRule(_I, "filesystem", r"transport endpoint (?:is not connected|shutdown)|ENOTCONN|ESHUTDOWN",
         "a file system's server has ended, or dropped this node", _LINUX + ", 107, 108"),
    FaultRule(_I, "filesystem", r"LustreError|Lustre:.{0,80}(?:evict|lost)|nfs: server \S+ not responding"
        r"|beegfs.{0,60}error|mmfsd.{0,60}error",
         "the file server does not answer", _KERNEL),
    FaultRule(_I, "disk", r"No space left on device|ENOSPC|os error 28", "a disk is full", _LINUX + ", 28", sure=0.85),
    FaultRule(_U, "disk", r"Disk quota exceeded|EDQUOT|Errno 122", "the user's disk quota is exceeded",
         _LINUX + ", 122"),
    FaultRule(_I, "filesystem", r"(?:S3|Bucket|object store|blob).{0,120}(?:SlowDown|InternalError|503"
        r"|ServiceUnavailable)|(?:SlowDown|ServiceUnavailable|InternalError)\).{0,60}when calling the"
         r"|HTTP(?:Error)?:? 50[234]", "a storage service does not answer", "botocore: ClientError", sure=0.85),
    # ---- the batch system and the node
    FaultRule(_I, "scheduler", r"DUE TO PREEMPTION|Job.{0,40}preempted|\bPREEMPTED\b|Job was evicted", "the job "
        "was preempted", _SLURM + "; " + _CONDOR),
    FaultRule(_I, "scheduler", r"DUE TO TIME LIMIT|job killed: walltime|exceeded (?:its |the )?wall ?(?:clock "
        r")?(?:time )?limit",
         "the job reached its walltime", _SLURM),
    FaultRule(_I, "node", r"DUE TO NODE FAILURE|NODE_FAIL|Node failure on|node.{0,30}(?:unexpectedly rebooted|not "
        r"responding, setting DOWN)",
         "a node failed", _SLURM),
    FaultRule(_I, "node", r"Hardware Error\]|mce: |Machine Check|soft lockup|hard LOCKUP|Kernel panic|watchdog: "
        r"BUG|system is going down",
         "a node's hardware or kernel failed", _KERNEL),
    FaultRule(_I, "scheduler", r"Invalid job credential|munge.{0,60}(?:failed|error|expired)|Protocol "
        r"authentication error"
         r"|Unable to contact slurm controller"
         r"|slurm_(?:receive|load|persist)\S{0,40}.{0,40}(?:timed out|refused|error)",
         "the batch system's own services failed", _SLURM),
    FaultRule(_I, "scheduler", r"Shadow exception!|Job disconnected, attempting to reconnect|Job reconnection "
        r"failed|Can not reconnect to slot|Error from slot\d\S*: (?:Failed to|STARTER)",
         "HTCondor lost the machine that ran the job", _CONDOR),
    FaultRule(_I, "node", r"(?:prolog|epilog)\S* (?:failed|error|exit)|pyxis:.{0,80}(?:failed|error)|Failed to "
        r"create (?:pod sandbox|container|shim)"
         r"|ErrImagePull|ImagePullBackOff|toomanyrequests", "a node could not prepare the job",
         _SLURM + "; containerd", sure=0.85),
    FaultRule(_I, "licence", r"license (?:server|manager).{0,80}(?:down|not respond|unreachable|cannot|connect)"
        r"|Cannot connect to license server"
         r"|(?:FlexNet|FLEXlm|lmgrd).{0,80}(?:error|-15|-96)|licen[sc]e.{0,40}(?:checkout|check out) failed",
         "a licence server does not answer", "FlexNet Publisher, error codes -15, -96", sure=0.85),
    # ---- host memory: the job or other processes use it
    FaultRule(_U, "memory", r"Memory cgroup out of memory|CONSTRAINT_MEMCG|oom[-_]kill event|oom_kill event"
        r"|Exceeded job memory limit|memory usage exceeded|StepId=\S+ exceeded memory limit|OOM Killed|cgroup "
        r"out-of-memory handler",
         "the job used more host memory than requested", _SLURM + "; " + _KERNEL, sure=0.9,
         unless=r"CONSTRAINT_NONE"),
    FaultRule(_I, "memory", r"invoked oom-killer|CONSTRAINT_NONE|(?<!cgroup )Out of memory: Kill", "the node ran "
        "out of memory",
         _KERNEL, sure=0.85, unless=r"CONSTRAINT_MEMCG|memory cgroup"),
    FaultRule(_U, "memory", r"Cannot allocate memory|Unable to allocate [\d.]+ [KMGTP]iB|\bMemoryError\b"
        r"|DefaultCPUAllocator: can't allocate memory|std::bad_alloc",
         "the program requested more host memory than is free", _LINUX + ", 12", sure=0.85),
    # ---- the installed software
    FaultRule(_F, "versions", r"undefined symbol|version `?GLIBC\w*[\d_.]+'? not found|cannot open shared object "
        r"file|GLIBCXX_",
         "a library is incompatible with the installed libraries", "glibc, ld.so"),
    FaultRule(_F, "versions", r"numpy\.\w+ size changed|compiled using NumPy 1\.x|binary incompatib|ABI version"
        r"|module was compiled against",
         "packages were built for another version of NumPy", "NumPy, __init__.pxd"),
    FaultRule(_F, "versions", r"NVIDIA driver on your system is too old|driver version is insufficient|no kernel "
        r"image is available|not compatible with the current PyTorch installation|forward compatibility was attempted"
         r"|Torch not compiled with CUDA|Found no NVIDIA driver|cuDNN.{0,60}(?:version|incompatib)"
         r"|CUDNN_STATUS_(?:NOT_INITIALIZED|VERSION_MISMATCH)|compiled with CUDA version",
         "the installed CUDA does not fit the driver or the device", _CUDA + ", 35, 209; PyTorch", sure=0.9),
    FaultRule(_F, "versions", r"requires? [\w.\[\]-]+ ?(?:[<>=!~]=|[<>]) ?[\d.]+|is required for a normal "
        r"functioning|but found [\w-]+==|requires the [\w-]+ library|`?pip install (?:-U|--upgrade)|Using "
        r"`.{0,60}` requires",
         "a package needs another version, or another package", "Transformers, dependency_versions_check.py",
         sure=0.85),
    FaultRule(_F, "versions", r"cannot import name '\w+' from '(?:torch|transformers|numpy|tokenizers|datasets"
        r"|accelerate|huggingface_hub|peft|safetensors|triton|flash_attn|vllm|scipy|pandas|jax|tensorflow)\b"
         r"|module '(?:torch|numpy|transformers|jax|tensorflow|np)[\w.]*' has no attribute", "the "
         "installed version of a package lacks a name that the program uses",
         _PYTHON + ", ceval.c", sure=0.75),
    FaultRule(_F, "torch", r"INTERNAL ASSERT FAILED|please report a bug to PyTorch|Internal error"
        r"|CUBLAS_STATUS_(?:EXECUTION_FAILED|NOT_SUPPORTED|INTERNAL_ERROR)|triton\.\w*\.?CompilationError"
        r"|Inductor\w*Error|BackendCompilerFailed",
         "the framework failed with an internal error", _TORCH + ", c10/util/Exception.h", sure=0.8),
    FaultRule(_F, "torch", r"not implemented for '\w+'|Could not run '[\w:.]+' with arguments from the '\w+' "
        r"backend|not currently implemented for the \w+ device|NotImplementedError: The operator",
         "the framework lacks the operation for this type or device", _TORCH + ", aten/Dispatch.h", sure=0.8),
    FaultRule(_F, "dataloader", r"DataLoader worker \(pid.{0,40}(?:killed by signal|exited unexpectedly)"
        r"|insufficient shared memory",
         "a worker that loads data was killed", _DATALOADER, sure=0.85),
    FaultRule(_F, "nccl", r"ncclInvalidUsage|ncclInternalError|ncclUnhandledCudaError|NCCL version mismatch"
        r"|Duplicate GPU detected",
         "the program uses NCCL in an unsupported way", _NCCL, sure=0.8),
    # ---- the program
    FaultRule(_U, "code", r"device-side assert triggered|Assertion `.{0,120}` failed|an illegal memory access was "
        r"encountered",
         "a GPU kernel received an index or a value out of range", _CUDA + ", 700, 710", sure=0.9),
    FaultRule(_U, "code", r"No module named '|SyntaxError: |IndentationError: |NameError: name '|command not found"
        r"|can't open file '",
         "the program uses a name, module or file that does not exist", _PYTHON, sure=0.9),
    FaultRule(_U, "code", r"mat1 and mat2 shapes|size mismatch|sizes? of tensor|shape.{0,40}(?:invalid|mismatch)"
        r"|Expected (?:input|target) |expected scalar type|Trying to backward through the graph a second|modified "
        r"by an inplace operation|does not require grad|Target \d+ is out of bounds|index out of range in self"
        r"|Expected all tensors to be on the same device",
         "tensors have incompatible shapes, types or devices", _TORCH + ", ATen", sure=0.9),
    FaultRule(_U, "data", r"\b(?:loss|gradients?|grad_norm)\b.{0,40}\b(?:nan|inf)\b|contains? nan|non-finite"
        r"|returned nan values", "the training diverged", _TORCH, sure=0.85),
    FaultRule(_U, "config", r"error: (?:argument|unrecognized arguments|the following arguments)|invalid choice"
        r"|unrecognized arguments|yaml\.\w+\.\w*Error|JSONDecodeError|TOMLDecodeError|MissingMandatoryValue"
        r"|ConfigAttributeError",
         "the settings are wrong", "argparse; json; yaml", sure=0.85),
    FaultRule(_U, "code", r"Permission denied|PermissionError", "the program has no permission for a file",
         _LINUX + ", 13", sure=0.8),
    FaultRule(_U, "network", r"(?:401|403) Client Error|GatedRepoError|RepositoryNotFoundError|Invalid user token",
        "a service rejected the user's access", "huggingface_hub", sure=0.85),
    # ---- messages of Slurm and Open MPI
    FaultRule(_I, "node", r"Task launch for StepId=\S+ failed on node|Application launch failed: Communication",
         "Slurm could not start the program on a node", _SLURM, sure=0.85),
    FaultRule(_I, "memory", r"not enough space for \S*(?:shm|segment)|shared-memory backing",
         "a node's shared memory is full", _MPI, sure=0.85),
    FaultRule(_U, "config", r"requested than permitted|Requested node configuration is not available"
        r"|Memory required by task|invalid (?:partition|account|qos)|not enough slots available",
         "the program requested more than the job or the cluster has", _SLURM + "; " + _MPI, sure=0.9),
    FaultRule(_U, "code", r"\bMPI_ERR_(?:TRUNCATE|RANK|COUNT|TYPE|TAG|ARG|BUFFER|ROOT|GROUP|OP)\b|Segmentation fault"
        r"|Signal: Floating point",
         "the program accessed invalid memory, or called MPI wrongly", _MPI, sure=0.8),
    # ---- messages of other ranks after the death of one
    FaultRule(_U, "scheduler", r"\*\*\* (?:JOB|STEP) \S+ ON \S+ CANCELLED AT \S+ \*\*\*",
         "a user, or the end of another rank, cancelled the job", _SLURM, sure=0.5, secondary=True),
    FaultRule(_U, "code", r"ChildFailedError|srun: error: .{0,80}(?:Exited with|Killed|Aborted|Terminated)|Exited "
        r"with exit code"
         r"|mpirun (?:detected|noticed)|process exited on signal|exitcode ?:|Sending process \d+ closing signal",
         "a rank ended", "torchelastic; srun; mpirun", sure=0.4, secondary=True),
)  # fmt: skip


def matching_rules(line: str, rules: tuple[FaultRule, ...] = ROWS) -> list[FaultRule]:
    lower = line.lower()
    return [rule for rule in rules if rule.pattern.search(lower)]


# ---- texts of Stoker, and rows for `stoker explain`


_CALLS, _PILOTS, _BLOCKS = "pilot/core/limits.py, lifecycle.py", "LossReason", "the factory"
_TABLE = "pilot/core/infrastructure.py"

SAID: tuple[FaultRule, ...] = (
    FaultRule(_U, "declared_memory", r"took .{1,60} and declares ",
              "the call took more memory than its context declares", _CALLS, sure=0.97),
    FaultRule(_I, "memory", r"the node had no memory left: .* outside the pilot use",
              "other processes took the node's memory", _CALLS),
    FaultRule(_U, "memory", r"was killed by SIGKILL", "the call's process was killed, most often for lack of memory",
              _CALLS, sure=0.75),
    FaultRule(_U, "crash", r"was killed by SIG(?:SEGV|ABRT|BUS|ILL|FPE|SYS)",
              "the call's process crashed in compiled code", _CALLS, sure=0.8),
    FaultRule(_U, "crash", r"exited with code", "the call's code ended the process", _CALLS,
              sure=0.8),
    FaultRule(_U, "time", r"the call ran for .*; its limit is ", "the call ran for longer than its `timeout`",
              _CALLS, sure=0.99),
    FaultRule(_U, "walltime", r"was cut off by the .* walltime",
              "the call needs longer than the walltime of a pilot", _CALLS, sure=0.97),
    FaultRule(_F, "package", r"could not be unpickled on .*must be installed there",
              "a package of the program is not installed where pilots run", _CALLS),
    FaultRule(_U, "result", r"can't be sent back|could not be pickled|cannot be unpickled here",
              "the call's result cannot be sent", "pilot/library/functions.py", sure=0.97),
    FaultRule(_U, "context", r"^(?:context .* could not be loaded: )?the loader of .* raised",
              "the loader of the call's context failed", _CALLS, sure=0.7),
    FaultRule(_I, "disk", r"a disk of the node is full", "other programs filled a disk of the node", _TABLE, sure=0.97),
    FaultRule(_I, "disk", r"a disk or file server failed", "a disk or file server failed", _TABLE, sure=0.97),
    FaultRule(_I, "filesystem", r"an existing file could not be opened|a file server (?:lost|failed|has dropped)"
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
    FaultRule(_I, "scheduler", r"counted as lost: (?:preempted|vacated|held)", "the batch system stopped the job",
              _PILOTS),
    FaultRule(_I, "scheduler", r"counted as lost: cancelled", "the pilot's job was cancelled", _PILOTS),
    FaultRule(_I, "scheduler", r"counted as lost: told to end by a signal", "a signal ended the pilot", _PILOTS,
              sure=0.7),
    FaultRule(_I, "node", r"counted as lost: node lost", "the node failed", _PILOTS),
    FaultRule(_I, "disk", r"counted as lost: scratch folder gone", "the pilot's scratch folder was removed", _PILOTS),
    FaultRule(_U, "walltime", r"counted as lost: out of walltime", "the job's walltime ended", _PILOTS),
    FaultRule(_U, "memory", r"counted as lost: out of memory", "the job used more memory than its limit", _PILOTS),
    FaultRule(_I, "node", r"counted as lost: unexplained",
              "the pilot's process or node disappeared; the logs show no reason", _PILOTS, sure=0.6),
    # ---- blocks
    FaultRule(_U, "site", r"refused: ", "the batch system rejected the job", _BLOCKS, sure=0.9),
    FaultRule(_U, "memory", r"ended: .*(?:OUT_OF_MEMORY|out of memory)",
              "the job used more memory than its limit", _BLOCKS),
    FaultRule(_I, "node", r"ended: .*(?:NODE_FAIL|BOOT_FAIL|node failed)", "the node failed", _BLOCKS),
    FaultRule(_U, "walltime", r"ended: .*out of walltime", "the job's walltime ended", _BLOCKS),
    FaultRule(_I, "scheduler", r"ended: .*(?:PREEMPTED|preempted|vacated|held)",
              "the batch system stopped the job", _BLOCKS),
)  # fmt: skip

JOB: tuple[FaultRule, ...] = (
    FaultRule(_U, "site", r"stoker-pilot: .*(?:--devices|no GPU was granted)",
              "the site file requests devices that the job did not receive", "pilot/main.py", sure=0.97),
    FaultRule(_U, "site", r"(?:sbatch|srun|qsub|bsub): .{0,20}error|invalid (?:partition|account|qos)|"
              r"Unable to allocate resources", "the batch system rejected a request of the site file",
              "Slurm: sbatch", sure=0.96),
    FaultRule(_U, "other_user", r"is not a session folder that you can read: .*Permission denied",
              "the job runs as another user, who cannot read the session's folder", "protocol/session.py", sure=0.97),
    FaultRule(_U, "other_user", r"[Pp]ermission denied",
              "the job's user cannot read the files that start the pilot", "bash; env; CPython",
              sure=0.85),
    FaultRule(_F, "environment", r"command not found|[Nn]o such file or directory|No module named|cannot execute"
              r"|[Nn]ot found$",
              "the files that start the pilot are not on the node", "bash; env; CPython", sure=0.94),
)  # fmt: skip

MORE: tuple[FaultRule, ...] = (
    FaultRule(_U, "command", r"bash_app .{1,200} failed with unix exit code", "the call's command failed",
              "Parsl, bash.py", sure=0.8),
    FaultRule(_U, "code", r"while the (?:function|arguments of) .{1,200} (?:was|were) unpickled on ",
              "the program's own code raised the error while the call was unpickled", "pilot/library/functions.py",
              sure=0.84),
    FaultRule(_U, "package", r"No module named '", "a module is not installed where the call ran", "CPython",
              sure=0.92),
    FaultRule(_U, "data", r"FileNotFoundError|\[Errno 2\] No such file or directory|(?:IsA|NotA)DirectoryError",
              "a file that the program names does not exist on the node", "errno(3), strerror, 2, 20, 21", sure=0.85),
    FaultRule(_U, "code", r"matmul: Input operand|could not be broadcast together|shapes .{1,40} not aligned"
              r"|dimensions .{0,60} must match exactly", "arrays have incompatible shapes", "NumPy, ufuncs", sure=0.9),
    FaultRule(_U, "service", r"\[Errno 111\] Connection refused|URLError|NewConnectionError|Max retries exceeded with",
              "a service that the program calls does not answer", "urllib; requests", sure=0.8),
    FaultRule(_F, "versions", r"was removed in the NumPy|has been removed (?:from|in) (?:version|v)?[\d.]+",
              "the installed version of a package lacks a name that the program uses",
              "NumPy, _expired_attrs_2_0.py", sure=0.95),
    FaultRule(_U, "damaged_file", r"JSONDecodeError|UnicodeDecodeError|UnpicklingError|ParserError: Error tokenizing",
              "an input is truncated, or has another format", "json; pickle; pandas", sure=0.87),
    FaultRule(_U, "damaged_file", r"incomplete metadata, file not fully covered|HeaderTooLarge|invalid load key"
              r"|not a zip file|Invalid(?:Header|magic)|PytorchStreamReader failed",
              "a file is truncated, or has another format", "safetensors; PyTorch; pickle", sure=0.9),
)  # fmt: skip

OF_CALLS = (*MORE, *ROWS)
OF_JOBS = (*JOB, *ROWS)


# ---- remedies


BY_COMPONENT: dict[tuple[FaultKind, str], str] = {
    (_U, "code"): "fix that line; try the function without a session, with the same arguments",
    (_U, "crash"): "run the function alone with the same arguments; the call's output: stoker logs {}",
    (_U, "command"): "run that command alone on a node; the call's output: stoker logs {}",
    (_U, "context"): "try the loader without a session: LOADER.load_here(...)",
    (_U, "data"): "give a path that exists on the nodes; a relative path starts in the program's folder",
    (_U, "damaged_file"): "check the content and size of the file; copy or download it again",
    (_U, "service"): "test the service from a node, which may have no internet access; `localhost` is the node itself",
    (_U, "result"): "return plain values or arrays, of types that the program can import too",
    (_U, "package"): "install the package where pilots run; Stoker sends your own module if the function imports it",
    (_U, "declared_memory"): "declare more with @context(memory=...), or process less at once",
    (_U, "memory"): "request more memory ([provider] memory in the site file), or process less at once",
    (_U, "gpu_memory"): "use smaller batches, a smaller dtype, or a larger device",
    (_U, "time"): "raise `timeout` of @app, or see in the output what the call waits for: stoker logs {}",
    (_U, "walltime"): "raise [provider] walltime, or save progress: stoker.progress(state=...)",
    (_U, "disk"): "free space in that folder: the folder is full, or your quota is exceeded",
    (_U, "config"): "fix the setting that the line names",
    (_U, "network"): "check the name and the token, and that the token gives access to the files",
    (_U, "scheduler"): "request at most the nodes, tasks and memory of the job or partition (site file, [provider])",
    (_U, "site"): "fix the site file; stoker doctor SITE checks it without a job",
    (_U, "other_user"): 'open the folder, or set [provider] shared_files = false and [environment] kind = "packed"',
    (_F, "package"): "install the package where pilots run; Stoker sends your own module if the function imports it",
    (_F, "environment"): "fix [environment] python or [provider] worker_init; stoker doctor SITE --probe tries a node",
    (_F, "versions"): "install compatible versions; compare `pip list` here and on the node",
    (_F, "dataloader"): "request more shared memory (/dev/shm), or load data with fewer workers",
    (_F, "nccl"): "use one device per rank, and one version of NCCL on all nodes",
    (_F, "torch"): "try another version of PyTorch, or another type or device for this operation",
    (_I, "gpu"): "submit again if the call has failed; report the device to the cluster's administrators",
    (_I, "nvlink"): "report the device to the cluster's administrators",
    (_I, "gpu_memory"): "declare device_memory in @context: calls then run where that much memory is free",
    (_I, "network"): "submit again; if it happens again, report the hosts in the lines to the cluster's administrators",
    (_I, "filesystem"): "submit again; if it happens again, show the lines to the file server's administrators",
    (_I, "disk"): "submit again; if the disk is full, make room there, or name another disk with [pilot] scratch",
    (_I, "memory"): "submit again if the call has failed; request whole nodes, where no other job uses the memory",
    (_I, "node"): "submit again; if the same node fails, exclude it ([provider] options, for example --exclude)",
    (_I, "scheduler"): "nothing: calls run on other pilots; if this happens often, try another partition or walltime",
    (_I, "licence"): "submit again when the licence server answers",
}  # fmt: skip
BY_KIND: dict[FaultKind, str] = {
    _U: "fix the error that the lines show, in the program or in its input",
    _F: "install versions that are compatible with each other and the machine",
    _I: "submit again; if it happens again, show the lines to the cluster's administrators",
}
"""Remedies for components without an entry in BY_COMPONENT."""


def remedy(fault: Fault, subject: str) -> str:
    return BY_COMPONENT.get((fault.kind, fault.component), BY_KIND[fault.kind]).format(subject)
