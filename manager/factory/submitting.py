"""Submission through Parsl's providers to Slurm, PBS, LSF and Grid Engine.

`BoundedProvider` changes the commands and scripts of each provider:

- Commands have a time limit.
- Scripts are named without a path, because the path of the session folder may contain blanks or quotes.
- Jobs have Stoker's names. Parsl appends the time to names, so jobs could not be found by name.
- Creating a provider runs no command.

The site's own `options` are the last lines of a script's head, because a batch system uses the last of two equal
settings.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from string import Template
from typing import Any

from parsl.launchers.base import Launcher
from parsl.providers import GridEngineProvider, LSFProvider, PBSProProvider, SlurmProvider
from parsl.providers.cluster_provider import ClusterProvider
from parsl.providers.errors import ExecutionProviderException

from stoker import site_options
from stoker.errors import ConfigError
from stoker.manager.factory.allowed_nodes import placed
from stoker.manager.factory.batch import BatchTrouble, NoNodeLeft, SubmissionRefused, Unanswered, UnnamedJob, job_name
from stoker.manager.factory.commands import CommandResult, CommandRunner, last_lines
from stoker.manager.factory.pacing import Pacer
from stoker.manager.factory.pilot_command import walltime_s
from stoker.protocol.blocks import ANYWHERE, AllowedNodes
from stoker.protocol.ids import BlockId
from stoker.site import Provider, ProviderKind, Site

# ---- job ids (pure)

_SENTENCES = {
    ProviderKind.SLURM: re.compile(r"\bSubmitted batch job (\d+)"),
    ProviderKind.GRID_ENGINE: re.compile(r"\bYour job(?:-array)? (\d+)\S* \("),
    ProviderKind.LSF: re.compile(r"\bJob <(\d+)> is submitted to\b", re.IGNORECASE),
}
_LINES = {
    ProviderKind.SLURM: re.compile(r"(\d+)(?:;\S+)?"),  # `sbatch --parsable` may add the cluster's name
    ProviderKind.PBS: re.compile(r"(\d+(?:\[\])?(?:\.[A-Za-z][\w.-]*)?)"),
    ProviderKind.GRID_ENGINE: re.compile(r"(\d+)(?:\.\d+-\d+:\d+)?"),  # `qsub -terse` adds the tasks of an array
}
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def job_id_in_sentence(kind: ProviderKind, text: str) -> str:
    """Return the job id from the batch system's usual sentence; empty if the id is not unique."""
    found = set(_SENTENCES[kind].findall(text)) if kind in _SENTENCES else set()
    return str(found.pop()) if len(found) == 1 else ""


def job_id_on_own_line(kind: ProviderKind, text: str) -> str:
    """Return the job id that is alone on a line; empty if the id is not unique."""
    pattern = _LINES.get(kind)
    lines = [_COLOURS.sub("", line).strip() for line in text.splitlines()]
    found = {match[1] for line in lines if pattern is not None and (match := pattern.fullmatch(line))}
    return str(found.pop()) if len(found) == 1 else ""


# ---- errors of a submission (pure)

_NOT_NOW = re.compile(
    r"unable to contact|cannot connect|can't connect|could not connect|connect(ion)? (failure|refused|timed out|reset)"
    r"|timed out|zero bytes were transmitted|temporarily un|not responding|commlib error|LSF is down|standby mode"
    r"|no route to host|try again|please wait|could not establish a configuration source",
    re.IGNORECASE,
)
_NO_ANSWER = re.compile(r"timed out on send/recv|zero bytes were transmitted|connection reset", re.IGNORECASE)
"""Errors after which the scheduler may have accepted the job."""
_WAITS_FOR_ROOM = re.compile(r"temporarily unable to accept job|resource temporarily unavailable", re.IGNORECASE)
"""Errors of `sbatch` while Slurm's queue is full. Slurm has not accepted the job."""
_FULL = re.compile(
    # Slurm prints the limit's name since 20.11; earlier versions print all limits in one sentence.
    r"\b(Assoc|QOS)\w*Submit\w*Limit\b|^(?!.*\b(Assoc|QOS)\w).*job submit limit"
    r"|would exceed .*\blimit|maximum number of jobs already in queue"  # PBS
    r"|pending (job|slot)s? (threshold|limit)"  # LSF
    r"|only \d+ jobs are allowed",  # Grid Engine
    re.IGNORECASE,
)
"""Errors about too many jobs, of this user or of all users."""


_NO_NODE = re.compile(r"Requested node configuration is not available|Invalid node name", re.IGNORECASE)
"""Errors of `sbatch` if no node remains, or if `--exclude` or `--nodelist` contains an unknown node."""


def is_temporary_submission_error(words: str) -> bool:
    return _NOT_NOW.search(words) is not None or _FULL.search(words) is not None


def add_advice_to_submission_error(words: str) -> str:
    if _WAITS_FOR_ROOM.search(words):
        return f"{words}: Slurm's own queue is full (MaxJobCount), for all users; Stoker tries until Slurm takes jobs"
    if _FULL.search(words):
        return (
            f"{words}: a limit of jobs in the queue is reached; Stoker submits again when some of them end; to stay"
            " below the limit lower [pilot] max_blocks"
        )
    return words


# ---- submission


class Submitter:
    def __init__(
        self, site: Site, *, session: str, folder: Path, command: Callable[[BlockId], str], pacer: Pacer | None = None
    ) -> None:
        self._kind = site.provider.kind
        self.session = session
        self.folder = folder
        self.commands = CommandRunner(limit_s=site.provider.command_limit_s, folder=folder, pacer=pacer)
        self.names: dict[str, str] = {}
        self._command = command
        self._site = site
        self._provider = make_parsl_provider(site, shell=self.commands.shell, folder=folder)

    def submit(self, block: BlockId, allowed: AllowedNodes = ANYWHERE) -> str:
        """Submit the job of a block. Raises SubmissionRefused, BatchTrouble."""
        name = job_name(self.session, block)
        provider = self._provider
        if allowed != ANYWHERE:
            provider = make_parsl_provider(placed(self._site, allowed), shell=self.commands.shell, folder=self.folder)
        job = self._submit(provider, name, self._command(block))
        self.names[job] = name
        return job

    def output(self, job: str, name: str = "") -> list[str]:
        """Return the last lines of a job's output. `name` is needed for jobs of other processes."""
        name = self.names.get(job, name)
        return last_lines(self.folder, name) if name else []

    def _submit(self, provider: Any, name: str, command: str) -> str:
        provider.begin(name)
        try:
            provider.submit(command, 1, name)
            why = "gave no reason"
        except Unanswered as error:
            if _WAITS_FOR_ROOM.search(str(error)):
                raise BatchTrouble(add_advice_to_submission_error(str(error))) from error
            raise
        except ExecutionProviderException as error:
            why = str(error)
        said = provider.said
        if said is None:
            raise SubmissionRefused(f"{provider.label}: {why}")
        # Parsl may mistake a line of a banner for the job id, so this method reads the id.
        if job := job_id_in_sentence(self._kind, said.out) or job_id_in_sentence(self._kind, said.err):
            return job
        words, job = said.words, job_id_on_own_line(self._kind, said.out)
        if job and said.code == 0:
            return job
        if job or said.code == 0:
            raise UnnamedJob(f"the output contains no unique job id: {words}")
        if _NO_ANSWER.search(words):
            raise Unanswered(words)
        if is_temporary_submission_error(words):
            raise BatchTrouble(add_advice_to_submission_error(words))
        raise NoNodeLeft(words) if _NO_NODE.search(words) else SubmissionRefused(words)


# ---- Parsl's providers


class NotSubmitted(Exception):
    """Raised after a script is rendered without submission."""


class BoundedProvider(ClusterProvider):  # type: ignore[misc]  # parsl is untyped
    """A Parsl provider with a time limit on commands. Without `shell`, the provider only renders scripts (`text`)."""

    shell: Callable[[str], CommandResult] | None = None
    job = ""
    text = ""
    said: CommandResult | None = None
    _given = ""

    def begin(self, job: str) -> None:
        self.job, self.said = job, None

    def execute_wait(self, cmd: str, timeout: float | None = None) -> tuple[int, str, str]:
        """Run a command. Raises BatchTrouble if the command does not answer in time."""
        del timeout  # the site's time limit applies
        if self.shell is None:
            if self.text:
                raise NotSubmitted
            return 1, "", "no command runs while a provider is created"
        if self._given:
            cmd = cmd.replace(self._given, f"{self.job}.sh")
        self.said = self.shell(cmd)
        return self.said.code, self.said.out, self.said.err

    def _write_submit_script(self, template: str, script_filename: str, job_name: str, configs: dict[str, Any]) -> None:
        del job_name  # Parsl has appended the time to this name
        out, err = f"{self.job}.out", f"{self.job}.err"
        ours = {"submit_script_dir": ".", "job_stdout_path": out, "job_stderr_path": err, "jobname": self.job}
        self._given = script_filename
        text = Template(template).substitute({**configs, **ours})
        # Scripts of LSF and Grid Engine contain Parsl's own names of the output files.
        self.text = text.replace(f"./{self.job}.submit.stdout", out).replace(f"./{self.job}.submit.stderr", err)
        if self.shell is not None:
            (Path(self.script_dir) / f"{self.job}.sh").write_text(self.text, errors="surrogateescape")


class _Slurm(SlurmProvider, BoundedProvider):  # type: ignore[misc]
    pass


class _Pbs(PBSProProvider, BoundedProvider):  # type: ignore[misc]
    pass


class _Lsf(LSFProvider, BoundedProvider):  # type: ignore[misc]
    pass


class _GridEngine(GridEngineProvider, BoundedProvider):  # type: ignore[misc]
    def get_configs(self, command: str, tasks_per_node: int) -> dict[str, Any]:
        configs: dict[str, Any] = super().get_configs(command, tasks_per_node)
        return {**configs, "scheduler_options": f"#$ -N {self.job}\n{configs['scheduler_options']}"}


class OnEachNode(Launcher):  # type: ignore[misc]
    """Starts one pilot per node of the block.

    On one node, the pilot replaces the batch shell. Slurm then sends SIGTERM KillWait seconds before SIGKILL. With a
    shell, Slurm sends SIGTERM at the start of a GraceTime, in which the pilot still works.
    """

    def __init__(self, provider: Provider) -> None:
        super().__init__(debug=False)
        self.provider = provider

    def __call__(self, command: str, tasks_per_node: int, nodes_per_block: int, script_dir: str = "") -> str:
        del tasks_per_node, script_dir
        if nodes_per_block == 1:
            return f"exec {command}"
        again = shlex.quote(f"{self.provider.worker_init}\nexec {command}")
        match self.provider.kind:
            case ProviderKind.SLURM:
                cores = f" --cpus-per-task={self.provider.cores}" if self.provider.cores else ""
                each = f"--nodes={nodes_per_block} --ntasks={nodes_per_block} --ntasks-per-node=1{cores}"
                # With --export=NONE in a site's options, job steps have no PATH.
                return f"exec srun {each} --export=ALL --kill-on-bad-exit=0 --wait=0 {command}"
            case ProviderKind.PBS:
                return f'cd "$PBS_O_WORKDIR"\nexec pbsdsh -- /bin/bash -c {again}'
            case ProviderKind.LSF:
                return f'exec blaunch -z "$(echo $LSB_HOSTS | xargs -n1 | sort -u | xargs)" /bin/bash -c {again}'
            case kind:
                raise ConfigError(
                    f"nodes = {nodes_per_block}: a block of {kind.value} is one node here; raise max_blocks instead"
                )


def make_parsl_provider(
    site: Site, *, shell: Callable[[str], CommandResult] | None = None, folder: Path = Path()
) -> Any:
    """Return the Parsl provider of a site. Without `shell`, the provider only renders. Raises ConfigError."""
    make = _MAKERS.get(site.provider.kind)
    if make is None:
        raise ConfigError(f"site {site.name}: {site.provider.kind.value} takes no submit script")
    minutes = walltime_s(site) // 60
    provider = make(site.provider, f"{minutes // 60:02d}:{minutes % 60:02d}:00")
    provider.shell = shell
    provider.script_dir = str(folder)
    return provider


def render(site: Site, *, job: str, command: str) -> str:
    """Return the script that `submit` would submit. Raises ConfigError."""
    provider = make_parsl_provider(site)
    provider.begin(job)
    try:
        provider.submit(command, 1, job)
    except NotSubmitted:
        return str(provider.text)
    raise AssertionError("a provider without a shell has submitted a job")


def _slurm(given: Provider, walltime: str) -> BoundedProvider:
    gres = f"gpu:{given.gpu_type}:{given.gpu_count}" if given.gpu_type else f"gpu:{given.gpu_count}"
    head = ["#SBATCH --open-mode=append"]
    if given.memory_bytes:
        head.append(f"#SBATCH --mem={_mebibytes(given)}M")
    provider: BoundedProvider = _Slurm(
        partition=_word(given.partition),
        account=_word(given.account),
        qos=_word(given.qos),
        constraint=_word(given.constraint),
        nodes_per_block=given.nodes,
        cores_per_node=given.cores or None,
        gres=gres if given.gpu_count else None,
        walltime=walltime,
        exclusive=False,
        scheduler_options="\n".join(head),
        worker_init=given.worker_init,
        launcher=OnEachNode(given),
    )
    provider.scheduler_options += _lines(given)
    return provider


def _make_pbs_provider(given: Provider, walltime: str) -> BoundedProvider:
    select = f":ngpus={given.gpu_count}" if given.gpu_count else ""
    select += f":gpu_type={given.gpu_type}" if given.gpu_type else ""
    select += f":mem={_mebibytes(given)}mb" if given.memory_bytes else ""
    return _Pbs(
        account=shlex.quote(given.account) if given.account else None,
        queue=shlex.quote(given.queue) if given.queue else None,
        nodes_per_block=given.nodes,
        cpus_per_node=given.cores or 1,
        select_options=select.removeprefix(":"),
        walltime=walltime,
        scheduler_options=_lines(given),
        worker_init=f'cd "$PBS_O_WORKDIR"\n{given.worker_init}',
        launcher=OnEachNode(given),
    )


def _make_lsf_provider(given: Provider, walltime: str) -> BoundedProvider:
    cores = given.cores or 1
    head = []
    if given.gpu_count:
        kind = f":gmodel={given.gpu_type}" if given.gpu_type else ""
        head.append(f'#BSUB -gpu "num={given.gpu_count}{kind}"')
    if given.memory_bytes:
        head.append(f"#BSUB -M {_mebibytes(given)}MB")
    provider: BoundedProvider = _Lsf(
        project=given.account or None,
        queue=given.queue or None,
        nodes_per_block=given.nodes,
        request_by_nodes=False,  # LSF without its HPC extensions rejects -nnodes
        cores_per_block=cores * given.nodes,
        cores_per_node=cores,
        walltime=walltime,
        scheduler_options="\n".join(head),
        worker_init=given.worker_init,
        bsub_redirection=True,  # required for LSF to read the head of the script
        launcher=OnEachNode(given),
    )
    provider.scheduler_options += _lines(given)
    return provider


def _make_grid_engine_provider(given: Provider, walltime: str) -> BoundedProvider:
    head = [f"#$ -P {given.account}"] if given.account else []
    head += [f"#$ -pe smp {given.cores}"] if given.cores > 1 else []
    if given.gpu_count:
        head.append(f"#$ -l gpu={given.gpu_count}")
        head += [f"#$ -l gpu_type={given.gpu_type}"] if given.gpu_type else []
    head += [f"#$ -l h_vmem={_mebibytes(given)}M"] if given.memory_bytes else []
    return _GridEngine(
        nodes_per_block=given.nodes,
        queue=shlex.quote(given.queue) if given.queue else None,
        walltime=walltime,
        scheduler_options="\n".join([*head, _lines(given)]),
        worker_init=given.worker_init,
        launcher=OnEachNode(given),
    )


_MAKERS: dict[ProviderKind, Callable[[Provider, str], BoundedProvider]] = {
    ProviderKind.SLURM: _slurm,
    ProviderKind.PBS: _make_pbs_provider,
    ProviderKind.LSF: _make_lsf_provider,
    ProviderKind.GRID_ENGINE: _make_grid_engine_provider,
}


def _lines(given: Provider) -> str:
    mark = site_options.MARKS[given.kind.value]
    return "".join(f"{line if line.startswith('#') else f'{mark} {line}'}\n" for line in given.options)


def _mebibytes(given: Provider) -> int:
    return math.ceil(given.memory_bytes / 2**20)


def _word(value: str) -> str | None:
    """Quote a value for a line of `#SBATCH`."""
    if not value:
        return None
    return value if not set(value) & set(" \t'\"#\\") else '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
