"""Make a TaskVine plan from a site file: the settings of TaskVine's manager, factory and workers."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence

from stoker.manager.factory import condor_description as description
from stoker.manager.factory.batch import job_name
from stoker.manager.factory.pilot_command import rounded_walltime_s
from stoker.pilot.taskvine.engine import NEVER_IDLE_S, VinePlan
from stoker.site import ProviderKind, Site

_WALLTIME_MARGIN_S = 30
"""A worker exits this many seconds before its job ends."""
WORKER_NAME = "worker"
"""The name of all worker jobs, in the place of a block name."""


def make_vine_plan(
    site: Site, *, session: str = "", kept: bool = False, python: str = "", search_path: str = ""
) -> VinePlan:
    """Return a site's TaskVine plan. `session`: id in names or attributes of worker jobs. `kept`: True if the session
    outlives programs.
    """
    provider, pilot = site.provider, site.pilot
    is_local = provider.kind is ProviderKind.LOCAL
    least = max(1, pilot.min_blocks, pilot.init_blocks)
    idle_s = site.policy.idle_release_s(outlives_programs=kept)
    return VinePlan(
        batch=provider.kind.value,
        ports=site.session.port_range,
        devices=pilot.devices,
        gpus=provider.gpu_count,
        cores=_worker_cores(site),
        memory_mb=int(provider.memory_bytes) // 2**20,
        disk_mb=int(pilot.cache_bytes) // 2**20,
        least_workers=least,
        most_workers=pilot.max_blocks,
        batch_options=_format_batch_options(site, session=session),
        requirements=provider.requirements,
        worker_init=provider.worker_init,
        scratch=pilot.scratch,
        python=site.environment.python or python,
        search_path=search_path,
        idle_s=NEVER_IDLE_S if is_local or least == pilot.max_blocks else max(1, int(idle_s)),
        walltime_s=0 if is_local else max(60, int(provider.walltime_s) - _WALLTIME_MARGIN_S),
        heartbeat_s=max(1, round(site.session.heartbeat_s)),
        silence_s=max(3, round(3 * site.session.heartbeat_s)),
    )


def _worker_cores(site: Site) -> int:
    """Return the number of cores of a worker; 0 for all cores."""
    _, _, count = site.pilot.devices.partition(":")
    wanted = int(count or 0)
    if site.provider.kind is ProviderKind.LOCAL and wanted:
        return max(wanted, len(os.sched_getaffinity(0)))
    return max(wanted, site.provider.cores)


def _format_batch_options(site: Site, *, session: str) -> str:
    provider = site.provider
    if provider.kind is ProviderKind.SLURM:
        given: Sequence[tuple[str, str]] = (
            ("partition", provider.partition),
            ("account", provider.account),
            ("qos", provider.qos),
            ("constraint", provider.constraint),
            ("time", str(rounded_walltime_s(site) // 60)),
            ("gres", f"gpu:{provider.gpus}" if provider.gpus else ""),
        )
        marks = [f"--job-name={job_name(session, WORKER_NAME)}"] if session else []
        words = [f"--{name}={shlex.quote(value)}" for name, value in given if value]
        return " ".join([*words, *provider.options, *marks])
    if provider.kind is ProviderKind.CONDOR:
        lines = [f"+MaxWallTime = {rounded_walltime_s(site) // 60}"]
        if provider.account:
            lines.append(f"accounting_group = {provider.account}")
        if provider.gpu_type:
            lines.append(f"require_gpus = {description.gpu_type_expression(provider.gpu_type)}")
        known_by = (description.SESSION, session), (description.SOURCE, site.name), (description.BLOCK, WORKER_NAME)
        marks = [f"+{name} = {description.quote(value)}" for name, value in known_by] if session else []
        return "\n".join([*lines, *provider.options, *marks])
    return ""
