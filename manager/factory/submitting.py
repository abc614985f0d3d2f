"""The id of a new job in what `sbatch`, `qsub` or `bsub` printed, between the lines that a site adds (pure).

Sites wrap these commands: a line about the budget before the id, a banner after it. A sentence of the batch system that
names the id counts wherever it is. A line that is an id and nothing else counts if it is the only one. In every other
case the answer is empty, and the job is found by its name.

Parsl's providers, made from a site: what writes submit scripts, and speaks with PBS, LSF, Grid Engine, Kubernetes.

What a provider of Parsl's does is right for most sites; how it does it is not always right for ours. Every command and
every script of it passes through `BoundedProvider`, which stands between it and its base class:

- a command is ours to run (`commands`): bounded in time, killed when that is up, in the folder of submit scripts;
- scripts lie in that folder under the job's own name and are named without a path, so that a session folder with
  blanks, quotes or line breaks in its name works (Parsl puts the path into a shell line, and into the script);
- the job's name is ours: Parsl appends the time to it, and then a job cannot be found by its name;
- nothing is run while a provider is made: SlurmProvider asks `sacct` then, with whoever makes it waiting.

Settings that Parsl's templates have no place for (GPUs of LSF and Grid Engine, memory to the megabyte, an append mode
for the output of a job that runs twice) go in as lines of the script's head. The last of these are the site's own
`options`: where a batch system reads a setting twice, the last one counts. (`site_options` names those that a site may
not give: a job would not be found again.)

Submission through one of Parsl's providers, and what its failure means: not now, or not at all.
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
from stoker.manager.factory import slurm_output
from stoker.manager.factory.batch import BatchTrouble, SubmissionRefused, Unanswered, UnnamedJob, job_name
from stoker.manager.factory.commands import CommandResult, CommandRunner
from stoker.manager.factory.pacing import Pacer
from stoker.manager.factory.pilot_command import walltime_s
from stoker.protocol.ids import BlockId
from stoker.site import Provider, ProviderKind, Site

# ---- job ids


_SENTENCES = {
    ProviderKind.SLURM: re.compile(r"\bSubmitted batch job (\d+)"),
    ProviderKind.GRID_ENGINE: re.compile(r"\bYour job(?:-array)? (\d+)\S* \("),
    ProviderKind.LSF: re.compile(r"\bJob <(\d+)> is submitted to\b", re.IGNORECASE),
}
_LINES = {
    ProviderKind.SLURM: re.compile(r"(\d+)(?:;\S+)?"),  # sbatch --parsable, with the cluster's name
    ProviderKind.PBS: re.compile(r"(\d+(?:\[\])?(?:\.[A-Za-z][\w.-]*)?)"),
    ProviderKind.GRID_ENGINE: re.compile(r"(\d+)(?:\.\d+-\d+:\d+)?"),  # -terse; an array names its tasks
}
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def job_id_in_sentence(kind: ProviderKind, text: str) -> str:
    """The id in the batch system's own sentence; empty if there is none, or if sentences name different ids."""
    found = set(_SENTENCES[kind].findall(text)) if kind in _SENTENCES else set()
    return str(found.pop()) if len(found) == 1 else ""


def job_id_on_own_line(kind: ProviderKind, text: str) -> str:
    """The id on a line of its own; empty if no line looks like an id, or if several do."""
    pattern = _LINES.get(kind)
    lines = [_COLOURS.sub("", line).strip() for line in text.splitlines()]
    found = {match[1] for line in lines if pattern is not None and (match := pattern.fullmatch(line))}
    return str(found.pop()) if len(found) == 1 else ""


# ---- providers


class NotSubmitted(Exception):
    """A script was rendered, and nobody is there to submit it."""


class BoundedProvider(ClusterProvider):  # type: ignore[misc]  # parsl is untyped
    """Between a provider and its base. `shell` runs its commands; without one, scripts are only rendered (`text`)."""

    shell: Callable[[str], CommandResult] | None = None
    job = ""
    text = ""
    said: CommandResult | None = None
    """How the last command ended: providers keep that to themselves."""
    _given = ""

    def begin(self, job: str) -> None:
        """What is submitted next is the job of this name."""
        self.job, self.said = job, None

    def execute_wait(self, cmd: str, timeout: float | None = None) -> tuple[int, str, str]:
        """Run a command. Raises BatchTrouble when it does not answer in time."""
        del timeout  # the site's limit holds
        if self.shell is None:
            if self.text:
                raise NotSubmitted
            return 1, "", "nothing is run while a provider is made"
        if self._given:
            cmd = cmd.replace(self._given, script_name(self.job))
        self.said = self.shell(cmd)
        return self.said.code, self.said.out, self.said.err

    def _write_submit_script(self, template: str, script_filename: str, job_name: str, configs: dict[str, Any]) -> None:
        del job_name  # has the time appended
        ours = {
            "submit_script_dir": ".",
            "job_stdout_path": f"{self.job}.out",
            "job_stderr_path": f"{self.job}.err",
        }
        self._given = script_filename
        text = Template(template).substitute({**configs, **ours, "jobname": self.job})
        for theirs, suffix in (("submit.stdout", "out"), ("submit.stderr", "err")):  # LSF and Grid Engine
            text = text.replace(f"./{self.job}.{theirs}", f"{self.job}.{suffix}")
        self.text = text
        if self.shell is not None:
            (Path(self.script_dir) / script_name(self.job)).write_text(self.text, errors="surrogateescape")


class _Slurm(SlurmProvider, BoundedProvider):  # type: ignore[misc]
    pass


class _Pbs(PBSProProvider, BoundedProvider):  # type: ignore[misc]
    pass


class _Lsf(LSFProvider, BoundedProvider):  # type: ignore[misc]
    pass


class _GridEngine(GridEngineProvider, BoundedProvider):  # type: ignore[misc]
    def get_configs(self, command: str, tasks_per_node: int) -> dict[str, Any]:
        """What goes into the template, which has no place for the job's name."""
        configs: dict[str, Any] = super().get_configs(command, tasks_per_node)
        return {**configs, "scheduler_options": f"#$ -N {self.job}\n{configs['scheduler_options']}"}


class OnEachNode(Launcher):  # type: ignore[misc]
    """Starts one pilot a node of the block.

    On one node the pilot takes the place of the batch shell: no other process, and no step for which slurmctld has to
    be there. Slurm's SIGTERM reaches it KillWait before the kill either way (tried: scancel, REQUEUE, CANCEL).
    Where preemption has a GraceTime, a step would get it at its beginning; the pilot works on for so long instead.
    """

    def __init__(self, provider: Provider) -> None:
        super().__init__(debug=False)
        self.provider = provider

    def __call__(self, command: str, tasks_per_node: int, nodes_per_block: int, script_dir: str = "") -> str:
        """The last lines of the submit script."""
        del tasks_per_node, script_dir
        if nodes_per_block == 1:
            return f"exec {command}"
        again = shlex.quote(f"{self.provider.worker_init}\nexec {command}")
        match self.provider.kind:
            case ProviderKind.SLURM:
                cores = f" --cpus-per-task={self.provider.cores}" if self.provider.cores else ""
                each = f"--nodes={nodes_per_block} --ntasks={nodes_per_block} --ntasks-per-node=1{cores}"
                # --export: where a site's options have NONE, the steps would have no PATH.
                return f"exec srun {each} --export=ALL --kill-on-bad-exit=0 --wait=0 {command}"
            case ProviderKind.PBS:
                return f'cd "$PBS_O_WORKDIR"\nexec pbsdsh -- /bin/bash -c {again}'
            case ProviderKind.LSF:
                return f'exec blaunch -z "$(echo $LSB_HOSTS | xargs -n1 | sort -u | xargs)" /bin/bash -c {again}'
            case kind:
                raise ConfigError(
                    f"nodes = {nodes_per_block}: a block of {kind.value} is one node here; raise max_blocks instead"
                )


def provider_of(site: Site, *, shell: Callable[[str], CommandResult] | None = None, folder: Path = Path()) -> Any:
    """Parsl's provider for a site with submit scripts: Slurm, PBS, LSF or Grid Engine. Raises ConfigError.

    Its commands go to `shell`, its scripts into `folder`; without a shell it only renders.
    """
    make = _MAKERS.get(site.provider.kind)
    if make is None:
        raise ConfigError(f"site {site.name}: {site.provider.kind.value} takes no submit script")
    provider = make(site.provider, _clock(site))
    provider.shell = shell
    provider.script_dir = str(folder)
    return provider


def render(site: Site, *, job: str, command: str) -> str:
    """The script that `submit` gives to the batch system, without doing so. Raises ConfigError."""
    provider = provider_of(site)
    provider.begin(job)
    try:
        provider.submit(command, 1, job)
    except NotSubmitted:
        return str(provider.text)
    raise AssertionError("a provider that runs nothing has submitted something")


def script_name(job: str) -> str:
    """The file of a job's submit script."""
    return f"{job}.sh"


def _clock(site: Site) -> str:
    minutes = walltime_s(site) // 60
    return f"{minutes // 60:02d}:{minutes % 60:02d}:00"


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


def _pbs(given: Provider, walltime: str) -> BoundedProvider:
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


def _lsf(given: Provider, walltime: str) -> BoundedProvider:
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
        # -nnodes, which Parsl writes otherwise, is refused by an LSF without its HPC additions.
        request_by_nodes=False,
        cores_per_block=cores * given.nodes,
        cores_per_node=cores,
        walltime=walltime,
        scheduler_options="\n".join(head),
        worker_init=given.worker_init,
        # Without the redirection LSF does not read the head of the script.
        bsub_redirection=True,
        launcher=OnEachNode(given),
    )
    provider.scheduler_options += _lines(given)
    return provider


def _grid_engine(given: Provider, walltime: str) -> BoundedProvider:
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
    ProviderKind.PBS: _pbs,
    ProviderKind.LSF: _lsf,
    ProviderKind.GRID_ENGINE: _grid_engine,
}


def _lines(given: Provider) -> str:
    """The site's own lines for the head of the script."""
    mark = site_options.MARKS[given.kind.value]
    return "".join(f"{line if line.startswith('#') else f'{mark} {line}'}\n" for line in given.options)


def _mebibytes(given: Provider) -> int:
    return math.ceil(given.memory_bytes / 2**20)


def _word(value: str) -> str | None:
    """A value in a line of `#SBATCH`, where blanks end it, `#` begins a comment, and quotes protect."""
    if not value:
        return None
    return value if not set(value) & set(" \t'\"#\\") else '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


# ---- submitting


_NOT_NOW = re.compile(
    r"unable to contact|cannot connect|can't connect|could not connect|connect(ion)? (failure|refused|timed out|reset)"
    r"|timed out|zero bytes were transmitted|temporarily un|not responding|commlib error|LSF is down|standby mode"
    r"|no route to host|try again|please wait|could not establish a configuration source",
    re.IGNORECASE,
)
"""Scheduler errors that say nothing about the job."""
_NO_ANSWER = re.compile(r"timed out on send/recv|zero bytes were transmitted|connection reset", re.IGNORECASE)
"""Errors of these after which the scheduler may have taken the job."""


class Submitter:
    """Submits a session's blocks to a batch system. `command` gives the pilot's command of a block.

    `commands` run in `folder`, where scripts and output lie under the jobs' `names`, which are kept by job id.
    """

    def __init__(
        self,
        site: Site,
        *,
        session: str,
        folder: Path,
        command: Callable[[BlockId], str],
        pacer: Pacer | None = None,
    ) -> None:
        self._kind = site.provider.kind
        self.session = session
        self.folder = folder
        self.commands = CommandRunner(limit_s=site.provider.command_limit_s, folder=folder, pacer=pacer)
        self.names: dict[str, str] = {}
        self._command = command
        self._provider = provider_of(site, shell=self.commands.shell, folder=folder)

    def submit(self, block: BlockId) -> str:
        """Submit the job of a block; its id. Raises SubmissionRefused, BatchTrouble."""
        name = job_name(self.session, block)
        job = _submit_through(self._provider, kind=self._kind, name=name, command=self._command(block))
        self.names[job] = name
        return job


def _submit_through(provider: BoundedProvider, *, kind: ProviderKind, name: str, command: str) -> str:
    """Submit a job of this name; its id. Raises SubmissionRefused and BatchTrouble, in the batch system's own words."""
    provider.begin(name)
    try:
        provider.submit(command, 1, name)
        why = "has not said why"
    except Unanswered as error:
        if slurm_output.WAITS_FOR_ROOM.search(str(error)):
            raise BatchTrouble(slurm_output.advice_on_submission(str(error))) from error
        raise
    except ExecutionProviderException as error:
        why = str(error)
    said = provider.said
    if said is None:
        raise SubmissionRefused(f"{provider.label}: {why}")
    # Parsl takes some line of a banner for the id.
    if job := job_id_in_sentence(kind, said.out) or job_id_in_sentence(kind, said.err):
        return job
    words, job = said.words, job_id_on_own_line(kind, said.out)
    if job and said.code == 0:
        return job
    if job or said.code == 0:
        raise UnnamedJob(f"no job id is certain in what it printed: {words}")
    if _NO_ANSWER.search(words):
        raise Unanswered(words)
    if is_not_now(words):
        raise BatchTrouble(slurm_output.advice_on_submission(words))
    raise SubmissionRefused(words)


def is_not_now(words: str) -> bool:
    """Whether an error of a batch system says that it is away or full, and nothing about what was asked."""
    return _NOT_NOW.search(words) is not None or slurm_output.FULL.search(words) is not None
