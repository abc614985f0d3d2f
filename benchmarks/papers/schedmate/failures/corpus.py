"""Compose the labelled corpus of failed job logs by seed from real output (`benchmarks/corpora`).

A third of the fault types of each kind (`fault_types.toml`) forms the test part. Types from real clusters are divided
separately. A log has a job header, a run with inserted harmless lines, the failure, and the last lines of the batch
system. Errors of other ranks form a cascade, which may start before the lines of the failing rank.
"""

from __future__ import annotations

import random
import re
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks import corpora

INFRASTRUCTURE, FRAMEWORK, USER = "infrastructure", "framework", "user"
SPLIT_SEED, CLUSTERS_SEED = "schedmate-failures-1", "schedmate-failures-clusters-1"


class FaultType(NamedTuple):
    name: str
    kind: str
    component: str


def held_out(types: Sequence[FaultType], seed: str) -> frozenset[str]:
    chance, chosen = random.Random(seed), list[str]()
    for kind in (INFRASTRUCTURE, FRAMEWORK, USER):
        names = sorted(each.name for each in types if each.kind == kind)
        chosen += chance.sample(names, round(len(names) / 3))
    return frozenset(chosen)


_TABLES = {
    part: tuple(FaultType(name, *labels) for name, labels in types.items())
    for part, types in tomllib.loads(Path(__file__).with_name("fault_types.toml").read_text()).items()
}
INJECTED, ON_CLUSTERS = _TABLES["injected"], _TABLES["on_clusters"]
TYPES = (*INJECTED, *ON_CLUSTERS)
TEST = held_out(INJECTED, SPLIT_SEED) | held_out(ON_CLUSTERS, CLUSTERS_SEED)

SLURM, MPI = "slurm", "mpi"


class Run(msgspec.Struct, frozen=True):
    """Output of one run. `truth`: index of the first failure line, or -1."""

    fault: str
    program: str
    truth: int
    lines: list[str]


def read_recorded_runs() -> list[Run]:
    files = ("failures.msgpack", "failures_on_clusters.msgpack")
    return [run for file in files for run in msgspec.msgpack.decode(corpora.read(file), type=list[Run])]


LOGS_OF_A_TYPE = {INFRASTRUCTURE: 8, FRAMEWORK: 12, "user": 16}
"""Logs per fault type, by kind: about 30 % infrastructure failures (25 % in the paper)."""
_SEVERAL_RANKS = 0.75
_EARLY_CASCADE = 0.25
CONSEQUENCES = re.compile(
    r"srun: error: \S+: tasks? [\d,-]+: (?:Exited with exit code|Terminated|Killed)|srun: (?:got SIGCONT|forcing job termination"
    r"|Job step aborted|Force Terminated|launch/slurm: _step_signal)|mpirun: Forwarding signal|Primary job  terminated normally"
    r"|a non-zero exit code\. Per user-direction|mpirun detected that|-{20,}$|\s*$"
)
"""Lines that launchers print at the end of each job, outside the failure."""
_NOISE = tomllib.loads(Path(__file__).with_name("noise.toml").read_text())
_MARKS = ("[rank{rank}]: ", "{rank}: ", "", "[default{rank}]:")


class FailedJob(msgspec.Struct, frozen=True):
    """A log with labels. `truth`: number of the first failure line, from 1; `own`: lines of the failing rank."""

    fault: str
    kind: str
    component: str
    truth: int
    own: tuple[str, ...]
    lines: list[str]


def corpus(*, test: bool) -> Iterator[FailedJob]:
    runs: dict[str, list[Run]] = defaultdict(list)
    for run in read_recorded_runs():
        if run.fault and run.truth >= 0:
            runs[run.fault].append(run)
    for fault in TYPES:
        if (fault.name in TEST) is not test:
            continue
        for number in range(LOGS_OF_A_TYPE[fault.kind]):
            chance = random.Random(f"{fault.name} {number}")
            run = chance.choice(runs[fault.name])
            lines, truth, own = _compose_log(run, chance)
            yield FailedJob(fault.name, fault.kind, fault.component, truth + 1, own, lines)


def _compose_log(run: Run, chance: random.Random) -> tuple[list[str], int, tuple[str, ...]]:
    if run.program in (SLURM, MPI):
        before = [*chance.choice(_NOISE["headers"]), *_with_harmless_lines(run.lines[: run.truth], chance)]
        own = [line for line in run.lines[run.truth :] if not CONSEQUENCES.match(line)]
        fill = _placeholder_filler(chance)
        return [*map(fill, before), *run.lines[run.truth :]], len(before), tuple(own or run.lines[run.truth :])
    ranks = 1
    if run.program != "plain" and chance.random() < _SEVERAL_RANKS:
        ranks = chance.choice((8, 32, 64, 128))
    failing = chance.randrange(ranks)
    mark = chance.choice(_MARKS).replace("{rank}", str(failing)) if ranks > 1 else ""
    before = [*chance.choice(_NOISE["headers"]), *_with_harmless_lines(run.lines[: run.truth], chance)]
    own = [mark + line for line in run.lines[run.truth :]]
    cascade: list[list[str]] = []
    if ranks > 1:
        style = chance.choice(("gloo", "nccl", "watchdog"))
        others = [rank for rank in range(ranks) if rank != failing]
        chance.shuffle(others)
        cascade = [[line.replace("{rank}", str(rank)) for line in peer_loss_lines(chance, style)] for rank in others]
    is_early = bool(cascade) and chance.random() < _EARLY_CASCADE
    early = [line for _ in range(chance.randrange(1, 3)) for line in cascade.pop()] if is_early else []
    going_on = (
        run.lines[max(0, run.truth - chance.randrange(0, 30)) : run.truth] if ranks > 1 and run.truth > 40 else []
    )
    after = [*going_on, *(line for lines in cascade for line in lines), *ending_lines(chance, ranks=ranks)]
    fill = _placeholder_filler(chance)
    lines = [fill(line) for line in (*before, *early, *own, *after)]
    return lines, len(before) + len(early), tuple(own)


def _with_harmless_lines(lines: list[str], chance: random.Random) -> list[str]:
    found = list(lines)
    for _ in range(chance.randrange(0, 7)):
        at = chance.randrange(len(found) - 10) if len(found) > 10 else 0
        found[at:at] = chance.choice(_NOISE["harmless"])
    return found


def _placeholder_filler(chance: random.Random) -> Callable[[str], str]:
    values = {
        "{host}": f"node{chance.randrange(1, 400):03d}", "{job}": str(chance.randrange(100000, 9999999)), "{gpu}": str(chance.randrange(8)),
        "{pid}": str(chance.randrange(20000, 900000)), "{clock}": f"{chance.randrange(10**6)}.{chance.randrange(10**6):06d}", "{clock3}": str(chance.randrange(100, 999)),
    }  # fmt: skip

    def fill(line: str) -> str:
        if "{" in line:
            for name, value in values.items():
                line = line.replace(name, value)
        return line

    return fill


@cache
def torchrun_lines() -> tuple[list[str], list[str]]:
    lines = Path(__file__).with_name("torchrun.txt").read_text().split("\n")
    first = next(at for at, line in enumerate(lines) if line.startswith("[rank0]: Traceback"))
    last = next(at for at, line in enumerate(lines) if line.startswith("[rank0]: RuntimeError"))
    end = next(at for at, line in enumerate(lines) if "closing signal SIGTERM" in line)
    return [line.replace("[rank0]", "[rank{rank}]") for line in lines[first : last + 1]], lines[end:]


def peer_loss_lines(chance: random.Random, style: str) -> list[str]:
    lines = list(torchrun_lines()[0])
    if style == "nccl":
        lines[-1:] = _NOISE["nccl_remote"]
    elif style == "watchdog":
        lines = [*_NOISE["watchdog"], *_NOISE["stack"] * chance.randrange(1, 3), *_NOISE["heartbeat"]]
    return lines


def ending_lines(chance: random.Random, *, ranks: int) -> list[str]:
    lines = list(torchrun_lines()[1]) if ranks > 1 and chance.random() < 0.6 else []
    kind = chance.random()
    if kind < 0.5:
        lines += [f"srun: error: {{host}}: task {rank}: Exited with exit code 1" for rank in range(min(ranks, 8))]
        if ranks > 1:
            lines.append("srun: launch/slurm: _step_signal: Terminating StepId={job}.0")
            lines.append("slurmstepd: error: *** STEP {job}.0 ON {host} CANCELLED AT 2026-11-26T05:12:09 ***")
    elif kind < 0.65:
        lines.append("005 ({job}.000.000) 2026-11-26 05:12:11 Job terminated.")
        lines.append("\t(1) Normal termination (return value 1)")
    elif kind < 0.8 and ranks > 1:
        lines += ["--------------------------------------------------------------------------", "mpirun detected that one or more processes exited with non-zero "
                  "status, thus causing", "the job to be terminated. The first process to do so was:", "  Process name: [[61205,1],3]", "  Exit code:    1"]  # fmt: skip
    return lines
