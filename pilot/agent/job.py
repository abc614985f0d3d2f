"""The pilot's batch job: when it ends, and whether the pilot still has what the job gave it.

    Slurm         SLURM_JOB_END_TIME (not set by 22.05), else `squeue -h -j JOB -o %e`
    HTCondor      the job's ad: AllowedExecuteDuration, AllowedJobDuration, StokerWalltime (from our submit description)
    LSF           `bjobs -noheader -o time_left JOB`
    others        `--walltime-s` from the site file, counted from the pilot's start; PBS_WALLTIME

The answer is kept on the monotonic clock. A command runs once, in a thread, for at most 10 s.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import re
import subprocess
import threading
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from stoker.pilot.agent.agent import Agent
from stoker.pilot.core.events import Unfit, WalltimeKnown
from stoker.protocol.blocks import LossReason

# ---- walltime

log = logging.getLogger("stoker.pilot")

NO_END = math.inf
_COMMAND_LIMIT_S = 10.0


def start_walltime(agent: Agent, environ: Mapping[str, str] = os.environ) -> None:
    """Tell when the job ends, and ask the batch system where its variables do not say."""
    left_s = walltime_in_variables(environ, now=time.time())
    if left_s != NO_END:
        agent.handle(WalltimeKnown(left_s))
        return
    given_s = agent.options.walltime_s or _number(environ.get("PBS_WALLTIME", ""))
    if given_s:
        agent.handle(WalltimeKnown(given_s))
    threading.Thread(target=_ask_later, args=(agent, environ), name="walltime", daemon=True).start()


def walltime_in_variables(environ: Mapping[str, str], *, now: float) -> float:
    """Seconds until the job ends, as far as its variables and its ad say; NO_END where they do not."""
    slurm = _number(environ.get("SLURM_JOB_END_TIME", ""))
    if slurm:
        return max(0.0, slurm - now)
    ad = environ.get("_CONDOR_JOB_AD", "")
    return _condor(ad, now) if ad else NO_END


def ask_batch_system(environ: Mapping[str, str]) -> float:
    """The same, asked of the batch system by its command. Takes up to ten seconds; NO_END when it does not say."""
    job = environ.get("SLURM_JOB_ID", "")
    if job:
        if task := environ.get("SLURM_ARRAY_TASK_ID", ""):  # one of the ids is that of the whole array, too
            job = f"{environ.get('SLURM_ARRAY_JOB_ID', job)}_{task}"
        return _until(_run(["squeue", "-h", "-j", job, "-o", "%e"]).partition("\n")[0])
    job = environ.get("LSB_JOBID", "")
    if job:
        return _hours_and_minutes(_run(["bjobs", "-noheader", "-o", "time_left", job]))
    return NO_END


def _ask_later(agent: Agent, environ: Mapping[str, str]) -> None:
    left_s, asked_at = ask_batch_system(environ), time.monotonic()
    if left_s != NO_END:
        agent.later(lambda: agent.handle(WalltimeKnown(asked_at + left_s - time.monotonic())))


def _condor(file: str, now: float) -> float:
    """Seconds until the job ends by its ad."""
    try:
        text = Path(file).read_text(encoding="utf-8", errors="replace")
        written = os.stat(file).st_mtime
    except OSError as error:
        log.warning("the job's ad can't be read: %s", error)
        return NO_END
    ad = {name.lower(): _number(value) for name, value in re.findall(r"^(\w+) = ([0-9.]+)$", text, re.MULTILINE)}
    limits = [ad.get(name) for name in ("allowedexecuteduration", "allowedjobduration", "stokerwalltime")]
    limit_s = min(filter(None, limits), default=NO_END)
    passed_s = max(0.0, now - (ad.get("jobcurrentstartdate") or now))
    if passed_s >= limit_s:
        passed_s = max(0.0, now - written)
    return max(0.0, limit_s - passed_s)


def _until(text: str) -> float:
    try:
        return max(0.0, datetime.fromisoformat(text.strip()).timestamp() - time.time())
    except ValueError:
        return NO_END


def _hours_and_minutes(text: str) -> float:
    found = re.match(r"\s*(\d+):(\d+)", text)
    return 3600.0 * int(found[1]) + 60.0 * int(found[2]) if found else NO_END


def _run(command: list[str]) -> str:
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=_COMMAND_LIMIT_S, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("%s: %s; the walltime is taken from the site file", command[0], error)
        return ""
    if ran.returncode:
        log.warning("%s: %s; the walltime is taken from the site file", command[0], ran.stderr.strip())
        return ""
    return ran.stdout.strip()


def _number(text: str) -> float:
    try:
        return max(0.0, float(text))
    except ValueError:
        return 0.0


# ---- what the job gave

_NO_FOLDER = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.EIO, errno.ENODEV, errno.ENXIO, errno.EACCES, errno.EPERM}
)


def check_job(agent: Agent) -> bool:
    """Tell the core if the pilot lacks something; whether it does."""
    agent.oom_kills.note_kills()
    if why := agent.scratch.fault():
        agent.handle(Unfit(why, LossReason.SCRATCH_GONE))
    elif why := agent.parent.fault():
        agent.handle(Unfit(why, LossReason.NODE_LOST))
    return bool(why)


def cannot_make_folders(agent: Agent, error: OSError) -> bool:
    """Tell the core if an error of making a folder says that no folder can be made here; whether it does."""
    if check_job(agent):
        return True
    if error.errno in _NO_FOLDER:
        agent.handle(Unfit(f"it can make no folder: {error}", LossReason.SCRATCH_GONE))
        return True
    return False
