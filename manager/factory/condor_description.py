"""HTCondor's submit description of a block, as pure text. Reasons for the settings:

- `should_transfer_files = IF_NEEDED`: also allows machines with another FileSystemDomain.
- `transfer_output_files = ""`: by default HTCondor returns every new file, including the object cache.
- Output is not streamed: after an outage of the access point, HTCondor does not reconnect to jobs that stream.
- HTCondor has no walltime. Many sites read `+MaxWallTime` (minutes); `periodic_remove` works everywhere.
- `periodic_remove` also removes held jobs if no factory runs, unless their owner holds them or they wait for files.
- `job_lease_duration`: how long a job on a silent machine counts as running; 40 minutes by default.
- `request_memory`: HTCondor's default is the size of the script, rounded up to 128 MB.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from stoker.manager.factory.batch import SubmissionRefused, job_name
from stoker.manager.factory.pilot_command import walltime_s
from stoker.site import Site

SESSION, SOURCE, BLOCK, WALLTIME = "StokerSession", "StokerSource", "StokerBlock", "StokerWalltime"
BY_OWNER, SPOOLING = 1, 16
"""HoldReasonCode of a job that its owner holds, and of a job that waits for input files."""

_MEMORY_MB_A_CORE = 2048
_HELD_S = 1800
_LEASE_S = 300
_VACATE_S = 30


def describe(site: Site, *, session: str, block: str, files: Sequence[str] = ()) -> str:
    """Return the submit description of a block. `files` are transferred with the job. Raises SubmissionRefused."""
    name = job_name(session, block)
    lines = [
        "universe = vanilla",
        f"batch_name = stoker-{session}",
        f"executable = {name}.sh",
        f"output = {name}.out",
        f"error = {name}.err",
        f"log = {name}.log",
        "notification = never",
        *_file_transfer_lines(files, shared=site.provider.shared_files),
        *_requests(site),
        *_ends(walltime_s(site), site.provider.options),
        *_options(site.provider.options),
        f"+{SESSION} = {quoted(session)}",
        f"+{SOURCE} = {quoted(site.name)}",
        f"+{BLOCK} = {quoted(block)}",
        f"+{WALLTIME} = {walltime_s(site)}",
        "queue 1",
    ]
    return "\n".join(lines) + "\n"


def script(site: Site, *, command: str) -> str:
    """Return a job's script. HTCondor does not set PATH and HOME."""
    init = ["[ -r /etc/profile ] && . /etc/profile", site.provider.worker_init] if site.provider.worker_init else []
    home = '[ -w "$HOME" ] || HOME=${_CONDOR_SCRATCH_DIR:-$PWD}'
    return "\n".join(["#!/bin/bash", "export PATH HOME", home, *init, f"exec {command}"]) + "\n"


def render(site: Site, *, session: str, block: str, command: str, files: Sequence[str] = ()) -> str:
    """Return description and script as one text. Raises SubmissionRefused."""
    name = job_name(session, block)
    description = describe(site, session=session, block=block, files=files)
    program = script(site, command=command)
    return f"# {name}.sub, for condor_submit\n{description}\n# {name}.sh, which it names\n{program}"


def of_session(session: str) -> str:
    return f"{SESSION} == {quoted(session)}"


def quoted(text: str) -> str:
    return '"' + text.replace('"', '\\"') + '"'


def gpu_expression(kind: str) -> str:
    """Return a ClassAd expression that matches a GPU type in a device's name. `a10` matches neither A100 nor A10G. The
    expression has no backslash, because submit descriptions and new ClassAds treat backslashes differently.
    """
    words = [word for word in re.split(r"[-_.]+", kind) if word]
    pattern = f"(^|[^a-z0-9]){'[-_. ]*'.join(words)}([^a-z0-9]|$)"
    return f"regexp({quoted(pattern)}, DeviceName, {quoted('i')})"


def _file_transfer_lines(files: Sequence[str], *, shared: bool) -> list[str]:
    for name in files:
        if re.search(r"[,\n]|^\s|\s$", name):
            why = "its name has a comma, a line break, or a blank at an end; rename it"
            raise SubmissionRefused(f"HTCondor cannot transfer {name!r}: {why}")
    return [
        f"should_transfer_files = {'IF_NEEDED' if shared else 'YES'}",
        "when_to_transfer_output = ON_EXIT",
        *([f"transfer_input_files = {', '.join(files)}"] if files else []),
        'transfer_output_files = ""',
    ]


def _requests(site: Site) -> list[str]:
    provider, lines = site.provider, []
    if provider.cores:
        lines.append(f"request_cpus = {provider.cores}")
    memory_mb = math.ceil(provider.memory_bytes / 2**20) or _MEMORY_MB_A_CORE * max(1, provider.cores)
    lines.append(f"request_memory = {memory_mb}")
    if not site.pilot.scratch:
        lines.append(f"request_disk = {math.ceil(site.pilot.cache_bytes / 2**10)}")
    if provider.gpu_count:
        lines.append(f"request_gpus = {provider.gpu_count}")
    if provider.gpu_type:
        lines.append(f"require_gpus = {gpu_expression(provider.gpu_type)}")
    if provider.requirements.strip():
        lines.append(f"requirements = {' '.join(provider.requirements.split())}")
    if provider.account:
        lines.append(f"accounting_group = {provider.account}")
    return lines


def _ends(limit_s: int, options: Sequence[str]) -> list[str]:
    has_lease = any(re.match(r"\s*job_lease_duration\b", line, re.IGNORECASE) for line in options)
    started = "max({JobCurrentStartDate, JobCurrentStartExecutingDate ?: 0})"
    ran_out = f"(JobStatus == 2 && time() - {started} > {limit_s})"
    held = (
        f"(JobStatus == 5 && HoldReasonCode =!= {BY_OWNER} && HoldReasonCode =!= {SPOOLING} && "
        f"time() - EnteredCurrentStatus > {_HELD_S})"
    )
    return [
        f"+MaxWallTime = {limit_s // 60}",
        f"periodic_remove = {ran_out} || {held}",
        *([] if has_lease else [f"job_lease_duration = {_LEASE_S}"]),
        "want_graceful_removal = true",
        f"job_max_vacate_time = {_VACATE_S}",
    ]


def _options(options: Sequence[str]) -> list[str]:
    for line in options:
        if re.match(r"\s*queue\b(?!\s*=)", line, re.IGNORECASE):
            raise SubmissionRefused(f"[provider] options: {line!r}: Stoker submits one job per block; remove the line")
    return list(options)
