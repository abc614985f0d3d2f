"""What TaskVine is told: its manager's limits, and the command line of its factory.

A `VinePlan` is made where the site file is read (`stoker.manager.taskvine.planning`), and travels to the pilot in the
session folder. It is a value: what is in it can be looked at, and tested, without TaskVine.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import msgspec

from stoker.decoding import UNREADABLE
from stoker.errors import SessionError
from stoker.protocol.session import SessionFolder

FACTORY_PERIOD_S = 5
"""How often the factory looks whether workers are missing. (Its own default is half a minute.)"""
NEVER_IDLE_S = 366 * 86_400
ALONE_S = 120
"""So long a worker looks for its manager. One that was killed has a successor by then, or none."""
POOL = "STOKER_POOL"
"""Names, in the environment of all that TaskVine starts for a session, the folder of that session."""


class VinePlan(msgspec.Struct, frozen=True):
    """What TaskVine is told.

    `batch` is the factory's word for the batch system. `devices` says how many libraries a worker holds at once, as
    `[pilot] devices` does. Of a worker: `cores`, `memory_mb`, `disk_mb` (0 = what is there). `batch_options` goes to
    the batch system, `requirements` to HTCondor; `worker_init` is shell that runs before a worker.
    """

    batch: str = "local"
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
    idle_s: int = NEVER_IDLE_S
    walltime_s: int = 0
    heartbeat_s: int = 5
    silence_s: int = 15


def factory_command(
    plan: VinePlan,
    *,
    factory: str,
    worker: str,
    port: int,
    host: str = "",
    folder: Path,
    password: Path,
    orders: Path,
    init_script: Path | None = None,
    workspace: Path | None = None,
) -> list[str]:
    """The command line of `vine_factory`.

    `host` is where workers reach the manager (empty: on this machine), `folder` the factory's scratch folder, `orders`
    a file in which it is told later how many workers are wanted. `init_script` runs before each worker; `workspace` is
    where workers of this machine keep their files.
    """
    options = {
        "batch-type": plan.batch,
        "worker-binary": worker,
        "scratch-dir": str(folder),
        "password": str(password),
        "config-file": str(orders),
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
        "extra-options": _worker_options(plan, workspace),
    }
    if init_script is not None:
        options |= {"wrapper": f"./{init_script.name}", "wrapper-input": str(init_script)}
    words = [factory, "--parent-death", *(f"--{name}={value}" for name, value in options.items() if value)]
    return [*words, host or "localhost", str(port)]


def init_script(plan: VinePlan) -> str:
    """A shell script that does what the site wants done first, and then runs the worker; empty if there is nothing."""
    return f'#!/bin/bash\n{plan.worker_init}\nexec "$@"\n' if plan.worker_init.strip() else ""


def write(plan: VinePlan, folder: SessionFolder, *, site: str) -> None:
    """Put a plan into a session folder, where its pilot reads it. Raises OSError."""
    with os.fdopen(os.open(_file(folder, site), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(plan)))


def read(folder: SessionFolder, *, site: str) -> VinePlan:
    """The plan of a session for a site. Raises SessionError if it has none."""
    try:
        return msgspec.json.decode(_file(folder, site).read_bytes(), type=VinePlan)
    except (OSError, *UNREADABLE) as error:
        raise SessionError(
            f"{folder.path} has no plan of site {site} for TaskVine: {error}; load the site again"
        ) from error


def is_there(folder: SessionFolder) -> bool:
    """Whether a session has a plan: TaskVine carries its calls."""
    return any(folder.path.glob(_file(folder, "*").name))


def _file(folder: SessionFolder, site: str) -> Path:
    return folder.path / f"taskvine-{site}.json"


def _given(number: int) -> str:
    return str(number) if number else ""


def _worker_options(plan: VinePlan, workspace: Path | None) -> str:
    words = ["--parent-death"] if plan.batch == "local" else []
    words.append(f"--connect-timeout={ALONE_S}")
    if plan.walltime_s:
        words.append(f"--wall-time={plan.walltime_s}")
    if workspace is not None:
        words.append(f"--workspace={shlex.quote(str(workspace))}/$$")
    elif plan.scratch:
        words.append(f"--workspace={_in_shell(plan.scratch)}/stoker-vine-$$")
    return " ".join(words)


def _in_shell(path: str) -> str:
    """A path for the shell on a node, which knows its `$TMPDIR` and its `~`; nothing else in it means anything."""
    if path[:1] not in ("$", "~"):
        return shlex.quote(path)
    head, slash, rest = path.partition("/")
    return head + slash + (shlex.quote(rest) if rest else "")
