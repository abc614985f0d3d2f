"""Restrict a site's jobs to allowed nodes: Slurm's `--exclude` and `--nodelist`, HTCondor's `requirements`.

If a setting is given twice, the batch system uses only the last value. So the new setting also contains the nodes and
requirements of the site file.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

import msgspec

from stoker import site_options
from stoker.protocol.blocks import ANYWHERE, AllowedNodes
from stoker.site import Duration, Provider, ProviderKind, Site

log = logging.getLogger("stoker.factory")

PROBE_WALLTIME_S = 60.0
_REQUIREMENTS_LINE = re.compile(r"\s*requirements\s*=\s*(.*)", re.IGNORECASE)


def restrict_to_allowed_nodes(site: Site, allowed: AllowedNodes) -> Site:
    """Return the site with settings that restrict its jobs to the allowed nodes."""
    if allowed == ANYWHERE:
        return site
    provider = site.provider
    if allowed.only:
        provider = msgspec.structs.replace(provider, walltime_s=Duration(PROBE_WALLTIME_S), nodes=1)
    if provider.kind is ProviderKind.SLURM:
        provider = _restrict_slurm_jobs(provider, allowed)
    elif provider.kind is ProviderKind.CONDOR:
        provider = _restrict_condor_jobs(provider, allowed)
    return msgspec.structs.replace(site, provider=provider)


def _restrict_slurm_jobs(provider: Provider, allowed: AllowedNodes) -> Provider:
    # Slurm also reads options at the start of worker_init. Stoker's options must come last, so put those before them.
    moved, rest = site_options.split_worker_init(provider.kind.value, provider.worker_init)
    options = (*provider.options, *moved)
    if allowed.only:
        array = ("--array=0",) if provider.pilots_per_block > 1 else ()
        ours = (f"--nodelist={allowed.only}", "--time=1", "--nodes=1", *array)
    else:
        own = site_options.slurm_excluded_nodes(options)
        names = _read_excluded_nodes(own)
        if names is None:
            log.warning("--exclude=%s: the file cannot be read, so nodes that failed are not excluded", own)
            return provider
        ours = (f"--exclude={','.join(dict.fromkeys((*names, *allowed.exclude)))}",)
    return msgspec.structs.replace(provider, options=(*options, *ours), worker_init=rest)


def _read_excluded_nodes(value: str) -> list[str] | None:
    """Return the node names in an `--exclude` value. A value with a slash is the path of a file with the names.

    Return None if this file cannot be read.
    """
    if "/" not in value:
        return [value] if value else []
    try:
        return [name for name in re.split(r"[\s,]+(?![^\[]*\])", Path(value).read_text()) if name]
    except (OSError, ValueError):
        return None


def _restrict_condor_jobs(provider: Provider, allowed: AllowedNodes) -> Provider:
    given = [(line, _REQUIREMENTS_LINE.match(line)) for line in provider.options]
    own = next((found[1] for _, found in reversed(given) if found), provider.requirements).strip()
    clauses = [f"({own})"] if own else []
    if allowed.only:
        clauses.append(f'(TARGET.Machine == "{allowed.only}")')
    else:
        clauses += [f'(TARGET.Machine != "{node}")' for node in allowed.exclude]
    options = tuple(line for line, found in given if not found)
    return msgspec.structs.replace(provider, requirements=" && ".join(clauses), options=options)
