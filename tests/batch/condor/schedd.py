"""The stand-in schedd, which also does the work of negotiator and shadows. It matches idle jobs with slots, transfers
files, starts jobs and notices their ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import htcondor  # adds HTCondor's own functions to ClassAds, for example `countMatches`  # noqa: F401
import psutil
from batch.condor.ads import (
    COMPLETED,
    HELD,
    IDLE,
    REMOVED,
    RUNNING,
    Ad,
    gpu_ad,
    is_true,
    machine_ad,
    now,
    turn,
    value,
)
from batch.condor.queue import Id, Queue, hold_lock, id_of

# ---- slots


_AMOUNTS = ("Cpus", "Memory", "Disk")
Start = dict[str, Any]
"""The content of `start.json` of a running job: `machine`, `claimed` amounts, `gpus`, and how the job was started."""


class Claim(NamedTuple):
    """A part of a machine for one job. `gpus` are UUIDs."""

    machine: str
    slot: str
    claimed: dict[str, int]
    gpus: list[str]
    ad: Ad
    has_gpus: bool


def find(job: Ad, machines: Sequence[dict[str, Any]], running: Sequence[Start]) -> Claim | None:
    """Return the first free part of a machine if job and machine meet each other's requirements."""
    for machine in machines:
        taken = [start for start in running if start["machine"] == machine["name"]]
        free = {"Cpus": machine["cpus"], "Memory": machine["memory_mb"], "Disk": machine["disk_mb"] * 1024}
        free = {name: amount - sum(start["claimed"][name] for start in taken) for name, amount in free.items()}
        used = {uuid for start in taken for uuid in start["gpus"]}
        gpus = [gpu for gpu in machine["gpus"] if gpu["uuid"] not in used]
        if job.symmetricMatch(machine_ad(machine, name=f"slot1@{machine['name']}", free=free, gpus=gpus)):
            return _claim(job, machine, gpus, number=_number(taken))
    return None


def _claim(job: Ad, machine: dict[str, Any], gpus: Sequence[dict[str, Any]], *, number: int) -> Claim:
    mine = [gpu for gpu in gpus if "RequireGPUs" not in job or is_true(gpu_ad(gpu), str(job.lookup("RequireGPUs")))]
    mine = mine[: int(value(job, "RequestGPUs", 0))]
    claimed = {name: int(value(job, f"Request{name}", 1)) for name in _AMOUNTS}
    claimed["Memory"] = -(-claimed["Memory"] // 128) * 128  # like MODIFY_REQUEST_EXPR_REQUESTMEMORY
    slot = f"slot1_{number}@{machine['name']}"
    uuids = [gpu["uuid"] for gpu in mine]
    ad = machine_ad(machine, name=slot, free=claimed, gpus=mine)
    ad["AssignedGPUs"] = ",".join(uuids)
    return Claim(machine["name"], slot, claimed, uuids, ad, bool(machine["gpus"]))


def _number(taken: Sequence[Start]) -> int:
    used = {start["slot"] for start in taken}
    return next(n for n in range(1, len(taken) + 2) if not any(slot.startswith(f"slot1_{n}@") for slot in used))


def environment(job: Ad, claim: Claim, sandbox: Path) -> dict[str, str]:
    """Return a job's environment, which lacks PATH and HOME."""
    given = dict(word.split("=", 1) for word in shlex.split(value(job, "Environment", "")))
    if claim.gpus:
        names = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "_CONDOR_AssignedGPUs")
        given |= dict.fromkeys(names, ",".join(claim.gpus))
    elif claim.has_gpus:  # HTCondor sets these values for a job without GPUs on a machine with GPUs
        given |= {"CUDA_VISIBLE_DEVICES": "10000", "NVIDIA_VISIBLE_DEVICES": "none", "_CONDOR_AssignedGPUs": "10000"}
    folders = dict.fromkeys(("TMPDIR", "TMP", "TEMP", "_CONDOR_SCRATCH_DIR", "_CONDOR_JOB_IWD"), str(sandbox))
    return {
        **given,
        **folders,
        "BATCH_SYSTEM": "HTCondor",
        "OMP_NUM_THREADS": str(claim.claimed["Cpus"]),
        "_CONDOR_SLOT": claim.slot.partition("@")[0],
        "_CONDOR_JOB_AD": str(sandbox / ".job.ad"),
        "_CONDOR_MACHINE_AD": str(sandbox / ".machine.ad"),
    }


# ---- transfer


class TransferError(Exception):
    """A file of the job is unreadable. `number`: the errno."""

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(f"reading from file {path}: (errno {error.errno}) {os.strerror(error.errno or 0)}")
        self.number = error.errno or 0


def send(job: Ad, sandbox: Path, *, machine: Ad) -> dict[str, Any]:
    """Fill the sandbox; return the job's command, folder and output file."""
    home = Path(job["Iwd"])
    moved = _transferred(job, machine)
    program = _under(home, str(job["Cmd"]))
    if moved:
        if value(job, "TransferExecutable", True):
            program = _copy(program, sandbox / program.name)
            program.chmod(0o755)
        for name in value(job, "TransferInput", "").split(","):
            if name.strip():
                source = _under(home, name.strip())
                _copy(source, sandbox if name.strip().endswith("/") else sandbox / source.name)
    (sandbox / ".job.ad").write_text(job.printOld())
    (sandbox / ".machine.ad").write_text(machine.printOld())
    out, err = ("_condor_stdout", "_condor_stderr") if moved else (value(job, "Out"), value(job, "Err"))
    return {
        "command": [str(program), *_arguments(job)], "cwd": str(sandbox if moved else home), "transferred": moved,
        "stdin": "/dev/null", "out": str(_under(sandbox if moved else home, out)),
        "err": str(_under(sandbox if moved else home, err)),
    }  # fmt: skip


def bring_back(job: Ad, sandbox: Path, *, transferred: bool) -> None:
    """Return the output of an ended job. Without TransferOutput, return every new file, like HTCondor."""
    if not transferred:
        return
    home = Path(job["Iwd"])
    for kept, name in (("_condor_stdout", value(job, "Out")), ("_condor_stderr", value(job, "Err"))):
        if name != "/dev/null":
            shutil.copyfile(sandbox / kept, _under(home, name))
    sent = {Path(name.strip()).name for name in value(job, "TransferInput", "").split(",")}
    sent |= {Path(job["Cmd"]).name, "_condor_stdout", "_condor_stderr", ".job.ad", ".machine.ad"}
    if "TransferOutput" in job:
        names = [name.strip() for name in value(job, "TransferOutput", "").split(",") if name.strip()]
    else:
        names = [path.name for path in sandbox.iterdir() if path.is_file() and path.name not in sent]
    for name in names:
        _copy(sandbox / name, home / Path(name).name)


def _transferred(job: Ad, machine: Ad) -> bool:
    should = value(job, "ShouldTransferFiles", "IF_NEEDED").upper()
    return should == "YES" or (should == "IF_NEEDED" and value(job, "FileSystemDomain") != machine["FileSystemDomain"])


def _under(home: Path, name: str) -> Path:
    return home / name


def _copy(source: Path, to: Path) -> Path:
    try:
        if source.is_dir():
            shutil.copytree(source, to, dirs_exist_ok=True)
        else:
            shutil.copy(source, to)
    except OSError as error:
        raise TransferError(source, error) from error
    return to


def _arguments(job: Ad) -> list[str]:
    if "Arguments" in job:
        return shlex.split(value(job, "Arguments", ""))
    return value(job, "Args", "").split()


# ---- schedd


_POLL_S = 0.05
_POLICY_S = 0.3
"""Seconds between two evaluations of periodic expressions (HTCondor: a minute)."""
_BY_POLICY, _NOT_RUN, _NOT_SENT = 3, 6, 13
"""Codes of holds."""
_STARTER_ERROR, _RECONNECT_FAILED = 1007, 1008
"""Codes of vacates."""
_FIRST = "1 total failures: first failure: "


class Schedd:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pool = json.loads((folder / "pool.json").read_text())
        self._queue = Queue(folder)
        self._children: list[subprocess.Popen[bytes]] = []
        self._policy_at = 0.0
        for ad in self._queue.jobs():  # a new schedd starts new shadows
            if self._place(id_of(ad)).is_dir() and ad["JobStatus"] == RUNNING:
                self._turn(id_of(ad), RUNNING, was=RUNNING, NumShadowStarts=int(value(ad, "NumShadowStarts", 0)) + 1)

    def look(self) -> None:
        self._children = [child for child in self._children if child.poll() is None]
        if time.monotonic() - self._policy_at > _POLICY_S:
            self._policy_at = time.monotonic()
            self._apply_policies()
        vacating = self._queue.vacating()
        for ad in self._queue.jobs():
            place = self._place(id_of(ad))
            if place.is_dir():
                self._see(ad, place, vacating=id_of(ad) in vacating)
            elif ad["JobStatus"] == REMOVED:
                with self._queue.change():
                    self._queue.leave(ad)
            elif ad["JobStatus"] == RUNNING:
                self._turn(id_of(ad), IDLE, was=RUNNING)  # the schedd was killed while it started the job
            elif ad["JobStatus"] == IDLE and now() >= value(ad, "NextRematch", 0):
                self._match(ad)

    def _place(self, job: Id) -> Path:
        return self._folder / "running" / str(job)

    def _apply_policies(self) -> None:
        for name, status, verb in (("PeriodicRemove", REMOVED, "Remove"), ("PeriodicHold", HELD, "Hold")):
            for ad in self._queue.jobs():
                expression = str(ad.lookup(name)) if name in ad else "false"
                if ad["JobStatus"] in (status, REMOVED, COMPLETED) or not is_true(ad, expression):
                    continue
                why = f"The job attribute {name} expression '{expression}' evaluated to TRUE"
                more = {"HoldReasonCode": _BY_POLICY, "HoldReasonSubCode": 0} if status == HELD else {}
                self._turn(id_of(ad), status, was=int(ad["JobStatus"]), **{f"{verb}Reason": why}, **more)

    def _turn(self, job: Id, status: int, *, was: int, **attributes: Any) -> bool:
        """Set the state of a job if its current state is `was`; return True if changed."""
        with self._queue.change():
            for ad in self._queue.jobs():
                if id_of(ad) == job and ad["JobStatus"] == was:
                    turn(ad, status, **attributes)
                    self._queue.put(ad)
                    return True
        return False

    # ---- a running job

    def _see(self, ad: Ad, place: Path, *, vacating: bool) -> None:
        start = json.loads((place / "start.json").read_text())
        if (place / "exit.json").exists():
            self._ended(id_of(ad), place, start, json.loads((place / "exit.json").read_text()), vacated=vacating)
        elif (mark := self._folder / "lost" / start["machine"]).exists():
            self._disconnected(ad, place, start, since=mark.stat().st_mtime)
        elif not psutil.pid_exists(start["pid"]):
            if not vacating:
                self._evicted(ad, "The starter exited unexpectedly", code=_STARTER_ERROR)
            self._ended(id_of(ad), place, start, {}, vacated=True)
        elif vacating or ad["JobStatus"] in (REMOVED, HELD, IDLE):
            # An idle job that still has a sandbox was held and released, or removed and added again, since the last
            # check. Send the signal at every check, because a new starter may not handle signals yet (SIGQUIT is
            # ignored below a background job).
            graceful = vacating or value(ad, "WantGracefulRemoval", False)
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(start["pid"]).send_signal(signal.SIGTERM if graceful else signal.SIGQUIT)

    def _disconnected(self, ad: Ad, place: Path, start: Start, *, since: float) -> None:
        """Count the job of a silent machine as running until its lease ends."""
        lease_s = int(value(ad, "JobLeaseDuration", 2400))
        if ad["JobStatus"] == RUNNING and time.time() - since > lease_s:
            why = f"Job disconnected too long: JobLeaseDuration ({lease_s} seconds) expired"
            self._evicted(ad, why, code=_RECONNECT_FAILED)
            self._ended(id_of(ad), place, start, {}, vacated=True)

    def _evicted(self, ad: Ad, why: str, *, code: int) -> None:
        self._turn(id_of(ad), RUNNING, was=RUNNING, VacateReason=why, VacateReasonCode=code, VacateReasonSubCode=0)

    def _ended(self, job: Id, place: Path, start: Start, ending: dict[str, Any], *, vacated: bool) -> None:
        with self._queue.change():
            ad = next(ad for ad in self._queue.jobs() if id_of(ad) == job)
            ad["LastRemoteHost"] = ad["RemoteHost"]
            if "code" in ending or "signal" in ending:  # the shadow writes the ending when it exits
                ad["NumJobStarts"] = int(value(ad, "NumJobStarts", 0)) + 1
            self._queue.order_vacate(job, wanted=False)
            if "failure" in ending:
                why = f"Error from {start['slot']}: {ending['failure']}"
                turn(ad, HELD, HoldReason=why, HoldReasonCode=_NOT_RUN, HoldReasonSubCode=ending["errno"])
            elif ad["JobStatus"] == RUNNING and not vacated:
                bring_back(ad, Path(start["sandbox"]), transferred=start["transferred"])
                turn(ad, COMPLETED, CompletionDate=now())
            elif ad["JobStatus"] == RUNNING:
                turn(ad, IDLE, LastVacateTime=now(), NextRematch=now() + self._pool["rematch_s"])
            turn(ad, int(ad["JobStatus"]), RemoteHost=None)
            if "signal" in ending or "code" in ending:  # the ad of an evicted job also contains the ending
                ad["ExitBySignal"] = "signal" in ending
                ad["ExitSignal" if "signal" in ending else "ExitCode"] = ending.get("signal", ending.get("code"))
            if ad["JobStatus"] in (REMOVED, COMPLETED):
                self._queue.leave(ad)
            else:
                self._queue.put(ad)
        shutil.rmtree(start["sandbox"], ignore_errors=True)
        shutil.rmtree(place)

    # ---- a waiting job

    def _match(self, ad: Ad) -> None:
        if now() - int(ad["EnteredCurrentStatus"]) < self._pool["match_s"]:
            return  # the negotiator runs only at intervals
        lost = {path.name for path in (self._folder / "lost").iterdir()}
        machines = [machine for machine in self._pool["machines"] if machine["name"] not in lost]
        running = [json.loads(start.read_text()) for start in (self._folder / "running").glob("*/start.json")]
        claim = find(ad, machines, running)
        if claim is not None:
            self._start(ad, claim)
        elif value(ad, "LastRejMatchTime", 0) < ad["EnteredCurrentStatus"]:
            self._turn(id_of(ad), IDLE, was=IDLE, LastRejMatchReason="no match found", LastRejMatchTime=now())

    def _start(self, ad: Ad, claim: Claim) -> None:
        job, started, runs = id_of(ad), now(), int(value(ad, "NumShadowStarts", 0)) + 1
        sandbox = self._folder / "execute" / f"dir_{job.cluster}_{job.proc}_{runs}"
        sandbox.mkdir(parents=True, exist_ok=True)
        new = dict.fromkeys(("NumShadowStarts", "JobRunCount"), runs)
        new |= {"NumJobStarts": value(ad, "NumJobStarts", 0)}
        new |= dict.fromkeys(("JobCurrentStartDate", "JobCurrentStartExecutingDate"), started)
        new |= {"JobStartDate": value(ad, "JobStartDate", started)}
        new |= {"RemoteHost": claim.slot, "AssignedGPUs": ",".join(claim.gpus)}
        turn(ad, RUNNING, **new)
        try:
            run = send(ad, sandbox, machine=claim.ad)
        except TransferError as error:
            shutil.rmtree(sandbox)
            why = "Transfer input files failure at access point submit.pool while sending files to execution point"
            held = {"HoldReasonCode": _NOT_SENT, "HoldReasonSubCode": error.number}
            self._turn(job, HELD, was=IDLE, HoldReason=f"{why} {claim.slot}. Details: {_FIRST}{error}", **held)
            return
        if not self._turn(job, RUNNING, was=IDLE, **new):
            shutil.rmtree(sandbox)  # the job was removed while its files were sent
            return
        where = {"machine": claim.machine, "slot": claim.slot, "gpus": claim.gpus, "claimed": claim.claimed}
        how = {"environment": environment(ad, claim, sandbox), "kill_s": self._pool["kill_s"]}
        self._launch(job, {**run, **where, **how, "sandbox": str(sandbox)})

    def _launch(self, job: Id, start: Start) -> None:
        draft = self._folder / "starting" / str(job)
        draft.mkdir(parents=True)
        command = [sys.executable, "-P", str(Path(__file__).with_name("starter.py")), str(self._place(job))]
        child = subprocess.Popen(command, start_new_session=True, stdin=subprocess.PIPE)
        (draft / "start.json").write_text(json.dumps({**start, "pid": child.pid}))
        draft.rename(self._place(job))
        if child.stdin is not None:
            child.stdin.close()  # the starter begins the job when its stdin closes
        self._children.append(child)


def main(folder: Path) -> None:
    hold_lock(folder)
    for name in ("running", "starting", "execute", "lost"):
        (folder / name).mkdir(exist_ok=True)
    shutil.rmtree(folder / "starting")  # a killed schedd left this folder while starting a job: nothing runs there yet
    schedd = Schedd(folder)
    while True:
        schedd.look()
        time.sleep(_POLL_S)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
