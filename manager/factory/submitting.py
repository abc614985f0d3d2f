"""Submit jobs to Slurm, PBS, LSF and Grid Engine: write submit scripts, and read the answers of the commands.

The `options` of the site file are the last options in a script, because batch systems use the last value of an option.
Commands get the name of a script without its folder, because the folder's path may contain blanks or quotes.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

from stoker import site_options
from stoker.errors import ConfigError
from stoker.manager.factory.allowed_nodes import restrict_to_allowed_nodes
from stoker.manager.factory.batch import (
    BatchSystemError,
    CommandUnanswered,
    JobIdUnknown,
    NoNodeForJob,
    SubmissionRefused,
    job_name,
)
from stoker.manager.factory.commands import CommandRunner, last_output_lines
from stoker.manager.factory.pacing import RequestPacer
from stoker.manager.factory.pilot_command import rounded_walltime_s
from stoker.protocol.blocks import AllowedNodes
from stoker.protocol.ids import BlockId
from stoker.site import Provider, ProviderKind, Site

# ---- job ids (pure)

_SUBMITTED_SENTENCES = {
    ProviderKind.SLURM: re.compile(r"\bSubmitted batch job (\d+)"),
    ProviderKind.GRID_ENGINE: re.compile(r"\bYour job(?:-array)? (\d+)\S* \("),
    ProviderKind.LSF: re.compile(r"\bJob <(\d+)> is submitted to\b", re.IGNORECASE),
}
_JOB_ID_LINES = {
    ProviderKind.SLURM: re.compile(r"(\d+)(?:;\S+)?"),  # `sbatch --parsable` may add the cluster's name
    ProviderKind.PBS: re.compile(r"(\d+(?:\[\])?(?:\.[A-Za-z][\w.-]*)?)"),
    ProviderKind.GRID_ENGINE: re.compile(r"(\d+)(?:\.\d+-\d+:\d+)?"),  # `qsub -terse` adds the tasks of an array
}
_COLOUR_CODES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


_MATCHES_NOTHING = re.compile(r"(?!)")


def job_id_in_sentence(kind: ProviderKind, text: str) -> str:
    """Return the job id from a sentence like `Submitted batch job 7`; empty if there is not exactly one id."""
    found = set(_SUBMITTED_SENTENCES.get(kind, _MATCHES_NOTHING).findall(text))
    return str(found.pop()) if len(found) == 1 else ""


def job_id_on_own_line(kind: ProviderKind, text: str) -> str:
    """Return the job id that is alone on a line; empty if there is not exactly one id."""
    lines = [_COLOUR_CODES.sub("", line).strip() for line in text.splitlines()]
    found = {match[1] for match in map(_JOB_ID_LINES.get(kind, _MATCHES_NOTHING).fullmatch, lines) if match}
    return str(found.pop()) if len(found) == 1 else ""


# ---- errors of a submission (pure)

_TEMPORARY_ERROR = re.compile(
    r"unable to contact|cannot connect|can't connect|could not connect|connect(ion)? (failure|refused|timed out|reset)"
    r"|timed out|zero bytes were transmitted|temporarily un|not responding|commlib error|LSF is down|standby mode"
    r"|no route to host|try again|please wait|could not establish a configuration source",
    re.IGNORECASE,
)
_NO_ANSWER_ERROR = re.compile(r"timed out on send/recv|zero bytes were transmitted|connection reset", re.IGNORECASE)
"""Errors after which the batch system may have accepted the job."""
_QUEUE_FULL_ERROR = re.compile(r"temporarily unable to accept job|resource temporarily unavailable", re.IGNORECASE)
"""Errors that Slurm reports if its queue is full and it has not accepted the job."""
_TOO_MANY_JOBS_ERROR = re.compile(
    # Since version 20.11, Slurm prints the name of the limit; earlier versions name all limits in one sentence.
    r"\b(Assoc|QOS)\w*Submit\w*Limit\b|^(?!.*\b(Assoc|QOS)\w).*job submit limit"
    r"|would exceed .*\blimit|maximum number of jobs already in queue"  # PBS
    r"|pending (job|slot)s? (threshold|limit)"  # LSF
    r"|only \d+ jobs are allowed",  # Grid Engine
    re.IGNORECASE,
)
"""Errors that occur if this user, or all users together, have too many jobs in the queue."""


_NO_NODE_ERROR = re.compile(r"Requested node configuration is not available|Invalid node name", re.IGNORECASE)
"""Errors that occur if a node is unknown, or no node can ever run the job."""


def is_temporary_submission_error(words: str) -> bool:
    return _TEMPORARY_ERROR.search(words) is not None or _TOO_MANY_JOBS_ERROR.search(words) is not None


def add_advice_to_submission_error(words: str) -> str:
    if _QUEUE_FULL_ERROR.search(words):
        return f"{words}: Slurm's own queue is full (MaxJobCount), for all users; Stoker tries until Slurm accepts jobs"
    if _TOO_MANY_JOBS_ERROR.search(words):
        return (
            f"{words}: a limit of jobs in the queue is reached; Stoker submits again when some of them end; to stay"
            " below the limit lower [pilot] max_blocks"
        )
    return words


# ---- submission


class JobSubmitter:
    def __init__(
        self,
        site: Site,
        *,
        session: str,
        folder: Path,
        command: Callable[[BlockId], str],
        pacer: RequestPacer | None = None,
    ) -> None:
        self.session = session
        self.folder = folder
        self.commands = CommandRunner(limit_s=site.provider.command_limit_s, folder=folder, pacer=pacer)
        self.names_of_jobs: dict[str, str] = {}
        self._command = command
        self._site = site

    def submit(self, block: BlockId, allowed: AllowedNodes) -> str:
        """Raises SubmissionRefused, BatchSystemError."""
        name, site = job_name(self.session, block), restrict_to_allowed_nodes(self._site, allowed)
        script = render_submit_script(site, job=name, command=self._command(block))
        self.folder.mkdir(mode=0o700, exist_ok=True)
        (self.folder / f"{name}.sh").write_text(script, errors="surrogateescape")
        job = self._run_submit_command(_build_submit_command(site.provider, f"{name}.sh"))
        self.names_of_jobs[job] = name
        return job

    def last_output_lines_of_job(self, job: str, name: str = "") -> list[str]:
        """Return the last lines of a job's output. `name`: job name, needed for jobs that another process submitted."""
        name = self.names_of_jobs.get(job, name)
        return last_output_lines(self.folder, name) if name else []

    def _run_submit_command(self, line: str) -> str:
        kind = self._site.provider.kind
        try:
            said = self.commands.run_shell_line(line)
        except CommandUnanswered as error:
            if _QUEUE_FULL_ERROR.search(str(error)):
                raise BatchSystemError(add_advice_to_submission_error(str(error))) from error
            raise
        if job := job_id_in_sentence(kind, said.out) or job_id_in_sentence(kind, said.err):
            return job
        words, job = said.failure_reason, job_id_on_own_line(kind, said.out)
        if job and said.code == 0:
            return job
        if job or said.code == 0:
            raise JobIdUnknown(f"the output contains no unique job id: {words}")
        if _NO_ANSWER_ERROR.search(words):
            raise CommandUnanswered(words)
        if is_temporary_submission_error(words):
            raise BatchSystemError(add_advice_to_submission_error(words))
        raise NoNodeForJob(words) if _NO_NODE_ERROR.search(words) else SubmissionRefused(words)


def _build_submit_command(given: Provider, script: str) -> str:
    queue = ["-q", given.queue] if given.queue else []
    match given.kind:
        case ProviderKind.SLURM:
            return f"sbatch {script}"
        case ProviderKind.PBS:
            return shlex.join(["qsub", *queue, *(["-A", given.account] if given.account else []), script])
        case ProviderKind.LSF:
            return f"bsub < {script}"  # LSF reads the options in a script only if the script is its standard input
        case _:
            return shlex.join(["qsub", *queue, "-terse", script])


# ---- scripts (pure)


def render_submit_script(site: Site, *, job: str, command: str) -> str:
    """Return the submit script of a job. Raises ConfigError."""
    given = site.provider
    mark = site_options.OPTION_PREFIXES[given.kind.value]
    own = (line if line.startswith("#") else f"{mark} {line}" for line in given.options)
    head = _OPTIONS_OF_KIND[given.kind](given, job, rounded_walltime_s(site) // 60)
    init = ['cd "$PBS_O_WORKDIR"'] if given.kind is ProviderKind.PBS else []
    lines = [
        *(f"{mark} {line}" for line in head),
        *own,
        "",
        *init,
        given.worker_init,
        "",
        _build_launch_command(given, command),
    ]
    return "\n".join(["#!/bin/bash", *lines, ""])


def _build_launch_command(given: Provider, command: str) -> str:
    """Return the shell command that starts one pilot per node. If there is only one node, the pilot replaces the batch
    shell. Slurm then sends the pilot SIGTERM `KillWait` seconds before SIGKILL. The pilot can use the whole
    `GraceTime`, because Slurm sends no SIGTERM when it starts.
    """
    if given.nodes == 1:
        return f"exec {command}"
    again = shlex.quote(f"{given.worker_init}\nexec {command}")
    match given.kind:
        case ProviderKind.SLURM:
            cores = f" --cpus-per-task={given.cores}" if given.cores else ""
            each = f"--nodes={given.nodes} --ntasks={given.nodes} --ntasks-per-node=1{cores}"
            # --export=ALL: with --export=NONE in a site's options, job steps lack PATH.
            return f"exec srun {each} --export=ALL --kill-on-bad-exit=0 --wait=0 {command}"
        case ProviderKind.PBS:
            return f'cd "$PBS_O_WORKDIR"\nexec pbsdsh -- /bin/bash -c {again}'
        case ProviderKind.LSF:
            return f'exec blaunch -z "$(echo $LSB_HOSTS | xargs -n1 | sort -u | xargs)" /bin/bash -c {again}'
        case kind:
            raise ConfigError(
                f"nodes = {given.nodes}: a block of {kind.value} is one node here; raise max_blocks instead"
            )


def _slurm_options(given: Provider, job: str, minutes: int) -> Iterator[str]:
    yield from (f"--job-name={job}", f"--output={job}.out", f"--error={job}.err", "--open-mode=append")
    yield from (f"--nodes={given.nodes}", f"--time={minutes}", "--ntasks-per-node=1")
    if given.memory_bytes:
        yield f"--mem={_memory_mebibytes(given)}M"
    for name in ("partition", "account", "qos", "constraint"):
        if value := getattr(given, name):
            yield f"--{name}={_quote_sbatch_value(value)}"
    if given.gpu_count:
        yield f"--gres=gpu:{given.gpu_type}:{given.gpu_count}" if given.gpu_type else f"--gres=gpu:{given.gpu_count}"
    if given.cores:
        yield f"--cpus-per-task={given.cores}"


def _pbs_options(given: Provider, job: str, minutes: int) -> Iterator[str]:
    select = f"select={given.nodes}:ncpus={given.cores or 1}"
    select += f":ngpus={given.gpu_count}" if given.gpu_count else ""
    select += f":gpu_type={given.gpu_type}" if given.gpu_type else ""
    select += f":mem={_memory_mebibytes(given)}mb" if given.memory_bytes else ""
    yield from ("-S /bin/bash", f"-N {job}", "-m n", f"-o {job}.out", f"-e {job}.err", f"-l {select}")
    yield f"-l walltime={_format_walltime(minutes)}"


def _lsf_options(given: Provider, job: str, minutes: int) -> Iterator[str]:
    cores = given.cores or 1  # LSF without its HPC extensions rejects -nnodes
    yield from (f"-J {job}", f"-o {job}.out", f"-e {job}.err", f"-W {minutes}")
    yield from (f"-n {cores * given.nodes}", f'-R "span[ptile={cores}]"')
    if given.account:
        yield f"-P {given.account}"
    if given.queue:
        yield f"-q {given.queue}"
    if given.gpu_count:
        kind = f":gmodel={given.gpu_type}" if given.gpu_type else ""
        yield f'-gpu "num={given.gpu_count}{kind}"'
    if given.memory_bytes:
        yield f"-M {_memory_mebibytes(given)}MB"


def _grid_engine_options(given: Provider, job: str, minutes: int) -> Iterator[str]:
    yield from (
        "-S /bin/bash",
        f"-N {job}",
        f"-o {job}.out",
        f"-e {job}.err",
        "-cwd",
        f"-l h_rt={_format_walltime(minutes)}",
    )
    if given.account:
        yield f"-P {given.account}"
    if given.cores > 1:
        yield f"-pe smp {given.cores}"
    if given.gpu_count:
        yield f"-l gpu={given.gpu_count}"
        if given.gpu_type:
            yield f"-l gpu_type={given.gpu_type}"
    if given.memory_bytes:
        yield f"-l h_vmem={_memory_mebibytes(given)}M"


_OPTIONS_OF_KIND: dict[ProviderKind, Callable[[Provider, str, int], Iterator[str]]] = {
    ProviderKind.SLURM: _slurm_options,
    ProviderKind.PBS: _pbs_options,
    ProviderKind.LSF: _lsf_options,
    ProviderKind.GRID_ENGINE: _grid_engine_options,
}


def _format_walltime(minutes: int) -> str:
    return f"{minutes // 60:02d}:{minutes % 60:02d}:00"


def _memory_mebibytes(given: Provider) -> int:
    return math.ceil(given.memory_bytes / 2**20)


def _quote_sbatch_value(value: str) -> str:
    """Quote an option value for an `#SBATCH` line."""
    return value if not set(value) & set(" \t'\"#\\") else '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
