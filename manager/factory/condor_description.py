"""Render the submit description of a block for HTCondor. Reasons for the settings:

- `should_transfer_files = IF_NEEDED`: so that the job may also run on machines of another FileSystemDomain.
- `transfer_output_files = ""`: by default HTCondor copies every new file back, even the object cache.
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
from stoker.manager.factory.pilot_command import rounded_walltime_s
from stoker.site import Site

SESSION, SOURCE, BLOCK, WALLTIME = "StokerSession", "StokerSource", "StokerBlock", "StokerWalltime"
BY_OWNER, SPOOLING = 1, 16
"""`HoldReasonCode` of a job that its owner holds, and of a job that waits for its input files."""

_DEFAULT_MEMORY_MB_PER_CORE = 2048
_MAX_HELD_S = 1800
_JOB_LEASE_S = 300
_MAX_VACATE_S = 30


def render_description(site: Site, *, session: str, block: str, files: Sequence[str] = ()) -> str:
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
        *_resource_request_lines(site),
        *_removal_lines(rounded_walltime_s(site), site.provider.options),
        *_option_lines(site.provider.options),
        f"+{SESSION} = {quote(session)}",
        f"+{SOURCE} = {quote(site.name)}",
        f"+{BLOCK} = {quote(block)}",
        f"+{WALLTIME} = {rounded_walltime_s(site)}",
        "queue 1",
    ]
    return "\n".join(lines) + "\n"


def render_script(site: Site, *, command: str) -> str:
    """Return the script of a job. It sets HOME and exports PATH, because HTCondor sets neither."""
    init = ["[ -r /etc/profile ] && . /etc/profile", site.provider.worker_init] if site.provider.worker_init else []
    home = '[ -w "$HOME" ] || HOME=${_CONDOR_SCRATCH_DIR:-$PWD}'
    return "\n".join(["#!/bin/bash", "export PATH HOME", home, *init, f"exec {command}"]) + "\n"


def render_description_and_script(
    site: Site, *, session: str, block: str, command: str, files: Sequence[str] = ()
) -> str:
    """Return the submit description and the script in one text. Raises SubmissionRefused."""
    name = job_name(session, block)
    description = render_description(site, session=session, block=block, files=files)
    program = render_script(site, command=command)
    return f"# {name}.sub, for condor_submit\n{description}\n# {name}.sh, which it names\n{program}"


def session_constraint(session: str) -> str:
    return f"{SESSION} == {quote(session)}"


def quote(text: str) -> str:
    return '"' + text.replace('"', '\\"') + '"'


def gpu_type_expression(kind: str) -> str:
    """Return a ClassAd expression that matches a GPU type in a device's name. `a10` matches neither A100 nor A10G. The
    expression has no backslash, because submit descriptions and new ClassAds treat backslashes differently.
    """
    words = [word for word in re.split(r"[-_.]+", kind) if word]
    pattern = f"(^|[^a-z0-9]){'[-_. ]*'.join(words)}([^a-z0-9]|$)"
    return f"regexp({quote(pattern)}, DeviceName, {quote('i')})"


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


def _resource_request_lines(site: Site) -> list[str]:
    provider, lines = site.provider, []
    if provider.cores:
        lines.append(f"request_cpus = {provider.cores}")
    memory_mb = math.ceil(provider.memory_bytes / 2**20) or _DEFAULT_MEMORY_MB_PER_CORE * max(1, provider.cores)
    lines.append(f"request_memory = {memory_mb}")
    if not site.pilot.scratch:
        lines.append(f"request_disk = {math.ceil(site.pilot.cache_bytes / 2**10)}")
    if provider.gpu_count:
        lines.append(f"request_gpus = {provider.gpu_count}")
    if provider.gpu_type:
        lines.append(f"require_gpus = {gpu_type_expression(provider.gpu_type)}")
    if provider.requirements.strip():
        lines.append(f"requirements = {' '.join(provider.requirements.split())}")
    if provider.account:
        lines.append(f"accounting_group = {provider.account}")
    return lines


def _removal_lines(limit_s: int, options: Sequence[str]) -> list[str]:
    has_lease = any(re.match(r"\s*job_lease_duration\b", line, re.IGNORECASE) for line in options)
    started = "max({JobCurrentStartDate, JobCurrentStartExecutingDate ?: 0})"
    ran_out = f"(JobStatus == 2 && time() - {started} > {limit_s})"
    held = (
        f"(JobStatus == 5 && HoldReasonCode =!= {BY_OWNER} && HoldReasonCode =!= {SPOOLING} && "
        f"time() - EnteredCurrentStatus > {_MAX_HELD_S})"
    )
    return [
        f"+MaxWallTime = {limit_s // 60}",
        f"periodic_remove = {ran_out} || {held}",
        *([] if has_lease else [f"job_lease_duration = {_JOB_LEASE_S}"]),
        "want_graceful_removal = true",
        f"job_max_vacate_time = {_MAX_VACATE_S}",
    ]


def _option_lines(options: Sequence[str]) -> list[str]:
    for line in options:
        if re.match(r"\s*queue\b(?!\s*=)", line, re.IGNORECASE):
            raise SubmissionRefused(f"[provider] options: {line!r}: Stoker submits one job per block; remove the line")
    return list(options)
