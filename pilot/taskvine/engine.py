"""TaskVine's manager, its settings (`VinePlan`), and all uses of `ndcctools`.

TaskVine's manager is a blocking C library: `wait` accepts only whole seconds, returns early only with a task, and holds
the interpreter lock. Three tasks make `wait` return after one check for work, so that new calls need not wait:

- an *anchor* that may not start before the next century, so that a task is always waiting;
- two *bells* that are cancelled after submission. `wait` sends new calls before it returns the first bell
  (`prefer-dispatch`). The second bell keeps `wait` from sleeping.

TaskVine logs each of these steps, so its logs go to /dev/null. TaskVine does not retry a *forsaken* call (a call whose
library ended), because Stoker's manager decides about retries.
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
from stoker.whole_files import write_whole

FACTORY_PERIOD_S = 5
"""Seconds between two checks of the factory for missing workers (TaskVine's default: 30)."""
NEVER_IDLE_S = 366 * 86_400
ALONE_S = 120
"""Seconds that a worker tries to connect to its manager."""


class VinePlan(msgspec.Struct, frozen=True):
    """TaskVine's settings. `devices`: as in `[pilot]`. `cores`, `memory_mb`, `disk_mb`: of a worker (0 = all)."""

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
    plan: VinePlan, *, factory: str, worker: str, port: int, host: str = "", folder: Path, password: Path,
    orders: Path, init_script: Path | None = None, workspace: Path | None = None,
) -> list[str]:  # fmt: skip
    """Return the command line of `vine_factory`. `host`: the manager's address for workers (empty: this machine).
    `orders`: a file with the number of wanted workers.
    """
    options = {
        "batch-type": plan.batch,
        "worker-binary": worker,
        "scratch-dir": str(folder),
        "password": str(password),
        "config-file": str(orders),
        "factory-period": FACTORY_PERIOD_S,
        "min-workers": plan.least_workers,
        "max-workers": plan.most_workers,
        "workers-per-cycle": plan.most_workers,
        "timeout": plan.idle_s,
        "cores": plan.cores,
        "gpus": plan.gpus,
        "memory": plan.memory_mb,
        "disk": plan.disk_mb,
        "batch-options": plan.batch_options,
        "condor-requirements": plan.requirements,
        "extra-options": _worker_options(plan, workspace),
    }
    if init_script is not None:
        options |= {"wrapper": f"./{init_script.name}", "wrapper-input": str(init_script)}
    words = [factory, "--parent-death", *(f"--{name}={value}" for name, value in options.items() if value)]
    return [*words, host or "localhost", str(port)]


def make_init_script(plan: VinePlan) -> str:
    return f'#!/bin/bash\n{plan.worker_init}\nexec "$@"\n' if plan.worker_init.strip() else ""


def write_plan(plan: VinePlan, folder: SessionFolder, *, site: str) -> None:
    write_whole(_file(folder, site), msgspec.json.format(msgspec.json.encode(plan)))


def read_plan(folder: SessionFolder, *, site: str) -> VinePlan:
    try:
        return msgspec.json.decode(_file(folder, site).read_bytes(), type=VinePlan)
    except (OSError, *UNREADABLE) as error:
        raise SessionError(
            f"{folder.path} has no plan of site {site} for TaskVine: {error}; load the site again"
        ) from error


def _file(folder: SessionFolder, site: str) -> Path:
    return folder.path / f"taskvine-{site}.json"


def _worker_options(plan: VinePlan, workspace: Path | None) -> str:
    words = ["--parent-death"] if plan.batch == "local" else []
    words.append(f"--connect-timeout={ALONE_S}")
    if plan.walltime_s:
        words.append(f"--wall-time={plan.walltime_s}")
    if workspace is not None:
        words.append(f"--workspace={shlex.quote(str(workspace))}/$$")
    elif plan.scratch:
        words.append(f"--workspace={_quote_for_node_shell(plan.scratch)}/stoker-vine-$$")
    return " ".join(words)


def _quote_for_node_shell(path: str) -> str:
    """Quote a path for the shell of a node, except for a leading `$TMPDIR` or `~`."""
    if path[:1] not in ("$", "~"):
        return shlex.quote(path)
    head, slash, rest = path.partition("/")
    return head + slash + (shlex.quote(rest) if rest else "")


_WAKING_TASKS = 2
_FAR_FUTURE_US = 10**17
_LOGS = ("debug", "performance", "taskgraph", "transactions")
_MIB = 2**20


class FinishedOrder(msgspec.Struct, frozen=True):
    """A finished order. `answer`: the library's answer if `result` is `success`."""

    ticket: int
    result: str
    answer: bytes = b""


class VineWorker(msgspec.Struct, frozen=True):
    name: str
    cores: int
    gpus: int
    memory_bytes: int


class VineManager:
    """Runs orders in TaskVine. `password`: the file with which workers authenticate."""

    def __init__(self, vine: Any, plan: VinePlan, *, folder: Path, password: Path) -> None:
        self._vine = vine
        self._plan = plan
        self._folder = folder
        self._tasks: dict[int, tuple[int, Any]] = {}
        """Ticket and task object by TaskVine's task number."""
        self._files: dict[str, Any] = {}
        self._tickets = 0
        logs = folder / "logs" / "vine-logs"
        logs.mkdir(mode=0o700, parents=True)
        for name in _LOGS:
            (logs / name).symlink_to(os.devnull)
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
            # If a worker is killed while it sends, TaskVine waits this long (default: an hour) for the rest of the
            # message.
            ("long-timeout", plan.silence_s),
            ("min-transfer-timeout", plan.silence_s),
            ("prefer-dispatch", 1),
        ):
            self._manager.tune(name, value)
        self._manager.submit(self._task_of_far_future())

    @property
    def port(self) -> int:
        return int(self._manager.port)

    @property
    def open_orders(self) -> int:
        return len(self._tasks)

    # ---- libraries and calls

    def install_library(self, setup: messages.VineLibrarySetup, *, cores: int) -> str:
        """Declare the library of a context to TaskVine once. Return its name."""
        recipe = setup.recipe
        name = recipe.key
        if self._manager.check_library_exists(name):
            return name
        plan = self._plan
        start = ["exec env", f'PATH={shlex.quote(os.path.dirname(plan.python))}:"$PATH"']  # Stoker's Python first
        if plan.search_path:
            start.append(f"PYTHONPATH={shlex.quote(plan.search_path)}")
        task = self._manager.create_library_from_functions(
            name, library.serve, library_context_info=[library.load, [messages.encode(setup)], {}], exec_mode="direct",
            add_env=False, init_command=" ".join(start),
        )  # fmt: skip
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
            task.add_input(self._declare_file_once(ref), ref.name)
        self._manager.install_library(task)
        return name

    def submit(self, name: str, order: messages.PoolOrder, *, large: tuple[ObjectRef, ...] = ()) -> None:
        task = self._vine.FunctionCall(name, "serve", messages.encode(order))
        task.set_max_forsaken(0)
        if order.function:
            task.add_input(self._files[order.function], messages.FUNCTION_FILE)
        for ref in large:
            task.add_input(self._declare_file_once(ref), order.objects[ref.name])
        self._tasks[self._manager.submit(task)] = (order.ticket, task)

    def new_ticket(self) -> int:
        self._tickets += 1
        return self._tickets

    def add_function(self, blob: FunctionBlob) -> None:
        if blob.key not in self._files:
            path = self._folder / f"function-{blob.key}"
            path.write_bytes(blob.blob)
            self._files[blob.key] = self._manager.declare_file(str(path), cache="workflow", peer_transfer=True)

    def forget_object(self, name: str) -> None:
        file = self._files.pop(name, None)
        if file is not None:
            self._manager.undeclare_file(file)

    # ---- time

    def collect_finished(self, *, block: bool) -> list[FinishedOrder]:
        """Let TaskVine work, and return finished orders. With `block`, this may take a second."""
        if not block:
            for _ in range(_WAKING_TASKS):
                self._manager.cancel_by_task_id(self._manager.submit(self._task_of_far_future()))
        out: list[FinishedOrder] = []
        task = self._manager.wait(1)
        while task is not None:
            finished = self._collect_order(task)
            if finished is not None:
                out.append(finished)
            task = self._manager.wait(0)
        return out

    def connected_workers(self) -> list[VineWorker]:
        return [
            VineWorker(
                name=f"{str(facts.get('hostname', '')).partition('.')[0]} {facts.get('addrport', '')}".strip(),
                cores=int(facts["cores_total"]),
                gpus=int(facts.get("gpus_total", 0) or 0),
                memory_bytes=int(facts.get("memory_total", 0) or 0) * _MIB,
            )
            for facts in self._manager.status("workers")
            if int(facts.get("cores_total", 0) or 0) > 0
        ]

    def close(self) -> None:
        with contextlib.suppress(Exception):  # close despite errors
            self._manager.workers_shutdown(0)
        self._tasks.clear()
        self._files.clear()
        del self._manager

    def _task_of_far_future(self) -> Any:
        task = self._vine.Task(":")
        task.set_time_start(_FAR_FUTURE_US)
        return task

    def _collect_order(self, task: Any) -> FinishedOrder | None:
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
        return FinishedOrder(ticket, result, answer)

    def _declare_file_once(self, ref: ObjectRef) -> Any:
        if ref.name not in self._files:
            self._files[ref.name] = self._manager.declare_file(ref.source, cache="workflow", peer_transfer=True)
        return self._files[ref.name]
