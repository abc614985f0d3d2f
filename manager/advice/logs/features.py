"""The facts of a failure that the learned scorer weighs.

They are the vocabularies that its first lines use (networks, disks, versions), who speaks, the kind of errno, the
family of its exception, and whose code raised it. The words themselves are left out: a fault type that was never seen
has others.
"""

from __future__ import annotations

import builtins
import errno
import os
import re
from collections.abc import Iterable, Iterator

from stoker.manager.advice.logs.failures import ROWS, FaultRule, Located, LogLine, matching_rules
from stoker.manager.advice.logs.reading import RANK_MARK

# ---- vocabularies


_FIELDS = {
    "network": (
        "network socket connect connection connected host hostname hosts route routing peer tcp udp ip "
        "address addr port dns resolve resolution ssh unreachable interface link ethernet rdma infiniband "
        "verbs gateway proxy firewall packet remote endpoint communication handshake inet rpc http https"
    ),
    "hardware": (
        "gpu gpus device devices pci pcie bus nvrm xid ecc dram sram hbm dimm edac thermal temperature power "
        "firmware gsp nvlink nvswitch hca adapter mlx cpu socket mce machine processor hardware sector nvme "
        "scsi ata drive fan voltage uncorrectable watchdog lockup interrupt row remapping page retirement dbe "
        "sbe parity"
    ),
    "storage": (
        "filesystem filesystems fs nfs lustre gpfs beegfs ceph mount mounted unmount disk storage inode stale "
        "handle volume block journal superblock bucket object store s3 shard server oss ost mds mdt read "
        "write io tmpfs"
    ),
    "batch": (
        "slurm srun sbatch slurmstepd slurmd slurmctld job jobs step stepid node nodes partition allocation "
        "preempt preempted preemption evict evicted requeue requeued scheduler controller daemon daemons "
        "credential munge prolog epilog walltime reservation lease condor schedd startd shadow starter slot "
        "rescheduling executing pbs lsf batch"
    ),
    "container": (
        "container docker image pyxis enroot singularity apptainer registry pod sandbox pull layer spank plugin"
    ),
    "unavailable": (
        "unavailable responding busy lost down dead gone refused reset retry retries timeout timed expired "
        "disconnected disconnect closed failure hung stuck broken unreachable reboot rebooted fail fails "
        "aborted unexpectedly service gave later"
    ),
    "limit": (
        "limit limits exceed exceeds exceeded quota request requested permitted maximum max capacity slots "
        "satisfy satisfied too many more than available oversubscribe cgroup rss over budget"
    ),
    "identity": (
        "permission permitted denied unauthorized forbidden token access login authenticate authenticated "
        "authorized gated private password key credentials log account user"
    ),
    "versions": (
        "version versions upgrade update downgrade install installed installing pip conda package packages "
        "module library libraries symbol compile compiled compilation build built abi binary incompatible "
        "requires require required dependency import imported plugin driver drivers toolkit capability newer "
        "older old release header so glibc numpy normal functioning found"
    ),
    "internals": (
        "implemented implementation implement unsupported supported support operator backend kernel dispatch "
        "report bug internal assert developers operation usage type triton inductor cublas cudnn dtype "
        "enabled"
    ),
    "program": (
        "argument arguments expected got shape shapes dtype size sizes index indices key keys attribute type "
        "value values tensor tensors matrix dimension dimensions operand operands target range bounds "
        "parameter parameters grad gradient loss nan syntax name defined positional keyword unpack decode "
        "parse json config option options unrecognized executable command script file path directory such "
        "exist string int float list dict object none missing unexpected assertion divisible divide zero"
    ),
    "mpi": ("mpi mpirun mpiexec orte prte ompi opal btl communicator rank ranks finalize init process processes"),
    "collective": ("nccl gloo allreduce collective watchdog barrier rendezvous store torchelastic backend group"),
}
"""The vocabularies of subsystems. A word may be of several."""
_FIELDS_OF: dict[str, list[str]] = {}
for _field, _vocabulary in _FIELDS.items():
    for _word in _vocabulary.split():
        _FIELDS_OF.setdefault(_word, []).append("@field:" + _field)

_SPEAKERS = (
    ("kernel", re.compile(r"^\s*(?:\S+ )?(?:kernel:|\[ *\d+\.\d{3,}\])|^\s*kernel:|Message from syslogd")),
    ("batch", re.compile(r"^(?:slurm\w+|srun|sbatch|salloc|scontrol)(?:-\S+)?: |^condor_\w+|\bslurm_script:"
        r"|^\d{3} \(\d+\.\d+\.\d+\) ")),
    ("mpi", re.compile(r"^\[\S+:\d+\] |\bORTE\b|\bPRTE\b|\bMPI_|^(?:mpirun|mpiexec|prterun|orted)\b|\bOpen MPI\b")),
    ("nccl", re.compile(r"\bNCCL (?:WARN|INFO)|\bnccl[A-Z]\w+")),
    ("cuda", re.compile(r"\bCUDA (?:error|out|kernel|unknown)|\bcuda[A-Z]\w+|\bNVML\b|\bNVIDIA-SMI\b")),
    ("ssh", re.compile(r"^(?:ssh|scp|kex_\w+|Host key)\b")),
    ("shell", re.compile(r"^(?:/\S+/)?(?:ba|z|k)?sh: |: line \d+: |^python\S*: ")),
    ("native", re.compile(r"\.(?:cpp|cc|cu|c|h|rs):\d+")),
)  # fmt: skip
_ERRNO = re.compile(r"\berrno:? ?(\d+)\b|\bos error (\d+)\b|\bcode: -?(\d+)\b", re.IGNORECASE)
_ERRNO_KINDS = {
    "network": (
        "ENETDOWN ENETUNREACH ENETRESET ECONNABORTED ECONNRESET ECONNREFUSED ETIMEDOUT EHOSTDOWN EHOSTUNREACH "
        "EADDRINUSE EADDRNOTAVAIL EPIPE ENONET ENOLINK ECOMM EPROTO"
    ),
    "storage": (
        "EIO ESTALE EROFS ENOSPC EUCLEAN ENODEV ENXIO EREMOTEIO ENOTCONN ESHUTDOWN ENOMEDIUM EMEDIUMTYPE "
        "EBUSY EREMCHG ENOTBLK"
    ),
    "caller": (
        "ENOENT EACCES EPERM EEXIST EISDIR ENOTDIR EINVAL EDQUOT EFBIG ENAMETOOLONG EMFILE ENOTEMPTY ELOOP "
        "E2BIG ENOEXEC EBADF EDOM ERANGE EILSEQ ENOTSUP"
    ),
}  # fmt: skip
"""What the caller did, or had coming to it; what a disk or its server did; what the network did (errno(3))."""
_BY_NUMBER = {
    number: kind
    for kind, names in _ERRNO_KINDS.items()
    for name in names.split()
    if (number := getattr(errno, name, None)) is not None
}
_BY_TEXT = {os.strerror(number).lower(): kind for number, kind in _BY_NUMBER.items()}


def fields_of(word: str) -> list[str]:
    """The fields to whose vocabulary a word in lower case belongs."""
    return _FIELDS_OF.get(word, [])


def speakers_of(line: str) -> Iterator[str]:
    """Who writes lines of this form: the kernel, a daemon, a runtime."""
    for name, form in _SPEAKERS:
        if form.search(line):
            yield f"@speaks:{name}"


def errno_of(line: str) -> Iterator[str]:
    """What kind of thing the error number, or its text, tells of."""
    found = {_BY_NUMBER.get(int(next(filter(None, hit.groups())))) for hit in _ERRNO.finditer(line)}
    lower = line.lower()
    found |= {kind for text, kind in _BY_TEXT.items() if text in lower}
    for kind in sorted(filter(None, found)):
        yield f"@errno:{kind}"


def families_of(exception: str) -> Iterator[str]:
    """The builtin classes that an exception is of, by its name; `other` for one that Python does not have."""
    kind = getattr(builtins, exception, None)
    if not (isinstance(kind, type) and issubclass(kind, BaseException)):
        yield "@family:other"
        return
    for each in kind.__mro__:
        if issubclass(each, Exception) and each is not Exception:
            yield f"@family:{each.__name__}"


# ---- features of a failure


_CAUSES = 2
_NEAR_LINES = 3
"""A program writes so few lines of a failure before it raises."""
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_PATH = re.compile(r"(?:/[\w.@+-]+){2,}/?")
_FRAME = re.compile(r'File "([^"]+)", line \d+')
_EXCEPTION = re.compile(r"^(?:[\w.]+\.)?([A-Z]\w*(?:Error|Exception|Warning|Interrupt|Exit))\b")
_COMMON = frozenset({"the", "of", "to", "in", "is", "at", "for", "and", "on", "by", "it", "be", "py", "file", "line"})


def features(located: Located, rules: tuple[FaultRule, ...] = ROWS) -> dict[str, float]:
    """How often each fact appears. `rules` tell which lines are only consequences."""
    found: dict[str, float] = {}
    for fact in _facts(located, rules):
        found[fact] = found.get(fact, 0.0) + 1.0
    return found


def causes(located: Located, rules: tuple[FaultRule, ...] = ROWS) -> list[LogLine]:
    """The bad lines that do not only tell of another rank's end; all, if there are no others."""
    found = []
    for sign in located.signs:
        held = matching_rules(sign.text, rules)
        if not held or not all(rule.secondary for rule in held):
            found.append(sign)
    return found or list(located.signs)


def words(text: str) -> Iterator[str]:
    """The words of a line, in lower case, without paths. Words end where letters end and where a capital begins:
    `ncclSystemError` also says "system"."""
    for word in _WORD.findall(_PATH.sub(" ", text)):
        lower = word.lower()
        if len(lower) > 1 and lower not in _COMMON:
            yield lower


def exception_of(line: str) -> str:
    """The name of the exception's type with which a line begins; empty: none."""
    found = _EXCEPTION.match(line)
    return found[1] if found else ""


def frames_of(lines: Iterable[str]) -> list[str]:
    """Whose code the frames of a traceback are, from the outermost: `user`, `stdlib`, or the name of a package."""
    owners = []
    for path in _paths(lines):
        _, installed, package = path.rpartition("site-packages/")
        if installed:
            owners.append(package.partition("/")[0])
        elif re.search(r"/lib/python3[^/]*/|<frozen|^<", path):
            owners.append("stdlib")
        else:
            owners.append("user")
    return owners


def _facts(located: Located, rules: tuple[FaultRule, ...]) -> Iterator[str]:
    traceback = [_unmarked(line) for line in _own_traceback(located)]
    raised = next((line for line in reversed(traceback) if exception_of(line)), "")
    opening = raised or _unmarked(located.first)
    lines = [opening, *(text for sign in causes(located, rules)[:_CAUSES] if (text := _unmarked(sign)) != opening)]
    for line in lines:
        yield from (field for word in words(line) for field in fields_of(word))
        yield from speakers_of(line)
        yield from errno_of(line)
        if name := exception_of(line):
            yield f"@type:{name}"
            yield from families_of(name)
    yield from (f"{field}, first" for word in words(opening) for field in fields_of(word))
    yield "@traceback" if located.traceback else "@no-traceback"
    if owners := frames_of(traceback):
        yield f"@raised-in:{owners[-1] if owners[-1] in ('user', 'stdlib') else 'package'}"
        yield "@through-user" if "user" in owners else "@not-through-user"
        yield from _place(_paths(traceback)[-1])


def _own_traceback(located: Located) -> tuple[LogLine, ...]:
    """The traceback, if it is of the failure's own beginning and not of a rank that fails later."""
    lines, first = located.traceback, located.first.number
    return lines if lines and lines[0].number - _NEAR_LINES <= first <= lines[-1].number else ()


def _place(path: str) -> Iterator[str]:
    """The fields that the names of an installed module speak of."""
    _, installed, inside = path.rpartition("site-packages/")
    for name in re.split(r"[/._]", inside)[:-1] if installed else ():
        yield from (f"{field}, module" for field in fields_of(name))


def _paths(lines: Iterable[str]) -> list[str]:
    return [found[1] for line in lines if (found := _FRAME.search(line))]


def _unmarked(line: LogLine) -> str:
    return RANK_MARK.sub("", line.text)
