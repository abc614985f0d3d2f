"""Connect the executor to the TaskVine engine. To a session, a TaskVine pool is one pilot on this machine."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from stoker.errors import ConfigError
from stoker.manager.core import seams
from stoker.manager.live import interfaces
from stoker.manager.taskvine import planning, refusals
from stoker.pilot.taskvine import engine, factory
from stoker.protocol.session import SessionFolder
from stoker.site import Engine, ProviderKind, Site

if TYPE_CHECKING:  # importing Parsl takes a second; the command line does not need Parsl
    from parsl.providers.base import ExecutionProvider

    from stoker.manager.executor.options import CallRequirements


def check_taskvine_sites(sites: Sequence[Site], *, provider: ExecutionProvider | None = None) -> None:
    refuse_invalid_taskvine_sites(sites, provider=provider)
    require_taskvine_programs(sites)


def require_taskvine_programs(sites: Iterable[Site]) -> None:
    if any(site.engine is Engine.TASKVINE for site in sites):
        factory.find_programs()


def refuse_invalid_taskvine_sites(sites: Sequence[Site], *, provider: ExecutionProvider | None = None) -> None:
    for site in sites:
        if site.engine is not Engine.TASKVINE:
            continue
        if len(sites) > 1:
            others = ", ".join(other.name for other in sites if other is not site)
            raise ConfigError(
                f'site {site.name}: a session with engine = "taskvine" has one site; remove {others} from sites',
                key="sites",
            )
        if provider is not None:
            raise ConfigError(
                f'site {site.name}: with engine = "taskvine", the TaskVine factory starts the workers; '
                "leave provider= out, and name their batch system in the site file",
                key="provider",
            )
        refusals.refuse_unsupported_site(site)


def refuse_unsupported_options(site: Site, requirements: CallRequirements, *, honours: frozenset[str] | None) -> None:
    """Raise ConfigError if the site cannot meet the requirements. `honours`: options that the policy uses, if known."""
    if honours is not None:
        name = site.policy.dispatch or site.policy.name
        refused = seams.describe_refused_options(
            requirements.options, honours, policy=name, deadline=requirements.deadline_s > 0,
            features=requirements.features, limits=requirements.recipe.limits,
        )  # fmt: skip
        if refused:
            raise ConfigError(refused)
    if site.engine is Engine.TASKVINE:
        refusals.refuse_unsupported_call(requirements.recipe, requirements.options, deadline_s=requirements.deadline_s)


def write_taskvine_plans(
    folder: SessionFolder, sites: Iterable[Site], *, session: str, python_path: str, kept: bool = False
) -> None:
    """Write the plan of each TaskVine site into a new session's folder. `kept`: the session outlives programs."""
    for site in sites:
        if site.engine is Engine.TASKVINE:
            made = planning.make_vine_plan(
                site, session=session, kept=kept, python=sys.executable, search_path=python_path
            )
            engine.write_plan(made, folder, site=site.name)


def taskvine_factory_command(site: Site, folder: SessionFolder, *, session: str) -> str:
    """Return the command that starts TaskVine's workers, for a dry run. Raises ConfigError."""
    elsewhere = site.provider.kind is not ProviderKind.LOCAL
    made = planning.make_vine_plan(site, session=session, kept=True)
    own = folder.pilot_folder("taskvine") / "taskvine"
    host = interfaces.resolve_interface(site.session.interface or interfaces.AUTO) if elsewhere else ""
    words = engine.factory_command(
        made, factory="vine_factory", worker="vine_worker", port=made.ports[0], host=host, folder=own / "factory",
        password=folder.path / "keys" / "taskvine", orders=own / "factory.json",
    )  # fmt: skip
    return shlex.join(words)
