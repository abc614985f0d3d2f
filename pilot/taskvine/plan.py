"""From a site file to what TaskVine is told: its manager's limits, and the command line of its factory.

A `Plan` is made where the site file is read, and travels to the pilot in the session folder. It is a value: what is in
it can be looked at, and tested, without TaskVine.
"""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Sequence
from pathlib import Path

import msgspec
import psutil

from stoker.errors import SessionError
from stoker.manager.protocol.session import SessionFolder
from stoker.site import ProviderKind, Site

FACTORY_PERIOD_S = 5
"""How often the factory looks whether workers are missing. (Its own default is half a minute.)"""
_NEVER_IDLE_S = 366 * 86_400
_WALLTIME_MARGIN_S = 30
"""So long before the batch system ends its job, a worker leaves by itself."""


class Plan(msgspec.Struct, frozen=True):
    """What TaskVine is told.

    `batch` is the factory's word for the batch system. `host` is where workers reach the manager (empty: on this
    machine). `devices` says how many libraries a worker holds at once, as `[pilot] devices` does. Of a worker: `cores`,
    `memory_mb`, `disk_mb` (0 = what is there). `batch_options` goes to the batch system, `requirements` to HTCondor;
    `worker_init` is shell that runs before a worker.
    """

    batch: str = "local"
    host: str = ""
    ports: tuple[int, int] = (21000, 21999)
    devices: str = "auto"
    gpus: int = 0
    cores: int = 0
    memory_mb: int = 0
    disk_mb: int = 0
    least_workers: int = 1
    most_workers: int = 1
    batch_options: str = ""
    requirements: str = ""
    worker_init: str = ""
    scratch: str = ""
    python: str = ""
    search_path: str = ""
    idle_s: int = _NEVER_IDLE_S
    walltime_s: int = 0
    heartbeat_s: int = 5
    silence_s: int = 15


def plan_of(site: Site, *, python: str = "", search_path: str = "") -> Plan:
    """The plan of a site, whose settings TaskVine can all honour (see `refusals`).

    `python` is the interpreter of this program, for libraries too unless the site names another; `search_path` what
    this program imports beyond its environment.
    """
    provider, pilot = site.provider, site.pilot
    is_local = provider.kind is ProviderKind.LOCAL
    least = max(1, pilot.min_blocks, pilot.init_blocks)
    return Plan(
        batch=provider.kind.value,
        host="" if is_local else _host(site.session.interface),
        ports=site.session.port_range,
        devices=pilot.devices,
        gpus=provider.gpu_count,
        cores=_cores(site),
        memory_mb=int(provider.memory_bytes) // 2**20,
        disk_mb=int(pilot.cache_bytes) // 2**20,
        least_workers=least,
        most_workers=pilot.max_blocks,
        batch_options=_batch_options(site),
        requirements=provider.requirements,
        worker_init=provider.worker_init,
        scratch=pilot.scratch,
        python=site.environment.python or python,
        search_path=search_path,
        idle_s=_NEVER_IDLE_S if is_local or least == pilot.max_blocks else max(1, int(site.policy.idle_s)),
        walltime_s=0 if is_local else max(60, int(provider.walltime_s) - _WALLTIME_MARGIN_S),
        heartbeat_s=max(1, round(site.session.heartbeat_s)),
        silence_s=max(3, round(3 * site.session.heartbeat_s)),
    )


def factory_command(
    plan: Plan, *, factory: str, worker: str, port: int, folder: Path, password: Path, init_script: Path | None
) -> list[str]:
    """The command line of `vine_factory`. `folder` is its scratch folder; `init_script` runs before each worker."""
    options = {
        "batch-type": plan.batch,
        "worker-binary": worker,
        "scratch-dir": str(folder),
        "password": str(password),
        "factory-period": str(FACTORY_PERIOD_S),
        "min-workers": str(plan.least_workers),
        "max-workers": str(plan.most_workers),
        "workers-per-cycle": str(plan.most_workers),
        "timeout": str(plan.idle_s),
        "cores": _given(plan.cores),
        "gpus": _given(plan.gpus),
        "memory": _given(plan.memory_mb),
        "disk": _given(plan.disk_mb),
        "batch-options": plan.batch_options,
        "condor-requirements": plan.requirements,
        "extra-options": _worker_options(plan),
    }
    if init_script is not None:
        options |= {"wrapper": f"./{init_script.name}", "wrapper-input": str(init_script)}
    words = [factory, "--parent-death", *(f"--{name}={value}" for name, value in options.items() if value)]
    return [*words, plan.host or "localhost", str(port)]


def init_script(plan: Plan) -> str:
    """A shell script that does what the site wants done first, and then runs the worker; empty if there is nothing."""
    return f'#!/bin/bash\n{plan.worker_init}\nexec "$@"\n' if plan.worker_init.strip() else ""


def write(plan: Plan, folder: SessionFolder, *, site: str) -> None:
    """Put a plan into a session folder, where its pilot reads it. Raises OSError."""
    with os.fdopen(os.open(_file(folder, site), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(plan)))


def read(folder: SessionFolder, *, site: str) -> Plan:
    """The plan of a session for a site. Raises SessionError if it has none."""
    try:
        return msgspec.json.decode(_file(folder, site).read_bytes(), type=Plan)
    except (OSError, msgspec.DecodeError) as error:
        raise SessionError(
            f"{folder.path} has no plan of site {site} for TaskVine: {error}; load the site again"
        ) from error


def _file(folder: SessionFolder, site: str) -> Path:
    return folder.path / f"taskvine-{site}.json"


def _host(interface: str) -> str:
    """Where workers on other nodes reach this host: the address of a network, if the site names one, else its name."""
    addresses = psutil.net_if_addrs().get(interface, ())
    return next((each.address for each in addresses if each.family == socket.AF_INET), interface) or socket.getfqdn()


def _given(number: int) -> str:
    return str(number) if number else ""


def _cores(site: Site) -> int:
    """Cores of a worker: one for each library that it is to hold, at least."""
    _, _, count = site.pilot.devices.partition(":")
    return max(site.provider.cores, int(count or 0))


def _worker_options(plan: Plan) -> str:
    words = ["--parent-death"] if plan.batch == "local" else []
    if plan.walltime_s:
        words.append(f"--wall-time={plan.walltime_s}")
    if plan.scratch:
        words.append(f"--workspace={_in_shell(plan.scratch)}/stoker-vine-$$")
    return " ".join(words)


def _in_shell(path: str) -> str:
    """A path for the shell on a node, which knows its `$TMPDIR` and its `~`; nothing else in it means anything."""
    if path[:1] not in ("$", "~"):
        return shlex.quote(path)
    head, slash, rest = path.partition("/")
    return head + slash + (shlex.quote(rest) if rest else "")


def _batch_options(site: Site) -> str:
    provider = site.provider
    if provider.kind is ProviderKind.SLURM:
        return _slurm_options(site)
    if provider.kind is ProviderKind.CONDOR:
        lines = [f"+MaxWallTime = {_minutes(provider.walltime_s)}"]
        if provider.account:
            lines.append(f"accounting_group = {provider.account}")
        if provider.gpu_type:
            lines.append(f'require_gpus = DeviceName == "{provider.gpu_type}"')
        return "\n".join([*lines, *provider.options])
    return ""


def _slurm_options(site: Site) -> str:
    provider = site.provider
    given: Sequence[tuple[str, str]] = (
        ("partition", provider.partition),
        ("account", provider.account),
        ("qos", provider.qos),
        ("constraint", provider.constraint),
        ("time", str(_minutes(provider.walltime_s))),
        ("gres", f"gpu:{provider.gpus}" if provider.gpus else ""),
    )
    return " ".join([*(f"--{name}={shlex.quote(value)}" for name, value in given if value), *provider.options])


def _minutes(seconds: float) -> int:
    return -int(-seconds // 60)
