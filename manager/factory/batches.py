"""Which batch system a site means. Parsl, which takes a second to import, is imported for those that go through it."""

from __future__ import annotations

import os
import shutil
from typing import Any, assert_never

from stoker.errors import ConfigError
from stoker.manager.environment.carrying import carried_folder, starter_files
from stoker.manager.factory import block_keys, condor_description
from stoker.manager.factory.batch import Batch, SubmissionRefused, job_name
from stoker.manager.factory.condor import CondorBatch
from stoker.manager.factory.local import LocalBatch, started_by_shell
from stoker.manager.factory.pacing import Listing, Pacer
from stoker.manager.factory.pilot_command import pilot_command
from stoker.protocol.ids import BlockId
from stoker.protocol.session import SessionFolder
from stoker.site import Engine, ProviderKind, Site

SUBMIT_COMMANDS = {
    ProviderKind.SLURM: "sbatch",
    ProviderKind.CONDOR: "condor_submit",
    ProviderKind.PBS: "qsub",
    ProviderKind.LSF: "bsub",
    ProviderKind.GRID_ENGINE: "qsub",
}
"""What must be on the PATH of the host that the factory runs on."""


class SharedBudget:
    """What the sources of one batch system have in common: a budget of requests, and the last listing of all jobs."""

    def __init__(self, *, poll_s: float) -> None:
        self.pacer = Pacer(poll_s=poll_s)
        self.listing: Listing[Any] = Listing(fresh_s=self.pacer.listing_s)


def make_batch(
    site: Site, *, session: str, folder: SessionFolder, python_path: str = "", shared: SharedBudget | None = None
) -> Batch:
    """The batch system that starts a site's pilots. Raises SubmissionRefused if it is not on this host, ConfigError for
    settings that it cannot have."""
    _check(site)
    kind = _kind(site)
    submit = SUBMIT_COMMANDS.get(kind)
    if submit is not None and shutil.which(submit) is None:
        raise SubmissionRefused(
            f"site {site.name}: this host has no {submit} on its PATH; is [provider] kind = {kind.value!r} right?"
        )
    folder.submit.mkdir(mode=0o700, exist_ok=True)

    def command(block: BlockId) -> str:
        block_keys.issue(folder, block)
        starter_files(folder, site)  # what travels with the job says where the manager is now
        return pilot_command(site, folder=folder, block=block, python_path=python_path)

    pacer = shared.pacer if shared is not None else None
    listing = shared.listing if shared is not None else None
    match kind:
        case ProviderKind.SLURM:
            from stoker.manager.factory.slurm import SlurmBatch

            return SlurmBatch(
                site, session=session, folder=folder.submit, command=command, pacer=pacer, listing=listing
            )
        case ProviderKind.CONDOR:
            files = starter_files(folder, site)
            return CondorBatch(
                site,
                session=session,
                folder=folder.submit,
                command=command,
                files=files,
                key=None if site.provider.shared_files else folder.block_key_file,
                pacer=pacer,
                listing=listing,
            )
        case ProviderKind.LOCAL:
            init = local_init(site)
            return LocalBatch(session=session, folder=folder.submit, command=command, worker_init=init)
        case ProviderKind.KUBERNETES:
            from stoker.manager.factory.kubernetes import KubernetesBatch

            return KubernetesBatch(site, session=session, command=command)
        case ProviderKind.PBS | ProviderKind.LSF | ProviderKind.GRID_ENGINE:
            from stoker.manager.factory.listed import ListedBatch

            return ListedBatch(site, session=session, folder=folder.submit, command=command, pacer=pacer)
        case _:
            assert_never(kind)


def dry_run(site: Site, *, session: str, folder: SessionFolder, block: str = "b0", python_path: str = "") -> str:
    """What would be submitted for a block of this site, to the letter. Raises ConfigError, SubmissionRefused."""
    _check(site)
    command = pilot_command(site, folder=folder, block=block, python_path=python_path)
    match _kind(site):
        case ProviderKind.LOCAL:
            init = local_init(site)
            return f"{started_by_shell(init, command) if init else command}\n"
        case ProviderKind.KUBERNETES:
            return f"{command}\n"
        case ProviderKind.CONDOR:
            carried = () if site.provider.shared_files else (carried_folder(folder, site), folder.block_key_file(block))
            files = [os.path.relpath(file, folder.submit) for file in carried]
            return condor_description.render(site, session=session, block=block, command=command, files=files)
        case ProviderKind.SLURM | ProviderKind.PBS | ProviderKind.LSF | ProviderKind.GRID_ENGINE:
            from stoker.manager.factory.providers import render

            return render(site, job=job_name(session, block), command=command)
        case kind:
            assert_never(kind)


def local_init(site: Site) -> str:
    """Shell that runs before a pilot of this machine. TaskVine runs it before its workers, which are elsewhere."""
    return site.provider.worker_init if site.engine is Engine.STOKER else ""


def _kind(site: Site) -> ProviderKind:
    return ProviderKind.LOCAL if site.is_local else site.provider.kind


def _check(site: Site) -> None:
    kind = site.provider.kind
    if not site.provider.shared_files and kind not in (ProviderKind.CONDOR, ProviderKind.KUBERNETES):
        raise ConfigError(
            f"site {site.name}: with shared_files = false a job must bring files along, as condor's do; those of "
            f"{kind.value} need a session folder that their nodes see"
        )
