"""The site under test and its sessions. Only one session runs at a time.

    main    the unchanged site; on a batch system up to two blocks
    pair    two pilots with a cache each: the same session on a batch system; on this machine, two pilots of one CPU
    short   pilots whose walltime ends while calls run

Local pilots have no walltime and no separate cache, so `worker_init` sets walltime and cache.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NoReturn

import msgspec

import stoker
from stoker.config import Duration, Site, load_site
from stoker.errors import StokerError
from stoker.protocol import show_status
from stoker.protocol.status import DeviceStatus
from stoker.sessions import Session, Status
from stoker.site import Engine, Pilot, Policy, Provider, ProviderKind, ProvisioningName
from stoker.site_tests.on_pilot import Whereabouts, whereabouts
from stoker.site_tests.promise import broken, not_tried
from stoker.units import show_bytes, show_seconds

VARIABLE = "STOKER_SITE_SUITE"
"""An environment variable that `worker_init` sets on the suite's pilots."""
SHORTEST_S = 60.0
"""The shortest walltime that a site file may set, in seconds."""
_LOCAL_WALLTIME_S = 15
_JOB_S = 1800.0
"""Walltime of the suite's jobs, in seconds, if the site's walltime is longer: short jobs start sooner."""
_POLL_S = 2.0
_LOCAL_WAIT_S, _BATCH_WAIT_S = 90.0, 300.0
"""Seconds to wait for a pilot. A local pilot waits 60 s for a hanging driver."""
_STUCK_S = 10.0
"""Seconds of trouble without a queued job, after which the batch system counts as broken."""
_CANCEL = {
    ProviderKind.SLURM: ("scancel",),
    ProviderKind.CONDOR: ("condor_vacate_job",),
    ProviderKind.PBS: ("qdel",),
    ProviderKind.LSF: ("bkill",),
    ProviderKind.GRID_ENGINE: ("qdel",),
}
"""Commands that remove a job from its node."""


class Subject:
    """The site, its current session, and facts about its pilots."""

    def __init__(self, file: str, *, wait_s: float | None, folder: Path) -> None:
        self.site = load_site(file)
        self.is_local = self.site.is_local and self.site.engine is Engine.STOKER
        self.wait_s = wait_s if wait_s is not None else _LOCAL_WAIT_S if self.site.is_local else _BATCH_WAIT_S
        self.folder = folder
        self.no_pilot = ""
        """The reason why no pilot started; empty while a pilot may start."""
        self.machines: tuple[str, ...] = ()
        self.devices: tuple[str, ...] = ()
        self.troubles: tuple[str, ...] = ()
        """Error messages of pilots and the batch system."""
        self._noted: tuple[str, ...] = ()
        self._session: Session | None = None
        self._name = ""

    @property
    def provider(self) -> str:
        provider = self.site.provider
        where = provider.partition or provider.queue
        engine = "TaskVine on " if self.site.engine is Engine.TASKVINE else ""
        return f"{engine}{provider.kind.title}{f', partition {where}' if where else ''}"

    @property
    def log(self) -> str:
        return str(self._session.folder) if self._session is not None else ""

    # ---- sessions

    def main(self) -> Session:
        """Return a session that has the unchanged site file and a pilot. The test fails if no pilot starts."""
        return self._enter_session("main", self._make_site_variant(2 if not self.is_local else 1), pilots=1)

    def pair(self) -> Session:
        self.skip_without_own_pilots("it has one pilot, which TaskVine's workers serve")
        if not self.is_local:
            return self._enter_session("main", self._make_site_variant(2), pilots=2)
        scratch = shlex.quote(str(self.folder / "scratch"))
        own_cache = f"export STOKER_SCRATCH={scratch}/$$; mkdir -p $STOKER_SCRATCH"
        return self._enter_session("pair", self._make_site_variant(2, devices="cpu:1", init=own_cache), pilots=2)

    def short(self) -> tuple[Session, float]:
        self.skip_without_own_pilots("its factory replaces workers by itself")
        if self.is_local:
            init = f"export PBS_WALLTIME={_LOCAL_WALLTIME_S}"
            site = self._make_site_variant(1, devices="cpu:1", init=init)
            return self._enter_session("short", site, pilots=1), _LOCAL_WALLTIME_S
        return self._enter_session("short", self._make_site_variant(1, walltime_s=SHORTEST_S), pilots=1), SHORTEST_S

    def close(self) -> None:
        session, self._session, self._name = self._session, None, ""
        if session is not None:
            session.stop()

    def end_session_before_next_test(self) -> None:
        """Let the next test start another session: a lost local pilot is replaced only after a pause."""
        if self.is_local:
            self._name = ""

    def skip_without_own_pilots(self, why: str) -> None:
        if self.site.engine is Engine.TASKVINE:
            not_tried(f'engine = "taskvine": {why}')

    def _make_site_variant(self, blocks: int, *, devices: str = "", init: str = "", walltime_s: float = 0.0) -> Site:
        site, replace = self.site, msgspec.structs.replace
        lines = [site.provider.worker_init, f"export {VARIABLE}=travels", init]
        provider: Provider = replace(site.provider, worker_init="\n".join(filter(None, lines)))
        if not site.is_local:
            provider = replace(
                provider,
                walltime_s=Duration(walltime_s or min(provider.walltime_s, _JOB_S)),
                poll_s=Duration(min(provider.poll_s, _POLL_S)),
            )
        pilot: Pilot = replace(site.pilot, init_blocks=blocks, min_blocks=0, max_blocks=blocks)
        if devices:
            pilot = Pilot(devices=devices, cache_bytes=pilot.cache_bytes, init_blocks=blocks, max_blocks=blocks)
        session = replace(site.session, heartbeat_s=Duration(min(site.session.heartbeat_s, 1.0)))
        policy = site.policy
        if site.engine is Engine.STOKER:
            fixed = ProvisioningName.FIXED
            policy = Policy(policy.name, dispatch=policy.dispatch, residency=policy.residency, provisioning=fixed)
        return replace(site, sites=(), provider=provider, pilot=pilot, session=session, policy=policy)

    def _enter_session(self, name: str, site: Site, *, pilots: int) -> Session:
        if self.no_pilot:
            not_tried("no pilot started")
        if self._session is None or self._name != name or self._session.over is not None:
            self.close()
            runs = str(self.folder / "sessions")
            self._session, self._name = stoker.load(site, run_dir=runs, progress=False, strategy_period=0.3), name
        self._wait_for_pilots(self._session, pilots)
        return self._session

    def _wait_for_pilots(self, session: Session, count: int) -> None:
        call = stoker.app(whereabouts)()
        began, stuck_since = time.monotonic(), None
        while True:
            try:
                status = session.status(30.0)
                error = call.exception() if call.done() else session.over
            except Exception as trouble:  # Parsl raises this for a failed executor
                status, error = None, trouble
            waited_s = time.monotonic() - began
            if error is not None or status is None:
                self._give_up([_shorten_error_text(error)], waited_s=waited_s, found=0)
            here = [pilot for pilot in status.pilots if pilot.state == "here"]
            faults = [device.fault for pilot in here for device in pilot.devices if device.fault]
            found = sum(not all(device.fault for device in pilot.devices) for pilot in here)
            if found >= count:
                self._note(status)
                return
            comes = any(job.phase in ("pending", "running") for job in status.jobs)
            is_stuck = bool(faults) or (bool(status.trouble or status.ended_blocks) and not comes)
            stuck_since = (stuck_since or time.monotonic()) if is_stuck else None
            if waited_s > self.wait_s or (stuck_since is not None and time.monotonic() - stuck_since > _STUCK_S):
                said = [*faults, *status.trouble.values(), *show_status.describe_blocks_without_pilot(status.jobs)]
                said += show_status.format_counts_by_reason(status.ended_blocks)
                self._give_up(said, waited_s=waited_s, found=found)
            time.sleep(0.1)

    def _give_up(self, said: list[str], *, waited_s: float, found: int) -> NoReturn:
        silent = "its process runs and says nothing" if self.is_local else "the batch system gives no reason"
        why = "; ".join(dict.fromkeys(said)) or silent
        if found:
            not_tried(f"only {found} pilot{'s' * (found != 1)} came within {show_seconds(waited_s)}: {why}")
        self.no_pilot = why
        broken(f"no pilot started within {show_seconds(waited_s)}: {why}")

    def note(self, device: str) -> None:
        self._noted = tuple(dict.fromkeys([*self._noted, device]))
        self.devices = tuple(dict.fromkeys([*self.devices, device]))

    def _note(self, status: Status) -> None:
        machines = {*self.machines, *(pilot.host for pilot in status.pilots)}
        self.machines = tuple(sorted(machines))
        self.troubles = tuple(dict.fromkeys([*self.troubles, *status.trouble.values()]))
        if self._name == "main":
            self.devices = (
                *_describe_devices([each for pilot in status.pilots for each in pilot.devices]),
                *self._noted,
            )

    # ---- calls

    def call(self, function: Callable[..., Any], *args: Any, context: Any = None, **options: Any) -> Future[Any]:
        app = stoker.app(context=context, **options) if context is not None else stoker.app(**options)
        given = args if context is not None else (None, *args)
        future: Future[Any] = app(function)(*given)
        return future

    def result(self, future: Future[Any], *, within_s: float, what: str) -> Any:
        try:
            return future.result(within_s)
        except TimeoutError:
            broken(f"{what} gave no result within {show_seconds(within_s)}{self._waits()}")
        except StokerError as error:
            broken(f"{what} failed: {error}")

    def error(
        self, future: Future[Any], *, within_s: float, otherwise: Callable[[str], NoReturn] = broken
    ) -> BaseException:
        try:
            found = future.result(within_s)
        except TimeoutError:
            broken(f"a call that has to fail had not ended after {show_seconds(within_s)}{self._waits()}")
        except Exception as error:
            return error
        otherwise(found if isinstance(found, str) else f"a call that has to fail returned {found!r}")

    def until(
        self, true: Callable[[Status], Any], *, within_s: float, what: str, found: Callable[[], str] = str
    ) -> Status:
        """Wait until the session status meets a condition; return the status. After the limit the test fails with a
        sentence. `found` describes the current state for the message.
        """
        session = self._session
        if session is None:
            broken("no session is up")
        until = time.monotonic() + within_s
        while True:
            status = session.status(30.0)
            if true(status):
                return status
            if time.monotonic() > until:
                said = f"; {found()}" if found() else ""
                broken(f"{what} did not come within {show_seconds(within_s)}{said}{self._waits()}")
            time.sleep(0.1)

    def _waits(self) -> str:
        status = self._session.status(30.0) if self._session is not None else None
        said = (
            [*status.trouble.values(), *show_status.describe_blocks_without_pilot(status.jobs)]
            if status is not None
            else []
        )
        return f" ({'; '.join(said)})" if said else ""

    def preempt(self, victim: Whereabouts, *, job: str) -> str:
        if self.is_local:
            os.kill(victim.pilot, signal.SIGTERM)
            return "SIGTERM"
        command = _CANCEL.get(self.site.provider.kind)
        if command is None:
            not_tried(f"the suite knows no command of {self.site.provider.kind.title} that takes a job away")
        limit_s = self.site.provider.command_limit_s
        done = subprocess.run([*command, job], capture_output=True, text=True, timeout=limit_s, check=False)
        if done.returncode:
            broken(f"{command[0]} {job} failed: {(done.stderr or done.stdout).strip()}")
        return f"{command[0]} {job}"


def _describe_devices(devices: list[DeviceStatus]) -> Iterator[str]:
    kinds: dict[str, list[DeviceStatus]] = {}
    for device in devices:
        kinds.setdefault(device.kind or "unknown", []).append(device)
    for kind, each in kinds.items():
        bad = sum(bool(device.fault) for device in each)
        faulty = f" ({bad} of them faulty)" if bad else ""
        yield f"{len(each)} x {kind} with {show_bytes(min(one.memory_bytes for one in each))}{faulty}"


def _shorten_error_text(error: BaseException | None) -> str:
    return str(error).rpartition(" failed due to: ")[2]


def add_to_import_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
