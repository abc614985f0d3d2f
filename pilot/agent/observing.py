"""Measures libraries, devices and memory, probes devices, and finds the walltime of the job.

    Slurm         SLURM_JOB_END_TIME (not set by 22.05), else `squeue -h -j JOB -o %e`
    HTCondor      the job's ad: AllowedExecuteDuration, AllowedJobDuration, StokerWalltime (from our submit description)
    LSF           `bjobs -noheader -o time_left JOB`
    others        `--walltime-s` from the site file, counted from the start of the pilot; PBS_WALLTIME

A command of the batch system runs once, in a thread, for at most 10 s. A probe of a device is a separate process,
because a driver may hang or crash.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from pathlib import Path

from stoker.log_files import read_last_lines
from stoker.pilot.agent.agent import Agent, PilotOptions
from stoker.pilot.agent.process import LibraryProcess
from stoker.pilot.core import events, limits, probes
from stoker.pilot.core.events import ResourceLost
from stoker.pilot.core.presence import SLOW_LOAD_S
from stoker.pilot.core.state import Stage
from stoker.pilot.devices import PilotDevice, visibility_variables
from stoker.pilot.devices import monitor as devices_monitor
from stoker.pilot.devices.monitor import GpuMemoryReading
from stoker.pilot.devices.probe import run_probe
from stoker.pilot.zygote.processes import cpu_seconds, process_tree, resident_bytes
from stoker.protocol.blocks import LossReason
from stoker.protocol.ids import DeviceId, LibraryId

# ---- walltime

log = logging.getLogger("stoker.pilot")

UNKNOWN_END = math.inf
_COMMAND_LIMIT_S = 10.0


def report_remaining_walltime(agent: Agent) -> None:
    def ask() -> None:
        left_s, asked_at = query_seconds_until_job_end(os.environ), time.monotonic()
        if left_s != UNKNOWN_END:
            agent.run_in_loop(lambda: agent.handle_event(events.WalltimeKnown(asked_at + left_s - time.monotonic())))

    left_s = read_seconds_until_job_end(os.environ, now=time.time())
    given_s = agent.options.walltime_s or _parse_number(os.environ.get("PBS_WALLTIME", ""))
    if left_s != UNKNOWN_END:
        agent.handle_event(events.WalltimeKnown(left_s))
        return
    if given_s:
        agent.handle_event(events.WalltimeKnown(given_s))
    threading.Thread(target=ask, name="walltime", daemon=True).start()


def read_seconds_until_job_end(environ: Mapping[str, str], *, now: float) -> float:
    """Return the seconds until the job ends, from environment variables or HTCondor's job ad; infinite if unknown."""
    slurm = _parse_number(environ.get("SLURM_JOB_END_TIME", ""))
    if slurm:
        return max(0.0, slurm - now)
    ad = environ.get("_CONDOR_JOB_AD", "")
    return _seconds_until_condor_limit(ad, now) if ad else UNKNOWN_END


def batch_system_node_name(environ: Mapping[str, str]) -> str:
    """Return the node's name in Slurm or HTCondor, which may differ from the host name; empty if unknown."""
    if node := environ.get("SLURMD_NODENAME", ""):
        return node
    try:
        text = Path(environ["_CONDOR_MACHINE_AD"]).read_text(encoding="utf-8", errors="replace")
    except (KeyError, OSError):
        return ""
    found = re.search(r'^Machine = "([^"]*)"', text, re.MULTILINE | re.IGNORECASE)
    return found[1] if found else ""


def query_seconds_until_job_end(environ: Mapping[str, str]) -> float:
    if job := environ.get("SLURM_JOB_ID", ""):
        if task := environ.get("SLURM_ARRAY_TASK_ID", ""):  # SLURM_JOB_ID of one task may be the id of the whole array
            job = f"{environ.get('SLURM_ARRAY_JOB_ID', job)}_{task}"
        end = _run_batch_command(["squeue", "-h", "-j", job, "-o", "%e"]).partition("\n")[0].strip()
        try:
            return max(0.0, datetime.fromisoformat(end).timestamp() - time.time())
        except ValueError:
            return UNKNOWN_END
    if job := environ.get("LSB_JOBID", ""):
        # `bjobs` prints the time left in hours and minutes.
        found = re.match(r"\s*(\d+):(\d+)", _run_batch_command(["bjobs", "-noheader", "-o", "time_left", job]))
        return 3600.0 * int(found[1]) + 60.0 * int(found[2]) if found else UNKNOWN_END
    return UNKNOWN_END


def _seconds_until_condor_limit(file: str, now: float) -> float:
    try:
        text = Path(file).read_text(encoding="utf-8", errors="replace")
        written = os.stat(file).st_mtime
    except OSError as error:
        log.warning("HTCondor's job ad cannot be read: %s", error)
        return UNKNOWN_END
    ad = {name.lower(): _parse_number(value) for name, value in re.findall(r"^(\w+) = ([0-9.]+)$", text, re.MULTILINE)}
    limits = [ad.get(name) for name in ("allowedexecuteduration", "allowedjobduration", "stokerwalltime")]
    limit_s = min(filter(None, limits), default=UNKNOWN_END)
    passed_s = max(0.0, now - (ad.get("jobcurrentstartdate") or now))
    if passed_s >= limit_s:
        passed_s = max(0.0, now - written)
    return max(0.0, limit_s - passed_s)


def _run_batch_command(command: list[str]) -> str:
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=_COMMAND_LIMIT_S, check=False
        )
        why: object = ran.stderr.strip() if ran.returncode else ""
        if not ran.returncode:
            return ran.stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        why = error
    log.warning("%s: %s; using the walltime of the site file", command[0], why)
    return ""


def _parse_number(text: str) -> float:
    try:
        return max(0.0, float(text))
    except ValueError:
        return 0.0


# ---- resources of the job

_MISSING_FOLDER_ERRNOS = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.EIO, errno.ENODEV, errno.ENXIO, errno.EACCES, errno.EPERM}
)


def report_lost_resources(agent: Agent) -> bool:
    """Tell the core if the scratch folder or the batch job is gone. Return True in this case."""
    agent.oom_kills.check_for_kills()
    if why := agent.scratch.describe_fault():
        agent.handle_event(ResourceLost(why, LossReason.SCRATCH_GONE))
    elif why := agent.parent.describe_fault():
        agent.handle_event(ResourceLost(why, LossReason.NODE_LOST))
    return bool(why)


def report_if_cannot_create_folders(agent: Agent, error: OSError) -> None:
    if not report_lost_resources(agent) and error.errno in _MISSING_FOLDER_ERRNOS:
        agent.handle_event(ResourceLost(f"it cannot create a folder: {error}", LossReason.SCRATCH_GONE))


# ---- measurements

_LOG_TAIL_BYTES = 4096
_MAX_LINE_LENGTH = 160
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def report_observations(agent: Agent, processes: Iterable[LibraryProcess]) -> None:
    if seen := [_observe_library(agent, process) for process in processes]:
        agent.handle_event(events.LibrariesObserved(seen))


def _observe_library(agent: Agent, process: LibraryProcess) -> events.Observation:
    library = agent.state.libraries.get(process.library)
    if library is None:
        return events.Observation(process.library)
    watched = library.held_calls or library.has_limits or library.stopping_calls or library.stuck_calls
    limit = limits.memory_limit(agent.state, library) if process.pid and not library.must_end else 0
    over_bytes = process.memory.bytes_if_over_limit(process.pid, limit, now=time.monotonic()) if limit else 0
    return events.Observation(process.library, process.running_calls() if watched else (), over_bytes)


def report_usage(agent: Agent) -> None:
    now, state = time.monotonic(), agent.state
    alive = [process for process in agent.processes.values() if process.pid]
    lines = {}
    for process in alive:
        library = state.libraries.get(process.library)
        if library is not None and library.stage is Stage.LOADING and now - library.started_at >= SLOW_LOAD_S:
            lines[process.library] = last_log_line(process.log)
    agent.handle_event(
        events.UsageMeasured(
            resident_bytes={process.library: resident_bytes(process.pid) for process in alive},
            cpu_s={process.library: cpu_seconds(process.pid) for process in alive},
            cache_bytes=sum(agent.cache.object_sizes().values()),
            refused_frames=agent.link.refused_frames,
            lines=lines,
        )
    )


def last_log_line(log: str) -> str:
    """Return the last line of a log that contains text, without terminal escape codes."""
    text = _ESCAPES.sub("", read_last_lines(log, most_bytes=_LOG_TAIL_BYTES))
    for line in reversed(re.split(r"[\r\n]+", text)):
        shown = " ".join("".join(each for each in line if each.isprintable()).split())
        if shown:
            return shown if len(shown) <= _MAX_LINE_LENGTH else shown[: _MAX_LINE_LENGTH - 1] + "…"
    return ""


def report_device_memory_use(agent: Agent) -> None:
    used: dict[LibraryId, dict[DeviceId, int]] = {}
    taken: dict[DeviceId, int] = {}
    at: dict[DeviceId, float] = {}
    for device in agent.devices.values():
        monitor = agent.monitors.get(device.uuid)
        reading = monitor.reading if monitor is not None else None
        if reading is None:
            continue
        name = device.facts.device
        taken[name], at[name] = reading.taken_bytes, reading.at
        for number, size in _device_bytes_by_library(agent, device, reading).items():
            used.setdefault(number, {})[name] = size
    if taken:
        agent.handle_event(events.DevicesMeasured(used, taken, at))


def _device_bytes_by_library(agent: Agent, device: PilotDevice, reading: GpuMemoryReading) -> dict[LibraryId, int]:
    name = device.facts.device
    here = [number for number, library in agent.state.libraries.items() if name in library.devices]
    if not here and reading.taken_bytes >= 0:
        agent.bare_bytes[name] = reading.taken_bytes
    pids = {number: agent.processes[number].pid for number in here if number in agent.processes}
    processes = {number: frozenset(process_tree(pid)) for number, pid in pids.items() if pid}
    found = devices_monitor.divide_gpu_memory_by_library(
        reading.by_process, processes, used_bytes=reading.taken_bytes if len(processes) == len(here) else -1,
        empty_gpu_bytes=agent.bare_bytes.get(name, -1), are_pids_reliable=agent.sees_all_processes,
    )  # fmt: skip
    return {LibraryId(number): size for number, size in found.items() if size}


# ---- probes

_TICK_S = 0.02
_FIRST_PROBES_S = 15.0
PROBES_DISABLED = "never"
_OWN_PROBE_ARGUMENTS = ("-P", "-m", "stoker.pilot.devices.probe")


def probe_command(options: PilotOptions) -> tuple[str, ...]:
    """Return the command that probes a device; empty if probes are disabled."""
    return (
        ()
        if options.probe == PROBES_DISABLED
        else tuple(shlex.split(options.probe)) or (sys.executable, *_OWN_PROBE_ARGUMENTS)
    )


def devices_to_probe(options: PilotOptions, devices: Iterable[PilotDevice]) -> frozenset[DeviceId]:
    if not probe_command(options):
        return frozenset()
    return frozenset(
        device.facts.device for device in devices if (options.probe or device.uuid) and not device.facts.fault
    )


def probe_command_for_library(options: PilotOptions, devices: Iterable[PilotDevice]) -> tuple[str, ...]:
    """Return the command with which a library may probe its devices; empty if it may not probe them."""
    devices = tuple(devices)
    may = len(devices_to_probe(options, devices)) == len(devices) and all(x.facts.processes != 1 for x in devices)
    return probe_command(options) if may else ()


def begin_probe(agent: Agent, name: DeviceId) -> None:

    def probe() -> None:
        answer, said = run_probe(probe_command(agent.options), name, visibility_variables((agent.devices[name],)))
        agent.run_in_loop(lambda: agent.handle_event(events.DeviceProbed(name, answer, said)))

    threading.Thread(target=probe, name=f"probe-{name}", daemon=True).start()


def wait_for_probes(agent: Agent, *, interrupted: Callable[[], bool]) -> None:
    """Wait at most 15 s until every device has been probed, so that no context loads on a faulty device."""
    until = time.monotonic() + _FIRST_PROBES_S
    while not probes.is_every_device_examined(agent.state):
        if time.monotonic() > until or interrupted():
            return
        report_driver_health(agent)
        agent.handle_event(events.Tick())
        time.sleep(_TICK_S)
        agent.run_queued_actions()


def report_driver_health(agent: Agent) -> None:
    now = time.monotonic()
    for device in agent.devices.values():
        monitor = agent.monitors.get(device.uuid)
        if monitor is not None:
            agent.handle_event(
                events.DriverReported(device.facts.device, monitor.take_fault(), monitor.describe_hang(now))
            )
