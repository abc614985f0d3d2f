"""TaskVine on this machine, and its factory: the process that starts workers through the batch system.

TaskVine comes from conda-forge; only the pilot's process imports it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from stoker.errors import ConfigError
from stoker.pilot.taskvine import engine
from stoker.pilot.taskvine.engine import VinePlan
from stoker.whole_files import write_whole

# ---- programs


INSTALL = "conda install -c conda-forge ndcctools"


class Programs(msgspec.Struct, frozen=True):
    """TaskVine's programs: the worker, and the factory that starts workers through a batch system."""

    worker: str
    factory: str


def find_programs() -> Programs:
    """TaskVine's programs, if its Python packages are here too; nothing heavy is imported. Raises ConfigError."""
    missing = ""
    for module in ("ndcctools.taskvine", "ndcctools.poncho.package_serverize", "threadpoolctl"):
        if not _is_there(module):
            missing = f"Python has no module {module}"
            break
    places = os.pathsep.join([os.environ.get("PATH", ""), *_beside()])
    programs = {name: shutil.which(name, path=places) or "" for name in ("vine_worker", "vine_factory")}
    for name, place in programs.items():
        if not place and not missing:
            missing = f"there is no program {name} on PATH or beside its Python package"
    if missing:
        raise ConfigError(f'engine = "taskvine" needs TaskVine, which is not installed here ({missing}): {INSTALL}')
    return Programs(worker=programs["vine_worker"], factory=programs["vine_factory"])


def taskvine() -> Any:
    """The module `ndcctools.taskvine`. Raises ConfigError if it cannot be imported."""
    try:
        return importlib.import_module("ndcctools.taskvine")
    except ImportError as error:
        raise ConfigError(f'engine = "taskvine": ndcctools cannot be imported: {error}; {INSTALL}') from error


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def _beside() -> list[str]:
    spec = importlib.util.find_spec("ndcctools")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return [str(parent / "bin") for place in places for parent in list(Path(place).parents)[:4]]


# ---- the factory


log = logging.getLogger("stoker.pilot")

_LAST_LINES = 10
_LOCAL_GRACE_S = 1.0
_BATCH_GRACE_S = 20.0


class VineFactory:
    """A running `vine_factory`, its `folder`, and its output in `log_file`. `session`: the session's folder."""

    def __init__(
        self,
        plan: VinePlan,
        programs: Programs,
        *,
        port: int,
        folder: Path,
        password: Path,
        log_file: Path,
        session: str,
        host: str = "",
    ) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.log_file = log_file
        self._orders = folder.parent / "factory.json"
        self._wanted = 0
        self.want(plan.least_workers)
        text, script = engine.init_script(plan), None
        if text:
            script = folder.parent / "worker-init.sh"
            script.write_text(text)
            script.chmod(0o700)
        self._workspace = _workspace(plan)
        command = engine.factory_command(
            plan,
            factory=programs.factory,
            worker=programs.worker,
            port=port,
            host=host,
            folder=folder,
            password=password,
            orders=self._orders,
            init_script=script,
            workspace=self._workspace,
        )
        log.info("%s", " ".join(command))
        with self.log_file.open("ab") as out:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                cwd=folder,
                env={**os.environ, engine.POOL: session},
            )

    def want(self, workers: int) -> None:
        """Ask for at least this many workers. The factory looks every few seconds; surplus workers end when idle."""
        if workers != self._wanted:
            self._wanted = workers
            write_whole(self._orders, msgspec.json.encode({"min-workers": workers}))

    def ended(self) -> str:
        """Why there is no factory any more, in its own words; empty while it runs."""
        code = self._process.poll()
        if code is None:
            return ""
        said = self.log_file.read_text(errors="replace").strip().splitlines()[-_LAST_LINES:]
        return f"vine_factory ended with exit code {code}: {'; '.join(said) or 'it said nothing'} ({self.log_file})"

    def close(self) -> None:
        """Have it remove its workers and end. On this machine whatever is left is killed after a moment; one that still
        waits for its batch system is left to it."""
        self._process.terminate()
        grace_s = _LOCAL_GRACE_S if self._workspace is not None else _BATCH_GRACE_S
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            if self._workspace is None:
                log.warning("vine_factory has not removed its jobs within %g s; it goes on with that", grace_s)
                return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._workspace is not None:
            shutil.rmtree(self._workspace, ignore_errors=True)


def _workspace(plan: VinePlan) -> Path | None:
    """A folder on local disk for workers of this machine; workers of other nodes choose theirs."""
    if plan.batch != "local":
        return None
    base = os.path.expandvars(os.path.expanduser(plan.scratch)) or os.environ.get("STOKER_SCRATCH")
    return Path(tempfile.mkdtemp(prefix="stoker-vine-", dir=base or None))
