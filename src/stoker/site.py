"""The settings in a site file, as structs that validate themselves. An error begins with the name of the setting."""

from __future__ import annotations

import difflib
import enum
import os
import re
from typing import Annotated

import msgspec

from stoker import site_options
from stoker.site_options import is_array_option, max_concurrent_array_tasks, refuse_control_characters


class Size(int):
    """A number of bytes. A site file writes it with a unit (`'4 GB'`)."""


class Duration(float):
    """A time in seconds. A site file writes it with a unit (`'90 s'`)."""


class Engine(enum.Enum):
    """The engine that runs calls."""

    STOKER = "stoker"
    TASKVINE = "taskvine"


class ProviderKind(enum.Enum):
    """The system that starts pilots."""

    LOCAL = "local"
    SLURM = "slurm"
    CONDOR = "condor"
    PBS = "pbs"
    LSF = "lsf"
    GRID_ENGINE = "grid_engine"
    KUBERNETES = "kubernetes"

    @property
    def title(self) -> str:
        """Name of the system for users."""
        names = {"local": "this machine", "condor": "HTCondor", "pbs": "PBS", "lsf": "LSF"}
        return names.get(self.value) or self.value.replace("_", " ").title()


POLICY_NAMES = ("default", "shortest-first", "exclusive", "prompt-tuner", "slinfer", "arlo")

BASELINES = {
    "disk-only": "benchmarks/baselines/forgetful.py:disk_only",
    "no-awareness": "benchmarks/baselines/forgetful.py:no_awareness",
    "random": "benchmarks/baselines/scattered.py:scattered",
    "infless": "benchmarks/baselines/infless.py:infless",
    "elastic-flow": "benchmarks/baselines/elastic_flow.py:elastic_flow",
}
"""Path of each policy that exists only in a clone of Stoker's repository, by name."""

OWN_POLICY = re.compile(r"(?P<place>[^:\s][^:]*):(?P<name>[A-Za-z_]\w*)")
"""Pattern of a user's own policy: `module:class` or `file:class`."""


class ProvisioningName(enum.Enum):
    """The rule that decides the number of blocks."""

    DEFAULT = "default"
    """`FIXED` for pilots on this machine, `OPPORTUNISTIC` for a batch system."""
    OPPORTUNISTIC = "opportunistic"
    """Run up to `max_blocks` blocks, and keep `keep_pending` blocks queued."""
    DEMAND = "demand"
    """Submit as many blocks as the waiting calls need to finish within `finish_within`."""
    FIXED = "fixed"
    """Keep `init_blocks` blocks running, and replace lost blocks."""
    ONCE = "once"
    """Submit `init_blocks` blocks, and do not replace lost blocks."""


class EnvironmentKind(enum.Enum):
    SHARED = "shared"
    """The pilot sees this Python environment at the same path."""
    PACKED = "packed"
    """The pilot fetches this Python environment as an archive, from the session or another pilot."""


Count = Annotated[int, msgspec.Meta(ge=0, le=10_000)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=10_000)]
Devices = Annotated[str, msgspec.Meta(pattern=r"^(auto|gpu|(gpu\+)?cpu(:[1-9][0-9]{0,3})?)$")]
Gpus = Annotated[str, msgspec.Meta(pattern=r"^(([A-Za-z0-9_.-]+:)?[1-9][0-9]{0,2})?$")]
Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,39}$")]
Ports = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{4,5}-[0-9]{4,5}$")]

_BATCH = frozenset(ProviderKind) - {ProviderKind.LOCAL}
_KINDS_BY_SETTING = {
    "partition": frozenset({ProviderKind.SLURM}),
    "qos": frozenset({ProviderKind.SLURM}),
    "constraint": frozenset({ProviderKind.SLURM}),
    "queue": frozenset({ProviderKind.PBS, ProviderKind.LSF, ProviderKind.GRID_ENGINE}),
    "requirements": frozenset({ProviderKind.CONDOR}),
    "image": frozenset({ProviderKind.KUBERNETES}),
    "namespace": frozenset({ProviderKind.KUBERNETES}),
    "account": _BATCH - {ProviderKind.KUBERNETES},
    "options": _BATCH - {ProviderKind.KUBERNETES},
    "gpus": _BATCH,
    "cores": _BATCH,
    "memory": _BATCH,
}
"""Provider kinds that accept a setting, by setting. All other kinds refuse the setting."""
KINDS_THAT_EXCLUDE_NODES = frozenset({ProviderKind.SLURM, ProviderKind.CONDOR})


def node_exclusion_warning(kind: ProviderKind) -> str:
    return f"Stoker excludes no failed nodes for {kind.title} jobs: a new block may start on such a node again"


_NO_ARRAYS = frozenset({ProviderKind.PBS, ProviderKind.LSF, ProviderKind.GRID_ENGINE})
_ONE_NODE = frozenset({ProviderKind.LOCAL, ProviderKind.CONDOR, ProviderKind.KUBERNETES})


class Provider(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The batch system that starts pilots, and the resources of one block (one job).

    `gpus` (`"2"` or `"a10:2"`), `cores`, `memory_bytes`: amounts per node (0 or empty: the batch system's default).
    `price`: price of a device-hour (0: unknown). `exclude_nodes`: maximum number of failed nodes that get no blocks.
    """

    kind: ProviderKind = ProviderKind.LOCAL
    partition: str = ""
    queue: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    requirements: str = ""
    image: str = ""
    namespace: str = ""
    walltime_s: Duration = msgspec.field(default=Duration(3600.0), name="walltime")
    nodes: Positive = 1
    gpus: Gpus = ""
    cores: Count = 0
    memory_bytes: Size = msgspec.field(default=Size(0), name="memory")
    options: tuple[str, ...] = ()
    worker_init: str = ""
    shared_files: bool = True
    command_limit_s: Duration = msgspec.field(default=Duration(30.0), name="command_limit")
    poll_s: Duration = msgspec.field(default=Duration(10.0), name="poll")
    price: Annotated[float, msgspec.Meta(ge=0.0, le=1_000_000.0)] = 0.0
    listing_lag_s: Duration = msgspec.field(default=Duration(60.0), name="listing_lag")
    exclude_nodes: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 4
    probe_nodes_s: Duration = msgspec.field(default=Duration(3600.0), name="probe_nodes")

    def __post_init__(self) -> None:
        refuse_control_characters(self, multiline_fields=("worker_init",))
        for setting, kinds in _KINDS_BY_SETTING.items():
            value = getattr(self, "memory_bytes" if setting == "memory" else setting)
            if value and self.kind not in kinds:
                meant = ", ".join(sorted(kind.value for kind in kinds))
                raise ValueError(f"{setting} is a setting for {meant}; kind is {self.kind.value}")
        if self.nodes > 1 and self.kind in _ONE_NODE:
            kind = self.kind.value
            raise ValueError(f"nodes = {self.nodes}: a block of {kind} always has one node; raise max_blocks instead")
        if self.kind is ProviderKind.KUBERNETES and not self.image:
            raise ValueError("image is missing: kubernetes pilots run in a container image that has Stoker")
        if not 60 <= self.walltime_s <= 366 * 86400:
            raise ValueError("walltime must be between 1 min and a year")
        if not 1 <= self.command_limit_s <= 600:
            raise ValueError("command_limit must be between 1 s and 10 min")
        if not 0.2 <= self.poll_s <= 3600:
            raise ValueError("poll must be between 0.2 s and 1 h")
        if not 1 <= self.listing_lag_s <= 3600:
            raise ValueError("listing_lag must be between 1 s and 1 h")
        if not 1 <= self.probe_nodes_s <= 7 * 86400:
            raise ValueError("probe_nodes must be between 1 s and 7 d")
        for line in self.options:
            if self.kind in _NO_ARRAYS and is_array_option(line):
                raise ValueError(
                    f"options has {line}: a block of {self.kind.value} is not a job array; raise max_blocks instead"
                )
            if why := site_options.explain_refused_option(self.kind.value, line):
                raise ValueError(f"options has {line}: {why}")
        line, why = site_options.find_refused_worker_init_line(self.kind.value, self.worker_init)
        if why:
            raise ValueError(f"worker_init has {line}: {why}")

    @property
    def pilots_per_block(self) -> int:
        """Number of pilots per block: one per node. In a job array, one per node of each task."""
        return self.nodes * (max_concurrent_array_tasks(self.options) if self.kind is ProviderKind.SLURM else 1)

    @property
    def gpu_count(self) -> int:
        """Number of GPUs per node."""
        return int(self.gpus.rpartition(":")[2] or 0)

    @property
    def gpu_type(self) -> str:
        """GPU type, or "" for any type."""
        return self.gpus.rpartition(":")[0]


AUTO_PROBE, NO_PROBE = "auto", "never"
GPU_CORES = 2
"""Default CPU cores per GPU, for the library, a thread that reads files, and the pilot's agent."""


class Pilot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The part of a node that a pilot uses, and limits for the number of blocks.

    `probe_every_s`: time between probes of devices (0: only at the pilot's start). `gpu_cores`: CPU cores reserved for
    each GPU if `offers_gpus_and_cpus` is True.
    """

    devices: Devices = "auto"
    cache_bytes: Size = msgspec.field(default=Size(20_000_000_000), name="cache_size")
    scratch: str = ""
    init_blocks: Count = 1
    min_blocks: Count = 0
    max_blocks: Positive = 1
    probe: str = AUTO_PROBE
    probe_every_s: Duration = msgspec.field(default=Duration(300.0), name="probe_every")
    cache_age_s: Duration = msgspec.field(default=Duration(14 * 86400.0), name="cache_age")
    gpu_cores: Annotated[int, msgspec.Meta(ge=1, le=1000)] = GPU_CORES

    @property
    def offers_gpus_and_cpus(self) -> bool:
        """True if a pilot offers GPUs and also spare CPU cores."""
        return self.devices.startswith("gpu+")

    @property
    def cpu_count(self) -> int:
        """Number of CPU devices of a pilot without GPUs (0: unknown)."""
        return int(self.devices[4:]) if self.devices.startswith("cpu:") else 0

    def __post_init__(self) -> None:
        refuse_control_characters(self)
        if self.min_blocks > self.max_blocks:
            raise ValueError(f"min_blocks = {self.min_blocks} is more than max_blocks = {self.max_blocks}")
        if self.init_blocks > self.max_blocks:
            raise ValueError(f"init_blocks = {self.init_blocks} is more than max_blocks = {self.max_blocks}")
        if self.init_blocks < self.min_blocks:
            raise ValueError(f"init_blocks = {self.init_blocks} is less than min_blocks = {self.min_blocks}")
        scratch = self.scratch
        if scratch and not scratch.startswith("$") and not os.path.isabs(os.path.expanduser(scratch)):
            raise ValueError(f"scratch = {scratch!r} must be an absolute path, or start with ~ or $")
        if self.probe not in (AUTO_PROBE, NO_PROBE) and not self.probe.startswith("/"):
            raise ValueError(f'probe = {self.probe!r}: write "{AUTO_PROBE}", "{NO_PROBE}", or the path of a program')
        if 0 < self.probe_every_s < 1:
            raise ValueError("probe_every must be 0 s (only at the pilot's start), or at least 1 s")


class Session(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The address and the timeouts of the manager.

    `interface`: name (`ib0`) or address of the network that compute nodes reach. If empty: loopback for local pilots,
    otherwise the network of this host's name. `sync`: True to sync results to disk before the manager sends them, so
    that results survive a crash of the manager's host. None means True with `stoker up`.
    """

    heartbeat_s: Duration = msgspec.field(default=Duration(5.0), name="heartbeat")
    lease_s: Duration = msgspec.field(default=Duration(60.0), name="lease")
    interface: str = ""
    ports: Ports = "21000-21999"
    sync: bool | None = None

    def __post_init__(self) -> None:
        refuse_control_characters(self)
        if not 0.1 <= self.heartbeat_s <= 3600:
            raise ValueError("heartbeat must be between 0.1 s and 1 h")
        if self.lease_s < 2 * self.heartbeat_s:
            raise ValueError(
                f"lease = {self.lease_s:g} s must be at least two heartbeats ({self.heartbeat_s:g} s each)"
            )
        first, last = self.port_range
        if not 1024 <= first <= last <= 65535:
            raise ValueError(f"ports = {self.ports!r} must be a range between 1024 and 65535, low-high")

    @property
    def port_range(self) -> tuple[int, int]:
        """The lowest and the highest port number."""
        first, _, last = self.ports.partition("-")
        return int(first), int(last)


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The policies of a session, and the settings of provisioning.

    `name`: policy for all decisions, unless `dispatch` or `residency` names another policy.
    """

    name: str = "default"
    dispatch: str = ""
    residency: str = ""
    provisioning: ProvisioningName = ProvisioningName.DEFAULT
    keep_pending: Positive = 2
    idle_s: Duration = msgspec.field(default=Duration(0.0), name="idle")
    finish_within_s: Duration = msgspec.field(default=Duration(600.0), name="finish_within")

    def __post_init__(self) -> None:
        refuse_control_characters(self)
        for setting, value in (("name", self.name), ("dispatch", self.dispatch), ("residency", self.residency)):
            if value or setting == "name":
                check_policy_name(value, setting=setting)

    def idle_release_s(self, *, outlives_programs: bool) -> float:
        """Return the seconds after which an idle block is released.

        Args:
            outlives_programs: True if the session continues when programs end.
        """
        return float(self.idle_s) or (1800.0 if outlives_programs else 120.0)


def check_policy_name(name: str, *, setting: str) -> None:
    """Raise ValueError unless the name is a shipped policy or has the form of a user's policy."""
    if name in POLICY_NAMES or OWN_POLICY.fullmatch(name):
        return
    if ":" in name:
        raise ValueError(f'{setting} = {name!r}: write a policy of your own as "module:Class" or "path.py:Class"')
    raise ValueError(f"{setting} = {name!r} {describe_unknown_policy(name)}")


def describe_unknown_policy(name: str) -> str:
    """Return why `name` is not a shipped policy, with advice."""
    if name in BASELINES:
        return (
            "is a baseline of a paper and is not part of the installed package; in a clone of Stoker's repository, "
            f'give the path of its file: "{BASELINES[name]}"'
        )
    close = difflib.get_close_matches(name, POLICY_NAMES, n=1, cutoff=0.6)
    hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(POLICY_NAMES)}"
    return f'is not a policy; {hint} (a policy of your own: "module:Class" or "path.py:Class")'


def policy_file(name: str) -> str:
    """Return the Python file of a user's policy, or "" for other policies."""
    own = OWN_POLICY.fullmatch(name)
    return own["place"] if own is not None and own["place"].endswith(".py") else ""


def make_policy_path_absolute(name: str, folder: str | os.PathLike[str]) -> str:
    file = policy_file(name)
    return f"{os.path.abspath(os.path.join(folder, os.path.expanduser(file)))}{name[len(file) :]}" if file else name


class Environment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The Python environment of pilots. `python`: interpreter on compute nodes (empty: the interpreter of this program
    or of the archive).
    """

    kind: EnvironmentKind = EnvironmentKind.SHARED
    python: str = ""

    def __post_init__(self) -> None:
        refuse_control_characters(self)


class Advice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A language model that reads source code, output lines and logs if the rules of the advisor find nothing.

    `url`: an OpenAI-compatible endpoint without `/chat/completions`; empty: no model. `key_variable`: environment
    variable with the API key. `time_limit_s`, `tokens`: maximum seconds and tokens per question.
    """

    url: str = ""
    model: str = ""
    key_variable: str = ""
    time_limit_s: Duration = msgspec.field(default=Duration(60.0), name="time_limit")
    tokens: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)] = 30_000
    session_tokens: Annotated[int, msgspec.Meta(ge=1, le=1_000_000_000)] = 300_000

    def __post_init__(self) -> None:
        refuse_control_characters(self)
        if self.url and not self.url.startswith(("http://", "https://")):
            raise ValueError(f'url = "{self.url}" must begin with http:// or https://')
        if self.url and not self.model:
            raise ValueError("model is missing; give the name of a model of the endpoint")


class Site(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of a site file. `sites`: site files that the session uses in addition."""

    name: Name = "local"
    engine: Engine = Engine.STOKER
    sites: tuple[str, ...] = ()
    provider: Provider = Provider()
    pilot: Pilot = Pilot()
    session: Session = Session()
    policy: Policy = Policy()
    environment: Environment = Environment()
    advice: Advice = Advice()

    def __post_init__(self) -> None:
        refuse_control_characters(self)
        packed = self.environment.kind is EnvironmentKind.PACKED
        if not self.provider.shared_files and not packed and self.provider.kind is not ProviderKind.KUBERNETES:
            raise ValueError(
                "environment: with shared_files = false pilots cannot see this environment; write [environment] "
                'kind = "packed"'
            )
        provider, kept = self.provider, self.provider.gpu_count * self.pilot.gpu_cores
        if self.pilot.offers_gpus_and_cpus and 0 < provider.cores <= kept:
            raise ValueError(
                f'provider: cores = {provider.cores} leave no core for the CPU devices of "{self.pilot.devices}",'
                f" because [pilot] gpu_cores = {self.pilot.gpu_cores} reserves cores for each GPU; ask for at"
                f" least {kept + 1}"
            )

    @staticmethod
    def default() -> Site:
        """Return the site for this machine: one pilot with all devices."""
        return Site()

    @property
    def is_local(self) -> bool:
        """True if pilots are processes on this machine. Always True with the engine TaskVine."""
        return self.provider.kind is ProviderKind.LOCAL or self.engine is Engine.TASKVINE
