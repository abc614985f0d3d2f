"""TaskVine's manager: what it is told (`VinePlan`), and the one module that calls `ndcctools`.

The plan is made where the site file is read (`stoker.manager.taskvine.planning`), and travels in the session folder.

TaskVine's manager is a C library that blocks: `wait` takes whole seconds, returns early only with a task, and holds the
interpreter's lock. While every slot is taken that is right. While some are free, new calls must not wait a second, and
`wait` returns after one look at everything by three things that it is given:

- an *anchor*, a task that may not start before the next century, so that there is always one to be considered;
- two *bells*, tasks that are cancelled as soon as they are submitted. `wait` takes the first, looks whether there is
  something to send before it returns it (`prefer-dispatch`), and because the second is still there it does not sleep.

A version of TaskVine that works otherwise would only be slower to hear of new calls. Its logs have a line for each of
these steps, and no switch: they are not kept.

TaskVine does not retry a call that it gives up on (*forsaken*: its library ended): the manager decides who is to blame
and how often the call may run.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from pathlib import Path
from typing import Any

import msgspec

from stoker.contexts.recipe import ObjectRef
from stoker.decoding import UNREADABLE
from stoker.errors import SessionError
from stoker.pilot.taskvine import library, messages
from stoker.protocol.session import SessionFolder
from stoker.protocol.to_pilot import FunctionBlob

# ---- the plan


FACTORY_PERIOD_S = 5
"""How often the factory looks whether workers are missing. (Its own default is half a minute.)"""
NEVER_IDLE_S = 366 * 86_400
ALONE_S = 120
"""Seconds that a worker searches for its manager. A killed manager has a successor by then, or never."""
POOL = "STOKER_POOL"
"""Names, in the environment of all that TaskVine starts for a session, the folder of that session."""


class VinePlan(msgspec.Struct, frozen=True):
    """TaskVine's settings.

    `batch` is the factory's word for the batch system. `devices` says how many libraries a worker holds at once, as
    `[pilot] devices` does. Of a worker: `cores`, `memory_mb`, `disk_mb` (0 = all). `batch_options` goes to the batch
    system, `requirements` to HTCondor; `worker_init` is shell code that runs before a worker.
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


# ---- the manager


_BELLS = 2
_NEVER_US = 10**17
_LOGS = ("debug", "performance", "taskgraph", "transactions")
_MIB = 2**20


class FinishedTicket(msgspec.Struct, frozen=True):
    """A ticket that TaskVine is done with. `result` is its own word; `answer` is empty unless that is `success`."""

    ticket: int
    result: str
    answer: bytes = b""


class VineWorker(msgspec.Struct, frozen=True):
    """A connected worker: its name for people, and its resources."""

    name: str
    cores: int
    gpus: int
    memory_bytes: int


class VineManager:
    """A running TaskVine manager. `folder` is its own; `password` the file that workers prove themselves with."""

    def __init__(self, vine: Any, plan: VinePlan, *, folder: Path, password: Path) -> None:
        self._vine = vine
        self._plan = plan
        self._folder = folder
        self._tasks: dict[int, tuple[int, Any]] = {}
        """Open tasks by TaskVine's number: our ticket, and the task."""
        self._files: dict[str, Any] = {}
        """Files that TaskVine knows, by cache name or function key."""
        self._tickets = 0
        _keep_no_logs(folder / "logs")
        try:
            self._manager = vine.Manager(
                port=list(plan.ports), run_info_path=str(folder), run_info_template="logs", staging_path=str(folder)
            )
        except Exception as error:
            raise SessionError(f"TaskVine's manager could not start on ports {plan.ports}: {error}") from error
        self._manager.set_password_file(str(password))
        for name, value in (
            ("transient-error-interval", 1),
            ("keepalive-interval", plan.heartbeat_s),
            ("keepalive-timeout", plan.silence_s),
            # Everything waits while it reads a message of a worker that was killed in the middle of it: an hour, unless
            # it is told otherwise.
            ("long-timeout", plan.silence_s),
            ("min-transfer-timeout", plan.silence_s),
            ("prefer-dispatch", 1),
        ):
            self._manager.tune(name, value)
        self._manager.submit(self._never())

    @property
    def port(self) -> int:
        """Where workers reach it."""
        return int(self._manager.port)

    @property
    def open(self) -> int:
        """Tickets that are not finished."""
        return len(self._tasks)

    # ---- libraries and calls

    def install(self, setup: messages.Setup, *, cores: int) -> str:
        """Declare a context's library to TaskVine, unless it knows it; return the library's name.

        It gets the GPUs of its devices, and this number of cores.
        """
        recipe = setup.recipe
        name = recipe.key
        if self._manager.check_library_exists(name):
            return name
        task = self._manager.create_library_from_functions(
            name,
            library.serve,
            library_context_info=[library.load, [messages.encode(setup)], {}],
            exec_mode="direct",
            add_env=False,
            init_command=self._start_command(),
        )
        needs = recipe.needs
        task.set_cores(cores)
        task.set_function_slots(1)
        if setup.devices[0].startswith("cuda"):
            task.set_gpus(len(setup.devices))
        if needs.memory_bytes:
            task.set_memory(-(-needs.memory_bytes // _MIB))
        if needs.disk_bytes:
            task.set_disk(-(-needs.disk_bytes // _MIB))
        for ref in recipe.objects:
            task.add_input(self._file(ref), ref.name)
        self._manager.install_library(task)
        return name

    def submit(self, name: str, order: messages.PoolOrder, *, large: tuple[ObjectRef, ...] = ()) -> None:
        """Have a library of this name work on an order. `large` are its large arguments, as files of its folder."""
        task = self._vine.FunctionCall(name, "serve", messages.encode(order))
        task.set_max_forsaken(0)
        if order.function:
            task.add_input(self._files[order.function], messages.FUNCTION_FILE)
        for ref in large:
            task.add_input(self._file(ref), order.objects[ref.name])
        self._tasks[self._manager.submit(task)] = (order.ticket, task)

    def new_ticket(self) -> int:
        """A number for an order."""
        self._tickets += 1
        return self._tickets

    def take_function(self, blob: FunctionBlob) -> None:
        """Keep a function for the calls of it; each worker is sent it once."""
        if blob.key not in self._files:
            path = self._folder / f"function-{blob.key}"
            path.write_bytes(blob.blob)
            self._files[blob.key] = self._manager.declare_file(str(path), cache="workflow", peer_transfer=True)

    def forget(self, name: str) -> None:
        """Drop a large argument, which no call needs any more, from TaskVine and its workers."""
        file = self._files.pop(name, None)
        if file is not None:
            self._manager.undeclare_file(file)

    # ---- time

    def collect_finished(self, *, block: bool) -> list[FinishedTicket]:
        """Let TaskVine work, and take what is finished. With `block` that may last a second, else it does not wait."""
        if not block:
            for _ in range(_BELLS):
                self._manager.cancel_by_task_id(self._manager.submit(self._never()))
        out: list[FinishedTicket] = []
        task = self._manager.wait(1)
        while task is not None:
            finished = self._finish(task)
            if finished is not None:
                out.append(finished)
            task = self._manager.wait(0)
        return out

    def workers(self) -> list[VineWorker]:
        """Workers that are connected and have said what they have."""
        found = []
        for facts in self._manager.status("workers"):
            cores = int(facts.get("cores_total", 0) or 0)
            if cores > 0:
                host = str(facts.get("hostname", "")).partition(".")[0]
                found.append(
                    VineWorker(
                        name=f"{host} {facts.get('addrport', '')}".strip(),
                        cores=cores,
                        gpus=int(facts.get("gpus_total", 0) or 0),
                        memory_bytes=int(facts.get("memory_total", 0) or 0) * _MIB,
                    )
                )
        return found

    def close(self) -> None:
        """Send the workers home and stop."""
        with contextlib.suppress(Exception):  # whatever state it is in, it ends now
            self._manager.workers_shutdown(0)
        self._tasks.clear()
        self._files.clear()
        del self._manager

    def _never(self) -> Any:
        task = self._vine.Task(":")
        task.set_time_start(_NEVER_US)
        return task

    def _finish(self, task: Any) -> FinishedTicket | None:
        ticket, known = self._tasks.pop(task.id, (0, None))
        if known is None:
            return None
        result, answer = str(task.result), b""
        if task.successful():
            output = task.output
            if isinstance(output, bytes):
                answer = output
            else:
                result = f"no answer: {output}"
        elif result == "success":
            result = f"exit code {task.exit_code}"
        file = task.output_file
        if file is not None:
            with contextlib.suppress(OSError):
                os.unlink(file.source())
            self._manager.undeclare_file(file)
        return FinishedTicket(ticket, result, answer)

    def _file(self, ref: ObjectRef) -> Any:
        if ref.name not in self._files:
            self._files[ref.name] = self._manager.declare_file(ref.source, cache="workflow", peer_transfer=True)
        return self._files[ref.name]

    def _start_command(self) -> str:
        """The command before `python library_code.py`: our interpreter, not the first one on the node's path."""
        plan = self._plan
        words = ["exec env", f'PATH={shlex.quote(os.path.dirname(plan.python))}:"$PATH"']
        if plan.search_path:
            words.append(f"PYTHONPATH={shlex.quote(plan.search_path)}")
        return " ".join(words)


def _keep_no_logs(folder: Path) -> None:
    """Put nothing where TaskVine is going to write its logs."""
    logs = folder / "vine-logs"
    logs.mkdir(mode=0o700, parents=True)
    for name in _LOGS:
        (logs / name).symlink_to(os.devnull)
