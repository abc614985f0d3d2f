"""What differs for an executor when TaskVine carries its calls (`engine = "taskvine"`).

Little does: the pool is one pilot of the session, on this machine, that has TaskVine's manager, factory and workers
behind it (`stoker.pilot.taskvine`). So there is one local block, what it is to tell TaskVine lies in the session
folder, and what TaskVine cannot do is refused before anything is sent.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from parsl.providers import LocalProvider
from parsl.providers.base import ExecutionProvider

from stoker.errors import ConfigError
from stoker.manager.executor.wants import Wants
from stoker.manager.factory.pilot_command import python_path
from stoker.manager.live import interfaces
from stoker.manager.protocol.session import SessionFolder
from stoker.manager.taskvine import planning, refusals
from stoker.pilot.taskvine import finding, plan
from stoker.site import Engine, ProviderKind, Site


def check(sites: Iterable[Site], *, provider: ExecutionProvider | None) -> None:
    """Raise ConfigError if TaskVine is wanted and is not here, or cannot do what a site says."""
    sites = tuple(sites)
    for site in sites:
        if site.engine is Engine.TASKVINE:
            if len(sites) > 1:
                others = ", ".join(other.name for other in sites if other is not site)
                raise ConfigError(
                    f'site {site.name}: a session with engine = "taskvine" has one site; take {others} out of sites',
                    key="sites",
                )
            if provider is not None:
                raise ConfigError(
                    f'site {site.name}: with engine = "taskvine" its factory starts the workers; leave provider= out, '
                    "and say in the site file where they run",
                    key="provider",
                )
            refusals.refuse_site(site)
            finding.find()


def check_wants(site: Site, wants: Wants) -> None:
    """Raise ConfigError if calls that want this cannot be honoured on this site."""
    if site.engine is Engine.TASKVINE:
        refusals.refuse_call(wants.recipe, wants.options, variants=wants.variants, deadline_s=wants.deadline_s)


def local_provider(site: Site) -> LocalProvider:
    """Parsl's provider for pilots that are processes of this machine."""
    pilot = site.pilot
    if site.engine is Engine.TASKVINE:
        return LocalProvider(init_blocks=1, min_blocks=1, max_blocks=1)
    return LocalProvider(
        init_blocks=pilot.init_blocks,
        min_blocks=max(pilot.min_blocks, min(1, pilot.init_blocks)),
        max_blocks=pilot.max_blocks,
    )


def prepare(folder: SessionFolder, sites: Iterable[Site]) -> None:
    """Put into a new session's folder what its pilots need to know beyond their command line. Raises ConfigError."""
    for site in sites:
        if site.engine is Engine.TASKVINE:
            elsewhere = site.provider.kind is not ProviderKind.LOCAL
            host = interfaces.resolve(site.session.interface or interfaces.AUTO) if elsewhere else ""
            made = planning.plan_of(site, host=host, python=sys.executable, search_path=python_path())
            plan.write(made, folder, site=site.name)
