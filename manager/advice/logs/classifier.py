"""Find the party at fault for a located failure (SchedMate §3.3, failure classification). The most certain matching
rule of `failures.py` decides; matches in earlier lines count more. If no rule matches, a plain Python exception from
the user's code is the user's fault, and a logistic regression decides all other cases. Its features are vocabularies,
errno, and the exception's family and owner. `python -m benchmarks.papers.schedmate train` trains it.
"""

from __future__ import annotations

import builtins
import errno
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.resources import files
from math import exp, log, sqrt

import msgspec

from stoker.manager.advice.logs.failures import (
    LOG_RULES,
    Fault,
    FaultKind,
    FaultRule,
    LocatedFailure,
    LogLine,
    find_matching_rules,
)
from stoker.manager.advice.logs.reading import RANK_MARK

# ---- the learned scorer


class FaultKindScorer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A logistic regression that scores fault kinds. `made_of`: its training data. `weights`: by kind and feature."""

    made_of: str
    weights: dict[FaultKind, dict[str, float]]
    bias: dict[FaultKind, float]

    def compute_probabilities(self, found: Mapping[str, float]) -> dict[FaultKind, float]:
        known = {fact for weights in self.weights.values() for fact in weights}
        values = scale_counts({fact: count for fact, count in found.items() if fact in known})
        scores = {
            kind: self.bias[kind] + sum(value * self.weights[kind].get(fact, 0.0) for fact, value in values.items())
            for kind in self.bias
        }
        parts = {kind: exp(score - max(scores.values())) for kind, score in scores.items()}
        return {kind: part / sum(parts.values()) for kind, part in parts.items()}


def scale_counts(found: Mapping[str, float]) -> dict[str, float]:
    """Return logarithmically scaled counts of features as a vector of length 1."""
    values = {fact: 1.0 + log(1.0 + count) for fact, count in found.items()}
    length = sqrt(sum(value * value for value in values.values()))
    return {fact: value / length for fact, value in values.items()} if length else {}


@cache
def load_shipped_scorer() -> FaultKindScorer:
    data = files("stoker.manager.advice.logs").joinpath("scorer.json").read_bytes()
    return msgspec.json.decode(data, type=FaultKindScorer)


LEAST_INFRASTRUCTURE_PROBABILITY = 0.5
"""Minimum probability for the verdict `infrastructure` if none of the rules matches."""
LEAST_PROBABILITY_IF_USER_RAISED = 0.7
"""Minimum probability for the verdict `infrastructure` if the user's code raised the exception."""
NO_RULE_MATCHES = "classified by the words of the log, because no rule matches"
_PROGRAM_ERRORS = frozenset({
    "ArithmeticError", "AssertionError", "AttributeError", "EOFError", "FileNotFoundError", "FileExistsError",
    "FloatingPointError", "ImportError", "IndentationError", "IndexError", "IsADirectoryError", "JSONDecodeError",
    "KeyError", "LookupError", "MemoryError", "ModuleNotFoundError", "NameError", "NotADirectoryError",
    "NotImplementedError", "OverflowError", "PermissionError", "RecursionError", "StopIteration", "SyntaxError",
    "SystemExit", "TabError", "TypeError", "UnboundLocalError", "UnicodeDecodeError", "UnicodeEncodeError",
    "UnicodeError", "ValueError", "ZeroDivisionError", "KeyboardInterrupt",
})  # fmt: skip
"""Names of exceptions that usually show a mistake in the program. OSError and RuntimeError are absent: they have many
causes.
"""
_PROGRAM_ERROR_PROBABILITY = 0.8
_EVIDENCE_SIGNS = 40
_EVIDENCE_AFTER = 40
_FADING = 0.97
_SECONDARY_PART = 0.5
_MOST_PROOF = 8
_COMPONENTS = {
    "gpu": ("gpu", "cuda", "nvrm", "device"),
    "network": ("connect", "network", "socket", "host", "port", "ssh", "nccl", "timeout"),
    "filesystem": ("file", "disk", "mount", "storage", "server", "transport"),
    "scheduler": ("slurm", "condor", "job", "step"),
}


def classify_failure(located: LocatedFailure, *, rules: tuple[FaultRule, ...] = LOG_RULES) -> Fault:
    by_rule = _find_best_rule(located, rules)
    if by_rule is not None:
        sure, rule, line = by_rule
        return Fault(rule.kind, rule.component, round(sure, 3), rule.means, _select_proof_lines(located, line))
    chances = load_shipped_scorer().compute_probabilities(extract_features(located, rules))
    by_user = "user" in find_frame_owners(line.text for line in located.traceback)
    exception = _last_exception_line(located)
    plain = by_user and find_exception_name(exception) in _PROGRAM_ERRORS
    if plain:
        user = max(_PROGRAM_ERROR_PROBABILITY, chances[FaultKind.USER])
        rest = (1 - _PROGRAM_ERROR_PROBABILITY) / max(1e-9, 1 - chances[FaultKind.USER])
        chances = {kind: user if kind is FaultKind.USER else chance * rest for kind, chance in chances.items()}
    kind = max((FaultKind.USER, FaultKind.FRAMEWORK), key=lambda kind: chances[kind])
    if chances[FaultKind.INFRASTRUCTURE] >= (
        LEAST_PROBABILITY_IF_USER_RAISED if by_user else LEAST_INFRASTRUCTURE_PROBABILITY
    ):
        kind = FaultKind.INFRASTRUCTURE
    text = (exception if located.traceback else located.first.text)[:200]
    means = f"it raised {text}" if plain else f"{NO_RULE_MATCHES}: {text}"
    component, proof = _guess_faulty_component(located, kind), _select_proof_lines(located, located.first)
    return Fault(kind, component, round(chances[kind], 3), means, proof)


def _find_best_rule(located: LocatedFailure, rules: tuple[FaultRule, ...]) -> tuple[float, FaultRule, LogLine] | None:
    """Return the certainty, rule and line of the most certain match. Rules marked `secondary` count only if all rules
    that match the failure's first line have this mark.
    """
    context = "\n".join(line.text for line in (*located.window, *located.error_lines, *located.traceback))
    best: tuple[float, FaultRule, LogLine] | None = None
    fading = 1.0
    raised = located.traceback and located.traceback[0].number == located.first.number
    opening = find_matching_rules((raised and _last_exception_line(located)) or located.first.text, rules)
    without_cause = bool(opening) and all(rule.secondary for rule in opening)
    first, *more = located.error_lines[:_EVIDENCE_SIGNS] or (located.first,)
    evidence = (located.first, first, *_exception_lines(located), *more, *located.after[:_EVIDENCE_AFTER])
    by_number: dict[int, LogLine] = {}
    for line in evidence:
        by_number.setdefault(line.number, line)
    for line in by_number.values():
        for rule in find_matching_rules(line.text, rules):
            if rule.secondary and not without_cause:
                continue
            sure = rule.sure * fading * (_SECONDARY_PART if rule.secondary else 1.0)
            if (best is None or sure > best[0]) and rule.matches_context(context):
                best = (sure, rule, line)
        fading *= _FADING
    return best


def _exception_lines(located: LocatedFailure) -> list[LogLine]:
    return [line for line in located.traceback if find_exception_name(_remove_rank_mark(line))]


def _last_exception_line(located: LocatedFailure) -> str:
    return next((_remove_rank_mark(line) for line in reversed(_exception_lines(located))), "")


def _guess_faulty_component(located: LocatedFailure, kind: FaultKind) -> str:
    if kind is not FaultKind.INFRASTRUCTURE:
        return "code" if kind is FaultKind.USER else "versions"
    text = " ".join(line.text for line in located.error_lines[:_MOST_PROOF]).lower()
    counts = {component: sum(text.count(word) for word in them) for component, them in _COMPONENTS.items()}
    component = max(counts, key=lambda each: counts[each])
    return component if counts[component] else "node"


def _select_proof_lines(located: LocatedFailure, line: LogLine) -> tuple[LogLine, ...]:
    lines = (*located.error_lines[:2], *_exception_lines(located)[:3], located.first, line)
    chosen = {each.number: each for each in lines}
    return tuple(chosen[number] for number in sorted(chosen)[:_MOST_PROOF])


# ---- features of a failure


_CAUSES = 2
_NEAR_LINES = 3
"""Maximum number of lines between a failure's first line and its traceback."""
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_PATH = re.compile(r"(?:/[\w.@+-]+){2,}/?")
_FRAME = re.compile(r'File "([^"]+)", line \d+')
_STDLIB = re.compile(r"/lib/python3[^/]*/|<frozen|^<")
_EXCEPTION = re.compile(r"^(?:[\w.]+\.)?([A-Z]\w*(?:Error|Exception|Warning|Interrupt|Exit))\b")
_COMMON = frozenset({"the", "of", "to", "in", "is", "at", "for", "and", "on", "by", "it", "be", "py", "file", "line"})


def extract_features(located: LocatedFailure, rules: tuple[FaultRule, ...] = LOG_RULES) -> dict[str, float]:
    return {fact: float(count) for fact, count in Counter(_iterate_features(located, rules)).items()}


def _iterate_features(located: LocatedFailure, rules: tuple[FaultRule, ...]) -> Iterator[str]:
    # A traceback that begins more than `_NEAR_LINES` lines later may come from another rank, so it is not used.
    lines, first = located.traceback, located.first.number
    is_own = lines and lines[0].number - _NEAR_LINES <= first <= lines[-1].number
    traceback = [_remove_rank_mark(line) for line in lines] if is_own else []
    raised = next((line for line in reversed(traceback) if find_exception_name(line)), "")
    opening = raised or _remove_rank_mark(located.first)
    held = [(sign, find_matching_rules(sign.text, rules)) for sign in located.error_lines]
    primary = [sign for sign, rows in held if not rows or not all(row.secondary for row in rows)] or located.error_lines
    signs = [_remove_rank_mark(sign) for sign in primary[:_CAUSES]]
    for line in (opening, *(text for text in signs if text != opening)):
        yield from _topics_in_line(line)
        yield from (f"@speaks:{name}" for name, form in _SOURCE_PATTERNS if form.search(line))
        errnos = {_CAUSE_BY_ERRNO.get(int(next(filter(None, hit.groups())))) for hit in _ERRNO.finditer(line)}
        errnos |= {kind for text, kind in _CAUSE_BY_ERROR_TEXT.items() if text in line.lower()}
        yield from (f"@errno:{kind}" for kind in sorted(filter(None, errnos)))
        if name := find_exception_name(line):
            yield f"@type:{name}"
            family = getattr(getattr(builtins, name, None), "__mro__", ())
            kinds = [each.__name__ for each in family if issubclass(each, Exception) and each is not Exception]
            yield from (f"@family:{kind}" for kind in (kinds if BaseException in family else ["other"]))
    yield from (f"{field}, first" for field in _topics_in_line(opening))
    yield "@traceback" if located.traceback else "@no-traceback"
    if owners := find_frame_owners(traceback):
        yield f"@raised-in:{owners[-1] if owners[-1] in ('user', 'stdlib') else 'package'}"
        yield "@through-user" if "user" in owners else "@not-through-user"
        _, installed, inside = _frame_paths(traceback)[-1].rpartition("site-packages/")
        for name in re.split(r"[/._]", inside)[:-1] if installed else ():
            yield from (f"{field}, module" for field in _TOPICS_BY_WORD.get(name, ()))


def _topics_in_line(line: str) -> Iterator[str]:
    """Yield the topics of each word in a line (`_TOPIC_WORDS`). A capital letter begins a word: `ncclSystemError`
    contains `system`.
    """
    for word in _WORD.findall(_PATH.sub(" ", line)):
        lower = word.lower()
        if len(lower) > 1 and lower not in _COMMON:
            yield from _TOPICS_BY_WORD.get(lower, ())


def find_exception_name(line: str) -> str:
    found = _EXCEPTION.match(line)
    return found[1] if found else ""


def find_frame_owners(lines: Iterable[str]) -> list[str]:
    """Return the owners of a traceback's frames, outermost first: `user`, `stdlib`, or a package name."""
    owners = []
    for path in _frame_paths(lines):
        _, installed, package = path.rpartition("site-packages/")
        owners.append(package.partition("/")[0] if installed else "stdlib" if _STDLIB.search(path) else "user")
    return owners


def _frame_paths(lines: Iterable[str]) -> list[str]:
    return [found[1] for line in lines if (found := _FRAME.search(line))]


def _remove_rank_mark(line: LogLine) -> str:
    return RANK_MARK.sub("", line.text)


# ---- vocabularies


_TOPIC_WORDS = {
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
"""For each topic, its words in log lines."""
_TOPICS_BY_WORD: dict[str, list[str]] = {}
for _field, _vocabulary in _TOPIC_WORDS.items():
    for _word in _vocabulary.split():
        _TOPICS_BY_WORD.setdefault(_word, []).append(f"@field:{_field}")

_SOURCE_PATTERNS = (
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
"""Error names of errno(3), by their usual cause."""
_CAUSE_BY_ERRNO = {
    number: kind
    for kind, names in _ERRNO_KINDS.items()
    for name in names.split()
    if (number := getattr(errno, name, None)) is not None
}
_CAUSE_BY_ERROR_TEXT = {os.strerror(number).lower(): kind for number, kind in _CAUSE_BY_ERRNO.items()}
