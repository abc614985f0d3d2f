"""When this pilot's job ends, as its batch system says, and when the pilot therefore begins to leave.

    Slurm         SLURM_JOB_END_TIME where it is set (22.05 does not), else `squeue -h -j JOB -o %e`; a task of an array
                  is asked for as JOB_TASK
    HTCondor      the job's own ad: AllowedExecuteDuration and AllowedJobDuration (HTCondor enforces them itself, since
                  9.4), StokerWalltime (what our submit descriptions enforce by periodic_remove)
    LSF           `bjobs -noheader -o time_left JOB`
    others        what the site file says, counted from when the pilot was started (`--walltime-s`); PBS_WALLTIME

The answer is kept on the monotonic clock, so a clock of the system that jumps afterwards moves nothing. A command is
run once, in a thread of its own, for at most ten seconds: the pilot does not wait for it, and tells the manager when
the answer is another than what its hello said.

The manager drains a pilot long before; a pilot that it has not told (it may be away) drains by itself: it gives back
what has not begun, lets what runs finish, and ends clean before the batch system's signal.
"""

from __future__ import annotations

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

from stoker.manager.protocol.to_manager import WalltimeNews
from stoker.pilot.agent import orders
from stoker.pilot.agent.agent import Agent
from stoker.units import show_seconds

log = logging.getLogger("stoker.pilot")

NO_END = math.inf
MARGIN_S = 12.0
"""When a pilot begins to leave by itself; of a short walltime a fifth."""
_EXIT = 0.25
"""What ending takes, of that: calls that still run are then given up."""
_COMMAND_LIMIT_S = 10.0
_SAME_S = 2.0


def start(agent: Agent, environ: Mapping[str, str] = os.environ) -> None:
    """Note when the job ends, and ask the batch system where its variables do not say."""
    left_s = said(environ, now=time.time())
    if left_s == NO_END:
        _note(agent, agent.options.walltime_s or _number(environ.get("PBS_WALLTIME", "")) or NO_END)
        threading.Thread(target=_ask_later, args=(agent, environ), name="walltime", daemon=True).start()
    else:
        _note(agent, left_s)


def look(agent: Agent, now: float) -> None:
    """Begin to leave when it is time. To be called now and then, with the monotonic clock."""
    if now < agent.drain_at:
        return
    within_s = (1 - _EXIT) * (agent.ends_at - agent.drain_at) - (now - agent.drain_at)
    agent.drain_at = NO_END
    left_s = agent.ends_at - now
    orders.drain_all(agent, f"its walltime is over in {show_seconds(max(0.0, left_s))}", within_s=within_s)


def said(environ: Mapping[str, str], *, now: float) -> float:
    """Seconds until the job ends, as far as its variables and its ad say; NO_END where they do not.

    `now` is the system's clock, in seconds since 1970.
    """
    slurm = _number(environ.get("SLURM_JOB_END_TIME", ""))
    if slurm:
        return max(0.0, slurm - now)
    ad = environ.get("_CONDOR_JOB_AD", "")
    return _condor(ad, now) if ad else NO_END


def ask(environ: Mapping[str, str]) -> float:
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
    left_s, asked_at = ask(environ), time.monotonic()
    if left_s != NO_END:
        agent.later(lambda: _correct(agent, asked_at + left_s))


def _correct(agent: Agent, ends_at: float) -> None:
    if abs(agent.ends_at - ends_at) > _SAME_S:
        left_s = ends_at - time.monotonic()
        _note(agent, left_s)
        agent.link.post(WalltimeNews(max(0.001, left_s)))


def _note(agent: Agent, left_s: float) -> None:
    if left_s == NO_END:
        return
    agent.ends_at = time.monotonic() + left_s
    agent.drain_at = agent.ends_at - min(MARGIN_S, 0.2 * left_s)
    log.info("the walltime is over in %s", show_seconds(left_s))


def _condor(file: str, now: float) -> float:
    """Seconds until the job ends by its ad. The ad has the start on the clock of another machine, and HTCondor does not
    need clocks that agree (Slurm does: munge). A start in the future counts as now. A job whose time is over by its ad
    and that runs all the same has its time from when this machine wrote the ad."""
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
    """Seconds until a local time as Slurm writes it (`2026-11-21T15:04:05`); NO_END for `N/A` and the like."""
    try:
        return max(0.0, datetime.fromisoformat(text.strip()).timestamp() - time.time())
    except ValueError:
        return NO_END


def _hours_and_minutes(text: str) -> float:
    """LSF's `time_left`: `0:45 L`, hours and minutes, and how it was found out; `-` where there is no limit."""
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
