"""A pool of real HTCondor daemons with the methods of the stand-in (`pool`)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from batch.condor.needs import daemons
from free_port import free_port
from live.peers import until
from polling import PATIENCE_S

COMMANDS = (
    "condor_submit", "condor_q", "condor_history", "condor_rm", "condor_hold", "condor_release", "condor_vacate_job",
    "condor_status", "condor_config_val",
)  # fmt: skip
_RUNNING, _HELD = 2, 5
_DAEMONS = ("condor_startd", "condor_starter", "condor_procd")
"""Names of daemons below a condor_master; other processes are jobs (`condor_exec.exe` in old versions)."""
_POOL = """\
RELEASE_DIR = {release}
BIN = {release}/bin
SBIN = {release}/sbin
LIBEXEC = {libexec}
LOCAL_DIR = {folder}/central
LOG = $(LOCAL_DIR)/log
SPOOL = $(LOCAL_DIR)/spool
EXECUTE = $(LOCAL_DIR)/execute
LOCK = $(LOCAL_DIR)/lock
RUN = $(LOCAL_DIR)/run
CONDOR_HOST = 127.0.0.1
COLLECTOR_HOST = 127.0.0.1:{port}
NETWORK_INTERFACE = 127.0.0.1
BIND_ALL_INTERFACES = False
USE_SHARED_PORT = False
UID_DOMAIN = submit.pool
FILESYSTEM_DOMAIN = submit.pool
SCHEDD_NAME = submit.pool@
DAEMON_LIST = MASTER COLLECTOR NEGOTIATOR
SEC_DEFAULT_AUTHENTICATION_METHODS = FS
SEC_DEFAULT_AUTHENTICATION = OPTIONAL
SEC_DEFAULT_ENCRYPTION = OPTIONAL
SEC_DEFAULT_INTEGRITY = OPTIONAL
SEC_USE_FAMILY_SESSION = False
ALLOW_READ = *
ALLOW_WRITE = *
ALLOW_DAEMON = *
ALLOW_ADMINISTRATOR = *
ALLOW_NEGOTIATOR = *
ENABLE_URL_TRANSFERS = False
NEGOTIATOR_INTERVAL = 2
NEGOTIATOR_MIN_INTERVAL = 1
NEGOTIATOR_CYCLE_DELAY = 1
SCHEDD_INTERVAL = 2
SCHEDD_MIN_INTERVAL = 1
UPDATE_INTERVAL = 2
CLASSAD_LIFETIME = 10
POLLING_INTERVAL = 1
PERIODIC_EXPR_INTERVAL = 2
MAX_PERIODIC_EXPR_INTERVAL = 2
STARTER_UPDATE_INTERVAL = 2
STARTER_INITIAL_UPDATE_INTERVAL = 1
RUNBENCHMARKS = False
KILLING_TIMEOUT = {kill_s}
"""
_MACHINE = """\
include : {folder}/condor_config
LOCAL_DIR = {place}
DAEMON_LIST = MASTER STARTD
MASTER_NAME = {name}@
STARTD_NAME = {name}@
FILESYSTEM_DOMAIN = {domain}
NUM_CPUS = {cpus}
MEMORY = {memory_mb}
SLOT_TYPE_1 = 100%
SLOT_TYPE_1_PARTITIONABLE = True
NUM_SLOTS_TYPE_1 = 1
use POLICY : Always_Run_Jobs
MAXJOBRETIREMENTTIME = 0
"""
_FOLDERS = ("log", "spool", "execute", "lock", "run")


class RealPool:
    """A running pool with the options of the stand-in, except that HTCondor sets `rematch_s`."""

    is_real = True

    def __init__(
        self,
        folder: Path,
        *machines: dict[str, Any],
        kill_s: float = 5.0,
        rematch_s: int = 60,
        match_s: int = 0,
    ) -> None:
        if match_s:
            pytest.skip("how long HTCondor's negotiator takes is up to HTCondor")
        self.folder, self.bin = folder, folder / "bin"
        self.bin.mkdir(parents=True)
        self._names = [machine["name"] for machine in machines]
        self._stopped: list[psutil.Process] = []
        self._masters: dict[str, subprocess.Popen[bytes]] = {}
        self._schedd: subprocess.Popen[bytes] | None = None
        self._attempts: dict[str, int] = {}
        self._config = folder / "condor_config"
        found = daemons()
        assert found is not None
        text = _POOL.format(
            release=found.release, libexec=found.libexec, folder=folder, port=free_port(), kill_s=int(kill_s),
        )  # fmt: skip
        self._config.write_text(text)
        for name in COMMANDS:
            self._write_program(
                self.bin / name, f"#!/bin/sh\nexec env CONDOR_CONFIG='{self._config}' '{found.bin / name}' \"$@\"\n"
            )
        self._make_folders(folder / "central")
        self._masters[""] = self._start("condor_master", self._config)
        for machine in machines:
            self._start_machine(machine)
        self.start_schedd()
        until(self._all_are_up, what="every machine in the pool")

    # ---- a user's actions

    def run(self, *words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run([self.bin / words[0], *words[1:]], cwd=cwd, capture_output=True, text=True, timeout=60)

    def ad(self, job: str) -> dict[str, Any]:
        for command in ("condor_q", "condor_history"):
            said = self.run(command, job, "-json").stdout
            for ad in json.loads(said or "[]"):
                return dict(ad)
        raise KeyError(f"no job {job} in {self.queued()}, nor in the history")

    def queued(self) -> list[str]:
        return self.run("condor_q", "-allusers", "-af:j", "Nothing").stdout.split()[::2]

    def status(self, job: str) -> int:
        return int(self.ad(job)["JobStatus"])

    def wait(self, job: str, status: int, *, seconds: float = PATIENCE_S) -> dict[str, Any]:
        until(lambda: self.status(job) == status, seconds=seconds, what=f"job {job} in status {status}")
        return self.ad(job)

    # ---- events of jobs

    def evict(self, job: str) -> None:
        """Make the machine reclaim the slot of the job: its PREEMPT expression becomes true."""
        until(lambda: self.processes(job), what=f"the processes of job {job}")
        name = self.ad(job)["RemoteHost"].partition("@")[2].rstrip("@")
        started = self.ad(job)["JobCurrentStartDate"]
        if job in self._attempts:
            until(lambda: self._is_found_again(job), what=f"the new shadow of job {job} at its machine")
        cluster, _, proc = job.partition(".")
        self._set(name, "PREEMPT", f"TARGET.ClusterId =?= {cluster} && TARGET.ProcId =?= {proc}")
        until(lambda: not self._still_runs(job, started), what=f"the eviction of job {job}")
        self._set(name, "PREEMPT", "False")

    def _is_found_again(self, job: str) -> bool:
        """Return True if the new shadow of a job has reached the job's machine after the schedd was killed."""
        ad = self.ad(job)
        return _attempts(ad) > self._attempts[job] and not isinstance(ad.get("JobCurrentReconnectAttempt"), int)

    def _still_runs(self, job: str, started: int) -> bool:
        ad = self.ad(job)
        return ad["JobStatus"] == _RUNNING and ad["JobCurrentStartDate"] == started

    def hold(
        self, job: str, reason: str, *, code: int, subcode: int = 0, used_mb: int = 0, held_for_s: int = 0
    ) -> None:
        self.run("condor_hold", "-reason", reason, job)
        self.wait(job, _HELD)
        held_at = self.ad(job)["EnteredCurrentStatus"] - held_for_s
        more = {"ResidentSetSize_RAW": used_mb * 1024} if used_mb else {}
        self.change(
            job, HoldReason=reason, HoldReasonSubCode=subcode, **more, HoldReasonCode=code, EnteredCurrentStatus=held_at
        )

    def release(self, job: str) -> None:
        self.run("condor_release", job)

    def change(self, job: str, **attributes: Any) -> None:
        words = [word for name, value in attributes.items() for word in (name, json.dumps(value))]
        said = self._condor("condor_qedit", job, *words)
        assert said.returncode == 0, said.stderr

    def clear(self) -> None:
        self._wake()
        self.run("condor_rm", "-all")
        for name, master in self._masters.items():
            if master.poll() is not None:
                self._start_master(name)
        until(lambda: not self.queued(), what="the queue being empty")
        until(self._all_are_up, what="every machine in the pool")

    def lose(self, name: str) -> None:
        master = psutil.Process(self._masters[name].pid)
        for process in [master, *master.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                if process.name().startswith("condor_"):
                    process.suspend()
                    self._stopped.append(process)

    def crash(self, name: str) -> None:
        until(lambda: self._jobs_of(name), what=f"the processes of jobs of {name}")
        master = psutil.Process(self._masters[name].pid)
        for process in [master, *master.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._masters[name].wait()

    def processes(self, job: str) -> list[psutil.Process]:
        """Return the processes of a running job; empty during its start."""
        slot, _, name = self.ad(job).get("RemoteHost", "").rstrip("@").partition("@")
        return [
            process for starter in self._starters(name) if slot in starter.cmdline() for process in _job_below(starter)
        ]

    def _jobs_of(self, name: str) -> list[psutil.Process]:
        return [process for starter in self._starters(name) for process in _job_below(starter)]

    def _starters(self, name: str) -> list[psutil.Process]:
        if name not in self._masters:
            return []
        return [process for process in self._daemons_of(name) if process.name() == "condor_starter"]

    def _daemons_of(self, name: str) -> list[psutil.Process]:
        children = psutil.Process(self._masters[name].pid).children(recursive=True)
        return [process for process in children if process.name() in _DAEMONS]

    # ---- daemons

    def stop_schedd(self) -> None:
        """Kill the schedd and also its shadows, because old and new shadows would compete; jobs continue."""
        if self._schedd is not None:
            self._attempts = {job: _attempts(self.ad(job)) for job in self.queued()}
            shadows = psutil.Process(self._schedd.pid).children(recursive=True)
            self._schedd.kill()
            self._schedd.wait()
            for shadow in shadows:
                with contextlib.suppress(psutil.Error):
                    shadow.kill()
            self._schedd = None

    def start_schedd(self) -> None:
        self._schedd = self._start("condor_schedd", self._config)
        until(lambda: self.run("condor_q", "-allusers").returncode == 0, what="the schedd")

    def close(self) -> None:
        self._wake()
        started = [*self._masters.values(), *filter(None, [self._schedd])]
        there = [psutil.Process(each.pid) for each in started if each.poll() is None]
        for process in [*there, *(child for one in there for child in one.children(recursive=True))]:
            with contextlib.suppress(psutil.Error):
                process.kill()
        for each in started:
            each.wait()

    def _wake(self) -> None:
        for process in self._stopped:
            with contextlib.suppress(psutil.Error):
                process.resume()
        self._stopped = []

    def _start_machine(self, machine: dict[str, Any]) -> None:
        name, place = machine["name"], self.folder / machine["name"]
        self._make_folders(place)
        lines = [
            _MACHINE.format(
                folder=self.folder,
                place=place,
                **{key: machine[key] for key in ("name", "domain", "cpus", "memory_mb")},
            )
        ]
        for attribute, expression in machine["more"].items():
            lines.append(f"{attribute} = {expression}\nSTARTD_ATTRS = $(STARTD_ATTRS) {attribute}\n")
        if machine["gpus"]:
            self._write_program(place / "gpus", _inventory(machine["gpus"]))
            lines.append(f"use FEATURE : GPUs\nMACHINE_RESOURCE_INVENTORY_GPUs = {place}/gpus\n")
        (place / "condor_config").write_text("".join(lines))
        self._start_master(name)

    def _start_master(self, name: str) -> None:
        self._masters[name] = self._start("condor_master", self.folder / name / "condor_config")

    def _all_are_up(self) -> bool:
        said = self.run("condor_status", "-af", "Name").stdout.split()
        return len(said) == len(self._names)

    def _set(self, name: str, setting: str, value: str) -> None:
        config = self.folder / name / "condor_config"
        config.write_text(f"{config.read_text()}{setting} = {value}\n")
        for process in psutil.Process(self._masters[name].pid).children():
            if process.name() == "condor_startd":
                process.send_signal(signal.SIGHUP)

    def _condor(self, name: str, *words: str) -> subprocess.CompletedProcess[str]:
        found = daemons()
        assert found is not None
        environ = {**os.environ, "CONDOR_CONFIG": str(self._config)}
        return subprocess.run([found.bin / name, *words], env=environ, capture_output=True, text=True, timeout=60)

    def _start(self, name: str, config: Path) -> subprocess.Popen[bytes]:
        found = daemons()
        assert found is not None
        environ = {key: value for key, value in os.environ.items() if not key.startswith("STOKER_")}
        with (self.folder / f"{config.parent.name}-{name}.txt").open("ab") as said:
            return subprocess.Popen(
                [found.sbin / name, "-f"], env={**environ, "CONDOR_CONFIG": str(config)}, stdin=subprocess.DEVNULL,
                stdout=said, stderr=said, start_new_session=True,
            )  # fmt: skip

    def _make_folders(self, place: Path) -> None:
        for name in _FOLDERS:
            (place / name).mkdir(parents=True)

    def _write_program(self, file: Path, text: str) -> None:
        file.write_text(text)
        file.chmod(file.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)


def _job_below(starter: psutil.Process) -> list[psutil.Process]:
    """Return the job processes of a starter, without its children for file transfer."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child for child in starter.children(recursive=True) if child.name() not in _DAEMONS]
    return []


def _attempts(ad: dict[str, Any]) -> int:
    return int(ad.get("TotalJobReconnectAttempts", 0))


def _running(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != "zombie":
                found.append(process)
    return found


def _inventory(gpus: Sequence[dict[str, Any]]) -> str:
    names = ", ".join(gpu["uuid"] for gpu in gpus)
    lines = [f'DetectedGPUs="{names}"']
    for gpu in gpus:
        facts = {
            "id": gpu["uuid"], "DeviceUuid": gpu["uuid"].removeprefix("GPU-"), "DeviceName": gpu["name"],
            "Capability": gpu["capability"], "GlobalMemoryMb": gpu["memory_mb"],
        }  # fmt: skip
        inside = " ".join(f"{name}={json.dumps(value)};" for name, value in facts.items())
        lines.append(f"{gpu['uuid'].replace('-', '_')}=[ {inside} ]")
    return "#!/bin/sh\ncat <<'END'\n" + "\n".join(lines) + "\nEND\n"
