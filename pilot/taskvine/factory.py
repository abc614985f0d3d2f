"""TaskVine's programs, and the factory, which starts workers through the batch system."""

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
from stoker.pilot.taskvine import POOL, engine
from stoker.pilot.taskvine.engine import VinePlan
from stoker.whole_files import write_whole

INSTALL = "conda install -c conda-forge ndcctools"


def find_programs() -> tuple[str, str]:
    """Return the paths of TaskVine's worker and factory, without importing its packages."""
    needed = ("ndcctools.taskvine", "ndcctools.poncho.package_serverize", "threadpoolctl")
    missing = next((f"Python has no module {module}" for module in needed if not _is_module_installed(module)), "")
    spec = importlib.util.find_spec("ndcctools")
    packages = list(spec.submodule_search_locations or ()) if spec is not None else []
    bins = [str(parent / "bin") for package in packages for parent in list(Path(package).parents)[:4]]
    places = os.pathsep.join([os.environ.get("PATH", ""), *bins])
    programs = {name: shutil.which(name, path=places) or "" for name in ("vine_worker", "vine_factory")}
    for name, place in programs.items():
        if not place and not missing:
            missing = f"there is no program {name} on PATH or next to its Python package"
    if missing:
        raise ConfigError(f'engine = "taskvine" needs TaskVine, which is not installed here ({missing}): {INSTALL}')
    return programs["vine_worker"], programs["vine_factory"]


def import_taskvine() -> Any:
    try:
        return importlib.import_module("ndcctools.taskvine")
    except ImportError as error:
        raise ConfigError(f'engine = "taskvine": ndcctools cannot be imported: {error}; {INSTALL}') from error


def _is_module_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


log = logging.getLogger("stoker.pilot")

_LAST_LINES = 10
_LOCAL_GRACE_S = 1.0
_BATCH_GRACE_S = 20.0


class VineFactory:
    def __init__(
        self, plan: VinePlan, programs: tuple[str, str], *, port: int, folder: Path, password: Path, log_file: Path,
        session: str, host: str,
    ) -> None:  # fmt: skip
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.log_file = log_file
        self._orders = folder.parent / "factory.json"
        self._wanted = 0
        self.set_wanted_workers(plan.least_workers)
        script = None
        if text := engine.make_init_script(plan):
            script = folder.parent / "worker-init.sh"
            script.write_text(text)
            script.chmod(0o700)
        self._workspace = _make_workspace(plan)
        worker, factory = programs
        command = engine.factory_command(
            plan, factory=factory, worker=worker, port=port, host=host, folder=folder, password=password,
            orders=self._orders, init_script=script, workspace=self._workspace,
        )  # fmt: skip
        log.info("%s", " ".join(command))
        with self.log_file.open("ab") as out:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, cwd=folder,
                env={**os.environ, POOL: session},
            )  # fmt: skip

    def set_wanted_workers(self, workers: int) -> None:
        if workers != self._wanted:
            self._wanted = workers
            write_whole(self._orders, msgspec.json.encode({"min-workers": workers}))

    def explain_end(self) -> str:
        """Return why the factory has ended, or an empty text."""
        code = self._process.poll()
        if code is None:
            return ""
        said = self.log_file.read_text(errors="replace").strip().splitlines()[-_LAST_LINES:]
        return f"vine_factory ended with exit code {code}: {'; '.join(said) or 'it printed nothing'} ({self.log_file})"

    def close(self) -> None:
        """End the factory, which removes its workers."""
        self._process.terminate()
        grace_s = _LOCAL_GRACE_S if self._workspace is not None else _BATCH_GRACE_S
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            if self._workspace is None:
                log.warning("vine_factory has not removed its jobs within %g s; it is still removing them", grace_s)
                return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._workspace is not None:
            shutil.rmtree(self._workspace, ignore_errors=True)


def _make_workspace(plan: VinePlan) -> Path | None:
    if plan.batch != "local":
        return None
    base = os.path.expandvars(os.path.expanduser(plan.scratch)) or os.environ.get("STOKER_SCRATCH")
    return Path(tempfile.mkdtemp(prefix="stoker-vine-", dir=base or None))
