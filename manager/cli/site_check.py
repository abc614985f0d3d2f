"""Checks of `stoker up` before it submits anything: does the cluster fit the site file?"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from stoker.errors import ConfigError
from stoker.manager.cli import slurm_facts
from stoker.manager.cli.slurm_facts import Partition, Slurm
from stoker.manager.cli.surroundings import COMMAND_LIMIT_S
from stoker.manager.factory.commands import CommandRunner
from stoker.site import ProviderKind, Site
from stoker.units import show_seconds

_CHOOSES = re.compile(r"(?:^|\s)(?:--(?:qos|partition|time)\b|-[qpt])")
"""An option of `sbatch` that changes a job's limit of time, or which one it is."""


class SiteFault(msgspec.Struct, frozen=True):
    """A setting that does not fit the cluster. `never`: a job with this setting never starts."""

    text: str
    never: bool = False


def refuse(sites: Iterable[Site]) -> list[str]:
    """Raise ConfigError for a site whose jobs Slurm would keep in its queue for good. Return what else does not fit."""
    asked = [site for site in sites if not site.is_local and site.provider.kind is ProviderKind.SLURM]
    if not asked:
        return []
    slurm = slurm_facts.ask(CommandRunner(limit_s=COMMAND_LIMIT_S, folder=Path(tempfile.gettempdir())).run)
    if slurm.trouble:
        return []
    found = [(site, fault) for site in asked for fault in slurm_faults(site, slurm)]
    for site, fault in found:
        if fault.never:
            raise ConfigError(f"site {site.name}: {fault.text}; its jobs would wait for good", key="walltime")
    return [f"site {site.name}: {fault.text}" for site, fault in found]


def slurm_faults(site: Site, slurm: Slurm) -> Iterator[SiteFault]:
    """Yield the settings of a site file that do not fit this Slurm cluster."""
    ask = site.provider
    known = {each.name: each for each in slurm.partitions}
    names = ask.partition.split(",") if ask.partition else [each.name for each in slurm.partitions if each.default]
    chosen = [known[name] for name in names if name in known]
    for name in names:
        if name not in known:
            yield SiteFault(f"[provider] partition {name} is not up; there are {', '.join(known)}")
    if ask.account and slurm.accounts and ask.account not in slurm.accounts:
        yield SiteFault(f"[provider] account {ask.account} is not yours; you have {', '.join(slurm.accounts)}")
    yield from _walltime_faults(site, chosen, all_known=len(chosen) == len(names))
    if ask.gpu_count and chosen and not any(_has_gpus(each, site) for each in chosen):
        there = ", ".join(dict.fromkeys(str(gpus) for each in chosen for gpus in each.gpus)) or "none"
        where = ", ".join(each.name for each in chosen)
        yield SiteFault(f'[provider] no node has gpus = "{ask.gpus}" in {where}; they have {there}')


def _walltime_faults(site: Site, chosen: list[Partition], *, all_known: bool) -> Iterator[SiteFault]:
    """Partitions with a shorter limit. A job never starts if all have one, unless its QOS lifts the limit or `options`
    choose other values."""
    short = [each for each in chosen if each.limit_s and site.provider.walltime_s > each.limit_s]
    is_open = site.provider.qos or any(map(_CHOOSES.search, site.provider.options))
    never = all_known and len(short) == len(chosen) and not is_open
    for each in short:
        most = show_seconds(each.limit_s)
        text = f"[provider] walltime {show_seconds(site.provider.walltime_s)} is more than partition {each.name} allows"
        yield SiteFault(f"{text}, {most}; set walltime to at most that", never)


def _has_gpus(partition: Partition, site: Site) -> bool:
    ask = site.provider
    return any(gpus.count >= ask.gpu_count and ask.gpu_type in ("", gpus.type) for gpus in partition.gpus)
