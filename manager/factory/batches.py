"""Open the batch system of a site. Modules that take long to import are imported only if needed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import assert_never

from stoker.errors import ConfigError
from stoker.manager.factory import condor_description
from stoker.manager.factory.batch import BatchSystem, SubmissionRefused, job_name
from stoker.manager.factory.condor import CondorBatch
from stoker.manager.factory.listed import ListingBatchSystem
from stoker.manager.factory.local import LocalBatch, shell_command_for_pilot
from stoker.manager.factory.pacing import RequestPacer
from stoker.manager.factory.pilot_command import build_pilot_command, issue_block_key
from stoker.manager.factory.slurm import SlurmBatch
from stoker.manager.factory.submitting import render_submit_script
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


def open_batch_system(
    site: Site, *, session: str, folder: SessionFolder, python_path: str = "", pacer: RequestPacer | None = None
) -> BatchSystem:
    """Open a site's batch system. Raises ConfigError; SubmissionRefused if commands are missing."""
    _refuse_missing_shared_files(site)
    kind = _provider_kind(site)
    submit = SUBMIT_COMMANDS.get(kind)
    if submit is not None and shutil.which(submit) is None:
        raise SubmissionRefused(
            f"site {site.name}: this host has no {submit} on its PATH; is [provider] kind = {kind.value!r} right?"
        )
    folder.submit.mkdir(mode=0o700, exist_ok=True)

    def command(block: BlockId) -> str:
        issue_block_key(folder, block)
        _pilot_files_to_copy(folder, site)
        return build_pilot_command(site, folder=folder, block=block, python_path=python_path)

    submits = folder.submit
    match kind:
        case ProviderKind.SLURM:
            return SlurmBatch(site, session=session, folder=submits, command=command, pacer=pacer)
        case ProviderKind.CONDOR:
            return CondorBatch(
                site,
                session=session,
                folder=submits,
                command=command,
                files=_pilot_files_to_copy(folder, site),
                key=None if site.provider.shared_files else folder.block_key_file,
                pacer=pacer,
            )
        case ProviderKind.LOCAL:
            return LocalBatch(session=session, folder=submits, command=command, worker_init=local_worker_init(site))
        case ProviderKind.KUBERNETES:
            from stoker.manager.factory.kubernetes import KubernetesBatch

            return KubernetesBatch(site, session=session, command=command)
        case ProviderKind.PBS | ProviderKind.LSF | ProviderKind.GRID_ENGINE:
            return ListingBatchSystem(site, session=session, folder=submits, command=command, pacer=pacer)
        case _:
            assert_never(kind)


def _pilot_files_to_copy(folder: SessionFolder, site: Site) -> list[Path]:
    if site.provider.shared_files:
        return []
    from stoker.manager.environment.carrying import refresh_pilot_files

    return refresh_pilot_files(folder, site)


def render_submission(
    site: Site, *, session: str, folder: SessionFolder, block: str = "b0", python_path: str = ""
) -> str:
    """Return the text that the factory would submit for a block. Raises ConfigError, SubmissionRefused."""
    _refuse_missing_shared_files(site)
    command = build_pilot_command(site, folder=folder, block=block, python_path=python_path)
    match _provider_kind(site):
        case ProviderKind.LOCAL:
            init = local_worker_init(site)
            return f"{shell_command_for_pilot(init, command) if init else command}\n"
        case ProviderKind.KUBERNETES:
            return f"{command}\n"
        case ProviderKind.CONDOR:
            carried: tuple[Path, ...] = ()
            if not site.provider.shared_files:
                from stoker.manager.environment.carrying import pilot_files_folder

                carried = (pilot_files_folder(folder, site), folder.block_key_file(block))
            files = [os.path.relpath(file, folder.submit) for file in carried]
            return condor_description.render_description_and_script(
                site, session=session, block=block, command=command, files=files
            )
        case ProviderKind.SLURM | ProviderKind.PBS | ProviderKind.LSF | ProviderKind.GRID_ENGINE:
            return render_submit_script(site, job=job_name(session, block), command=command)
        case kind:
            assert_never(kind)


def local_worker_init(site: Site) -> str:
    """Return `worker_init`; empty for TaskVine, whose workers run `worker_init` themselves."""
    return site.provider.worker_init if site.engine is Engine.STOKER else ""


def _provider_kind(site: Site) -> ProviderKind:
    return ProviderKind.LOCAL if site.is_local else site.provider.kind


def _refuse_missing_shared_files(site: Site) -> None:
    kind = site.provider.kind
    if not site.provider.shared_files and kind not in (ProviderKind.CONDOR, ProviderKind.KUBERNETES):
        raise ConfigError(
            f"site {site.name}: shared_files = false needs jobs that transfer files, for example HTCondor jobs; "
            f"{kind.value} jobs need a session folder that their nodes can access"
        )
