"""Signs of a failure that are tied to no single text: fields of words, who speaks, errno, the family of an exception.

A failure that no rule knows still speaks the words of a field: of networks, of disks, of versions. The fields are the
vocabularies of whole subsystems, as their manuals have them, and not words of single messages; how much each tells
about whose fault a failure is, the scorer learns (`features`, `scorer`).
"""

from __future__ import annotations

import builtins
import errno
import os
import re
from collections.abc import Iterator

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
