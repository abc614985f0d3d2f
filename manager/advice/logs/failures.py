"""Table of failures: log messages (of CUDA, NCCL, PyTorch, errno(3), Linux, Slurm, HTCondor, Open MPI and others) and
the party at fault for each. The remedies follow the table. `sure`: share of correct verdicts if a log contains only
this message. `secondary`: True for messages that other ranks print after one rank has died. `besides`, `unless`:
patterns that distinguish several causes of one message.
"""

from __future__ import annotations

import enum
import re
from functools import cached_property

import msgspec

from stoker.manager.advice.logs.reading import compile_lowercase_pattern


class FaultKind(enum.Enum):
    """The party at fault (SchedMate §3.3, after Acme's taxonomy). Infrastructure: nodes, networks, devices and batch
    systems. Framework: incompatible packages. User: program, data and settings.
    """

    INFRASTRUCTURE = "infrastructure"
    FRAMEWORK = "framework"
    USER = "user"


class LogLine(msgspec.Struct, frozen=True):
    number: int
    text: str


class LocatedFailure(msgspec.Struct, frozen=True):
    """The first relevant lines of a log. `error_lines`: one line per kind of error message. `traceback`: the first
    complete traceback.
    """

    first: LogLine
    before: tuple[LogLine, ...] = ()
    after: tuple[LogLine, ...] = ()
    error_lines: tuple[LogLine, ...] = ()
    traceback: tuple[LogLine, ...] = ()
    lines: int = 0

    @property
    def window(self) -> tuple[LogLine, ...]:
        return (*self.before, self.first, *self.after)


class Fault(msgspec.Struct, frozen=True):
    """A verdict on a failure. `component`: the part at fault, for example `gpu`, `network`, `code`. `proof`: lines that
    show the fault.
    """

    kind: FaultKind
    component: str
    sure: float
    means: str
    proof: tuple[LogLine, ...]


# ---- texts of libraries, kernels and batch systems


_I, _F, _U = FaultKind.INFRASTRUCTURE, FaultKind.FRAMEWORK, FaultKind.USER


class FaultRule(msgspec.Struct, frozen=True, dict=True):
    """A row of `LOG_RULES`. The row applies if the lines around a match of `text` match `besides` and do not match
    `unless`.
    """

    kind: FaultKind
    component: str
    text: str
    means: str
    sure: float = 0.95
    secondary: bool = False
    besides: str = ""
    unless: str = r"(?!)"

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        return compile_lowercase_pattern(self.text)

    def matches_context(self, context: str) -> bool:
        found = (re.search(pattern, context, re.IGNORECASE) for pattern in (self.besides, self.unless))
        return [hit is not None for hit in found] == [True, False]


LOG_RULES: tuple[FaultRule, ...] = (
    # devices
    FaultRule(_I, "gpu", "uncorrectable ECC error|double[- ]bit ECC|ECC_UNCORRECTABLE|Xid.{0,40}: (?:48|63|64|94|95),",
        "a GPU reported an uncorrectable memory error"),
    FaultRule(_I, "nvlink", r"uncorrectable NVLink error|NVSwitch.{0,40}fatal|Xid.{0,40}: (?:74|144|145|149),"
        r"|NVLink: fatal", "a link between GPUs failed"),
    FaultRule(_I, "gpu", "fallen off the bus|GPU is lost|Xid.{0,40}: 79,|Unable to determine the device handle for gpu",
        "a GPU is lost"),
    FaultRule(_I, "gpu", r"NVRM: Xid.{0,40}: (?:32|38|56|57|61|62|69|92|109|119|120|121|122|123|140|158),"
        r"|GSP.{0,20}RPC timeout", "the driver reports that a GPU failed in hardware or firmware"),
    FaultRule(_I, "gpu", r"CUDA error: (?:unknown error|hardware stack error)|CUDA unknown error"
        r"|CUDA-capable device\(s\) is/are busy or unavailable|system not yet initialized"
        r"|nvidia-smi has failed because it couldn't communicate", "a GPU cannot be reached"),
    FaultRule(_I, "gpu", r"Unable to register to device plugin|GPU.{0,40}requires? (?:a )?reset"
        r"|GPU.{0,30}thermal (?:slowdown|shutdown)", "a GPU needs a reset"),
    # the device memory is full because of another process or the program
    FaultRule(_I, "gpu_memory", r"CUDA out of memory|CUDA error: out of memory",
        "another process holds the device's memory", sure=0.9,
        besides=r"Process \d+ has (?:[1-9]\d*(?:\.\d+)?) GiB memory in use"),
    FaultRule(_U, "gpu_memory", "CUDA out of memory|CUDA error: out of memory|OutOfMemoryError: CUDA",
        "the program needs more device memory than the device has", sure=0.9),
    # connections of ranks
    FaultRule(_I, "network", r"NET/IB ?:.{0,80}(?:error|failed|timeout|async event)|IBV_WC_(?:RETRY_EXC|WR_FLUSH"
        r"|REM_ACCESS)\w*|ibv_(?:poll_cq|modify_qp|reg_mr)\S* failed|mlx5_\d.{0,60}(?:port.{0,10}down|link down|error)"
        r"|Got async event", "the InfiniBand network failed"),
    FaultRule(_I, "network", "ncclSystemError|unhandled system error", "NCCL was refused by the system", sure=0.85),
    FaultRule(_I, "network", r"Watchdog caught collective operation timeout|Timeout at NCCL work"
        r"|collective operation timeout|taking the entire process down|watchdog thread terminated"
        r"|instance of 'c10::DistBackendError'|\[rank\d+\].{0,60}(?:TCPStore|ProcessGroupNCCL)\.cpp",
        "a collective operation timed out", sure=0.75, secondary=True),
    FaultRule(_I, "network", "ncclRemoteError|remote process exited or there was a network error",
        "NCCL lost a connection", sure=0.7, secondary=True),
    FaultRule(_I, "network", r"(?:gloo/transport|Gloo).{0,200}(?:Connection (?:closed|reset) by peer|Broken pipe"
        r"|No route to host|Network is (?:unreachable|down)|Connection refused|timed out)",
        "Gloo lost a connection", sure=0.7, secondary=True),
    FaultRule(_I, "network", "No route to host|Network is (?:unreachable|down)|Host is down|ENETUNREACH|EHOSTUNREACH",
        "the network does not reach a host"),
    FaultRule(_I, "network", r"Temporary failure in name resolution|Name or service not known|Could not resolve host"
        r"|nodename nor servname provided", "a host's name cannot be resolved", sure=0.8),
    FaultRule(_I, "network", "EADDRINUSE|Address already in use", "a port of the node is already in use", sure=0.8),
    FaultRule(_I, "network", r"Host key verification failed|REMOTE HOST IDENTIFICATION HAS CHANGED"
        r"|kex_exchange_identification|ssh: connect to host|ssh_exchange_identification",
        "ssh cannot reach or trust a node", sure=0.9),
    FaultRule(_I, "network", r"ORTE (?:has lost communication|was unable to reliably start)"
        r"|PRTE has lost communication|an ORTE daemon has unexpectedly failed", "MPI's daemon on a node is lost"),
    # files
    FaultRule(_I, "filesystem", "Stale (?:NFS )?file handle|ESTALE|os error 116|Errno 116",
        "a file server lost a file that was open"),
    FaultRule(_I, "disk", r"(?<!\w)(?:EIO|Errno 5\]|os error 5\)|Input/output error|Remote I/O error|Errno 121)",
        "a disk or file server failed"),
    FaultRule(_I, "filesystem", r"Structure needs cleaning|Read-only file system|EXT4-fs error|XFS.{0,40}(?:corrupt"
        r"|shut ?down)|I/O error, dev|Buffer I/O error|remounting filesystem read-only", "a file system is damaged"),
    FaultRule(_I, "filesystem", "transport endpoint (?:is not connected|shutdown)|ENOTCONN|ESHUTDOWN",
        "a file system's server has ended, or dropped this node"),
    FaultRule(_I, "filesystem", r"LustreError|Lustre:.{0,80}(?:evict|lost)|nfs: server \S+ not responding"
        r"|beegfs.{0,60}error|mmfsd.{0,60}error", "the file server does not answer"),
    FaultRule(_I, "disk", "No space left on device|ENOSPC|os error 28", "a disk is full", sure=0.85),
    FaultRule(_U, "disk", "Disk quota exceeded|EDQUOT|Errno 122", "the user's disk quota is exceeded"),
    FaultRule(_I, "filesystem", r"(?:S3|Bucket|object store|blob).{0,120}(?:SlowDown|InternalError|503"
        r"|ServiceUnavailable)|(?:SlowDown|ServiceUnavailable|InternalError)\).{0,60}when calling the"
        r"|HTTP(?:Error)?:? 50[234]", "a storage service does not answer", sure=0.85),
    # faults of batch system or node
    FaultRule(_I, "scheduler", r"DUE TO PREEMPTION|Job.{0,40}preempted|\bPREEMPTED\b|Job was evicted",
        "the job was preempted"),
    FaultRule(_I, "scheduler", r"DUE TO TIME LIMIT|job killed: walltime|exceeded (?:its "
        r"|the )?wall ?(?:clock )?(?:time )?limit", "the job reached its walltime"),
    FaultRule(_I, "node", r"DUE TO NODE FAILURE|NODE_FAIL|Node failure on|node.{0,30}(?:unexpectedly rebooted"
        r"|not responding, setting DOWN)", "a node failed"),
    FaultRule(_I, "node", r"Hardware Error\]|mce: |Machine Check|soft lockup|hard LOCKUP|Kernel panic|watchdog: BUG"
        r"|system is going down", "a node's hardware or kernel failed"),
    FaultRule(_I, "scheduler", r"Invalid job credential|munge.{0,60}(?:failed|error|expired)"
        r"|Protocol authentication error|Unable to contact slurm controller|slurm_(?:receive|load"
        r"|persist)\S{0,40}.{0,40}(?:timed out|refused|error)", "the batch system's own services failed"),
    FaultRule(_I, "scheduler", r"Shadow exception!|Job disconnected, attempting to reconnect|Job reconnection failed"
        r"|Can not reconnect to slot|Error from slot\d\S*: (?:Failed to|STARTER)",
        "HTCondor lost the machine that ran the job"),
    FaultRule(_I, "node", r"(?:prolog|epilog)\S* (?:failed|error|exit)|pyxis:.{0,80}(?:failed|error)"
        r"|Failed to create (?:pod sandbox|container|shim)|ErrImagePull|ImagePullBackOff|toomanyrequests",
        "a node could not prepare the job", sure=0.85),
    FaultRule(_I, "licence", r"license (?:server|manager).{0,80}(?:down|not respond|unreachable|cannot|connect)"
        r"|Cannot connect to license server|(?:FlexNet|FLEXlm|lmgrd).{0,80}(?:error|-15|-96)"
        r"|licen[sc]e.{0,40}(?:checkout|check out) failed", "a licence server does not answer", sure=0.85),
    # the host memory is full because of the job or other processes
    FaultRule(_U, "memory", r"Memory cgroup out of memory|CONSTRAINT_MEMCG|oom[-_]kill event|oom_kill event"
        r"|Exceeded job memory limit|memory usage exceeded|StepId=\S+ exceeded memory limit|OOM Killed"
        r"|cgroup out-of-memory handler",
        "the job used more host memory than requested", sure=0.9, unless=r"CONSTRAINT_NONE"),
    FaultRule(_I, "memory", "invoked oom-killer|CONSTRAINT_NONE|(?<!cgroup )Out of memory: Kill",
        "the node ran out of memory", sure=0.85, unless=r"CONSTRAINT_MEMCG|memory cgroup"),
    FaultRule(_U, "memory", r"Cannot allocate memory|Unable to allocate [\d.]+ [KMGTP]iB|\bMemoryError\b"
        r"|DefaultCPUAllocator: can't allocate memory|std::bad_alloc",
        "the program requested more host memory than is free", sure=0.85),
    # the installed software
    FaultRule(_F, "versions", r"undefined symbol|version `?GLIBC\w*[\d_.]+'? not found|cannot open shared object file"
        r"|GLIBCXX_", "a library is incompatible with the installed libraries"),
    FaultRule(_F, "versions", r"numpy\.\w+ size changed|compiled using NumPy 1\.x|binary incompatib|ABI version"
        r"|module was compiled against", "packages were built for another version of NumPy"),
    FaultRule(_F, "versions", r"NVIDIA driver on your system is too old|driver version is insufficient"
        r"|no kernel image is available|not compatible with the current PyTorch installation"
        r"|forward compatibility was attempted|Torch not compiled with CUDA|Found no NVIDIA driver"
        r"|cuDNN.{0,60}(?:version|incompatib)|CUDNN_STATUS_(?:NOT_INITIALIZED|VERSION_MISMATCH)"
        r"|compiled with CUDA version", "the installed CUDA does not fit the driver or the device", sure=0.9),
    FaultRule(_F, "versions", r"requires? [\w.\[\]-]+ ?(?:[<>=!~]=|[<>]) ?[\d.]+|is required for a normal functioning"
        r"|but found [\w-]+==|requires the [\w-]+ library|`?pip install (?:-U|--upgrade)|Using `.{0,60}` requires",
        "a package needs another version, or another package", sure=0.85),
    FaultRule(_F, "versions", r"cannot import name '\w+' from '(?:torch|transformers|numpy|tokenizers|datasets"
        r"|accelerate|huggingface_hub|peft|safetensors|triton|flash_attn|vllm|scipy|pandas|jax|tensorflow)\b"
        r"|module '(?:torch|numpy|transformers|jax|tensorflow|np)[\w.]*' has no attribute",
        "the installed version of a package lacks a name that the program uses", sure=0.75),
    FaultRule(_F, "torch", r"INTERNAL ASSERT FAILED|please report a bug to PyTorch|Internal error"
        r"|CUBLAS_STATUS_(?:EXECUTION_FAILED|NOT_SUPPORTED|INTERNAL_ERROR)|triton\.\w*\.?CompilationError"
        r"|Inductor\w*Error|BackendCompilerFailed", "the framework failed with an internal error", sure=0.8),
    FaultRule(_F, "torch", r"not implemented for '\w+'|Could not run '[\w:.]+' with arguments from the '\w+' backend"
        r"|not currently implemented for the \w+ device|NotImplementedError: The operator",
        "the framework lacks the operation for this type or device", sure=0.8),
    FaultRule(_F, "dataloader", r"DataLoader worker \(pid.{0,40}(?:killed by signal|exited unexpectedly)"
        r"|insufficient shared memory", "a worker that loads data was killed", sure=0.85),
    FaultRule(_F, "nccl", r"ncclInvalidUsage|ncclInternalError|ncclUnhandledCudaError|NCCL version mismatch"
        r"|Duplicate GPU detected", "the program uses NCCL in an unsupported way", sure=0.8),
    # the program
    FaultRule(_U, "code", r"device-side assert triggered|Assertion `.{0,120}` failed"
        r"|an illegal memory access was encountered",
        "a GPU kernel received an index or a value out of range", sure=0.9),
    FaultRule(_U, "code", r"No module named '|SyntaxError: |IndentationError: |NameError: name '|command not found"
        r"|can't open file '", "the program uses a name, module or file that does not exist", sure=0.9),
    FaultRule(_U, "code", r"mat1 and mat2 shapes|size mismatch|sizes? of tensor|shape.{0,40}(?:invalid|mismatch)"
        r"|Expected (?:input|target) |expected scalar type|Trying to backward through the graph a second"
        r"|modified by an inplace operation|does not require grad|Target \d+ is out of bounds"
        r"|index out of range in self|Expected all tensors to be on the same device",
        "tensors have incompatible shapes, types or devices", sure=0.9),
    FaultRule(_U, "data", r"\b(?:loss|gradients?|grad_norm)\b.{0,40}\b(?:nan|inf)\b|contains? nan|non-finite"
        r"|returned nan values", "the training diverged", sure=0.85),
    FaultRule(_U, "config", r"error: (?:argument|unrecognized arguments|the following arguments)|invalid choice"
        r"|unrecognized arguments|yaml\.\w+\.\w*Error|JSONDecodeError|TOMLDecodeError|MissingMandatoryValue"
        r"|ConfigAttributeError", "the settings are wrong", sure=0.85),
    FaultRule(_U, "code", "Permission denied|PermissionError", "the program has no permission for a file", sure=0.8),
    FaultRule(_U, "network", "(?:401|403) Client Error|GatedRepoError|RepositoryNotFoundError|Invalid user token",
        "a service rejected the user's access", sure=0.85),
    # messages of Slurm and Open MPI
    FaultRule(_I, "node", r"Task launch for StepId=\S+ failed on node|Application launch failed: Communication",
        "Slurm could not start the program on a node", sure=0.85),
    FaultRule(_I, "memory", r"not enough space for \S*(?:shm|segment)|shared-memory backing",
        "a node's shared memory is full", sure=0.85),
    FaultRule(_U, "config", r"requested than permitted|Requested node configuration is not available"
        r"|Memory required by task|invalid (?:partition|account|qos)|not enough slots available",
        "the program requested more than the job or the cluster has", sure=0.9),
    FaultRule(_U, "code", r"\bMPI_ERR_(?:TRUNCATE|RANK|COUNT|TYPE|TAG|ARG|BUFFER|ROOT|GROUP|OP)\b|Segmentation fault"
        r"|Signal: Floating point", "the program accessed invalid memory, or called MPI wrongly", sure=0.8),
    # messages that other ranks print after one rank has died
    FaultRule(_U, "scheduler", r"\*\*\* (?:JOB|STEP) \S+ ON \S+ CANCELLED AT \S+ \*\*\*",
        "a user, or the end of another rank, cancelled the job", sure=0.5, secondary=True),
    FaultRule(_U, "code", r"ChildFailedError|srun: error: .{0,80}(?:Exited with|Killed|Aborted|Terminated)"
        r"|Exited with exit code|mpirun (?:detected|noticed)|process exited on signal|exitcode ?:"
        r"|Sending process \d+ closing signal", "a rank ended", sure=0.4, secondary=True),
)  # fmt: skip


def find_matching_rules(line: str, rules: tuple[FaultRule, ...] = LOG_RULES) -> list[FaultRule]:
    lower = line.lower()
    return [rule for rule in rules if rule.pattern.search(lower)]


# ---- texts of Stoker, and rows for `stoker explain`


MESSAGE_RULES: tuple[FaultRule, ...] = (
    FaultRule(_U, "declared_memory", "took .{1,60} and declares ",
        "the call took more memory than its context declares", sure=0.97),
    FaultRule(_I, "memory", "the node had no memory left: .* outside the pilot use",
        "other processes took the node's memory"),
    FaultRule(_U, "memory", "was killed by SIGKILL",
        "the call's process was killed, most often for lack of memory", sure=0.75),
    FaultRule(_U, "crash", "was killed by SIG(?:SEGV|ABRT|BUS|ILL|FPE|SYS)",
        "the call's process crashed in compiled code", sure=0.8),
    FaultRule(_U, "crash", "exited with code", "the call's code ended the process", sure=0.8),
    FaultRule(_U, "time", "the call ran for .*; its limit is ",
        "the call ran for longer than its `timeout`", sure=0.99),
    FaultRule(_U, "walltime", "was cut off by the .* walltime",
        "the call needs longer than the walltime of a pilot", sure=0.97),
    FaultRule(_F, "package", "could not be unpickled on .*must be installed there",
        "a package of the program is not installed where pilots run"),
    FaultRule(_U, "result", "can't be sent back|could not be pickled|cannot be unpickled here",
        "the call's result cannot be sent", sure=0.97),
    FaultRule(_U, "context", "^(?:context .* could not be loaded: )?the loader of .* raised",
        "the loader of the call's context failed", sure=0.7),
    FaultRule(_I, "disk", "a disk of the node is full", "other programs filled a disk of the node", sure=0.97),
    FaultRule(_I, "disk", "a disk or file server failed", "a disk or file server failed", sure=0.97),
    FaultRule(_I, "filesystem", r"an existing file could not be opened|a file server (?:lost|failed|has dropped)"
        r"|a file system is damaged|a file system's server has ended", "a file server failed", sure=0.97),
    FaultRule(_I, "nvlink", "a link between devices failed", "a link between devices failed", sure=0.97),
    FaultRule(_I, "gpu", r"the device met a memory error|the device is lost|the device failed "
        r"|the device cannot be reached|fabric of devices is not up", "a device failed", sure=0.97),
    FaultRule(_I, "gpu_memory", "another process holds the device's memory",
        "other processes hold the device's memory", sure=0.97),
    FaultRule(_I, "network", "(?:NCCL|Gloo) lost a connection|NCCL was refused by the system",
        "a connection between ranks failed", sure=0.97),
    # pilots and blocks
    FaultRule(_I, "scheduler", "counted as lost: (?:preempted|vacated|held)"
        "|ended: .*(?:PREEMPTED|preempted|vacated|held)",
        "the batch system stopped the job"),
    FaultRule(_I, "scheduler", "counted as lost: cancelled", "the pilot's job was cancelled"),
    FaultRule(_I, "scheduler", "counted as lost: told to end by a signal", "a signal ended the pilot", sure=0.7),
    FaultRule(_I, "node", "counted as lost: node lost|ended: .*(?:NODE_FAIL|BOOT_FAIL|node failed)", "the node failed"),
    FaultRule(_I, "disk", "counted as lost: scratch folder gone", "the pilot's scratch folder was removed"),
    FaultRule(_U, "walltime", "counted as lost: out of walltime|ended: .*out of walltime", "the job's walltime ended"),
    FaultRule(_U, "memory", "counted as lost: out of memory|ended: .*(?:OUT_OF_MEMORY|out of memory)",
        "the job used more memory than its limit"),
    FaultRule(_I, "node", "counted as lost: unexplained",
        "the pilot's process or node disappeared; the logs show no reason", sure=0.6),
    FaultRule(_U, "site", "refused: ", "the batch system rejected the job", sure=0.9),
)  # fmt: skip

JOB_START_RULES: tuple[FaultRule, ...] = (
    FaultRule(_U, "site", "stoker-pilot: .*(?:--devices|no GPU was granted)",
        "the site file requests devices that the job did not receive", sure=0.97),
    FaultRule(_U, "site", r"(?:sbatch|srun|qsub|bsub): .{0,20}error|invalid (?:partition|account|qos)"
        r"|Unable to allocate resources", "the batch system rejected a request of the site file", sure=0.96),
    FaultRule(_U, "other_user", "is not a session folder that you can read: .*Permission denied",
        "the job runs as another user, who cannot read the session's folder", sure=0.97),
    FaultRule(_U, "other_user", "[Pp]ermission denied",
        "the job's user cannot read the files that start the pilot", sure=0.85),
    FaultRule(_F, "environment", r"command not found|[Nn]o such file or directory|No module named|cannot execute"
        r"|[Nn]ot found$", "the files that start the pilot are not on the node", sure=0.94),
)  # fmt: skip

PROGRAM_RULES: tuple[FaultRule, ...] = (
    FaultRule(_U, "command", "bash_app .{1,200} failed with unix exit code", "the call's command failed", sure=0.8),
    FaultRule(_U, "code", "while the (?:function|arguments of) .{1,200} (?:was|were) unpickled on ",
        "the program's own code raised the error while the call was unpickled", sure=0.84),
    FaultRule(_U, "package", "No module named '", "a module is not installed where the call ran", sure=0.92),
    FaultRule(_U, "data", r"FileNotFoundError|\[Errno 2\] No such file or directory|(?:IsA|NotA)DirectoryError",
        "a file that the program names does not exist on the node", sure=0.85),
    FaultRule(_U, "code", r"matmul: Input operand|could not be broadcast together|shapes .{1,40} not aligned"
        r"|dimensions .{0,60} must match exactly", "arrays have incompatible shapes", sure=0.9),
    FaultRule(_U, "service", r"\[Errno 111\] Connection refused|URLError|NewConnectionError|Max retries exceeded with",
        "a service that the program calls does not answer", sure=0.8),
    FaultRule(_F, "versions", r"was removed in the NumPy|has been removed (?:from|in) (?:version|v)?[\d.]+",
        "the installed version of a package lacks a name that the program uses"),
    FaultRule(_U, "damaged_file", "JSONDecodeError|UnicodeDecodeError|UnpicklingError|ParserError: Error tokenizing",
        "an input is truncated, or has another format", sure=0.87),
    FaultRule(_U, "damaged_file", r"incomplete metadata, file not fully covered|HeaderTooLarge|invalid load key"
        r"|not a zip file|Invalid(?:Header|magic)|PytorchStreamReader failed",
        "a file is truncated, or has another format", sure=0.9),
)  # fmt: skip

CALL_RULES = (*PROGRAM_RULES, *LOG_RULES)
JOB_LOG_RULES = (*JOB_START_RULES, *LOG_RULES)


# ---- remedies


REMEDY_BY_COMPONENT: dict[tuple[FaultKind, str], str] = {
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
REMEDY_BY_KIND: dict[FaultKind, str] = {
    _U: "fix the error that the lines show, in the program or in its input",
    _F: "install versions that are compatible with each other and the machine",
    _I: "submit again; if it happens again, show the lines to the cluster's administrators",
}
"""Remedies for components without an entry in `REMEDY_BY_COMPONENT`."""


def suggest_remedy(fault: Fault, subject: str) -> str:
    return REMEDY_BY_COMPONENT.get((fault.kind, fault.component), REMEDY_BY_KIND[fault.kind]).format(subject)
