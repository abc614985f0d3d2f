"""What `stoker up --dry-run` shows: the exact submit script of a site, and what its batch system says to it.

Slurm can be asked whether it would take a script without submitting it (`sbatch --test-only`): it knows what no site
file says, such as who may use a partition and for how long. Of the others nobody can be asked.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import msgspec

from stoker.manager.executor import detached, engines
from stoker.manager.factory import parsl_parts
from stoker.manager.factory.batch import BatchTrouble
from stoker.manager.factory.commands import CommandRunner
from stoker.manager.protocol.session import SessionFolder
from stoker.site import Engine, ProviderKind, Site

_EXAMPLE = "k3v9"
"""Stands for the id of the session, which a dry run does not have."""


class DryRunLines(msgspec.Struct, frozen=True):
    """The lines for one site, and whether its batch system would refuse the job."""

    lines: tuple[str, ...]
    refused: bool = False


def show(site: Site, *, place: str = "") -> DryRunLines:
    """What would be submitted for one site. Raises ConfigError for settings that its batch system cannot have."""
    parsl_parts.import_in_parts()
    from stoker.manager.factory.batches import SUBMIT_COMMANDS, dry_run  # imports parts of Parsl

    folder = SessionFolder(place or detached.default_place(_EXAMPLE))
    text = dry_run(site, session=_EXAMPLE, folder=folder, block="b1", python_path=detached.python_path())
    blocks = f"{site.pilot.init_blocks} at first, up to {site.pilot.max_blocks}"
    how = f"submitted with {SUBMIT_COMMANDS.get(site.provider.kind, 'kubectl')}" if not site.is_local else "run here"
    number = "one in all" if site.engine is Engine.TASKVINE else blocks
    head = f"# site {site.name}: block b1 of session {_EXAMPLE} (the real one has an id of its own); {how}, {number}"
    lines = (head, *text.rstrip("\n").split("\n"))
    if site.engine is Engine.TASKVINE:
        factory = engines.factory_command(site, folder, session=_EXAMPLE)
        return DryRunLines((*lines, f"# which has TaskVine start workers, {blocks}:", factory))
    if site.provider.kind is not ProviderKind.SLURM:
        return DryRunLines(lines)
    verdict, refused = _ask_slurm(site, text)
    return DryRunLines((*lines, f"# site {site.name}: {verdict}"), refused)


def _ask_slurm(site: Site, script: str) -> tuple[str, bool]:
    """What Slurm says to a script, and whether it refuses it."""
    from stoker.manager.factory.submitting import is_not_now  # loads Parsl, which takes a while

    if shutil.which("sbatch") is None:
        return "Slurm was not asked whether it takes this: no sbatch on the PATH of this host", False
    with tempfile.TemporaryDirectory(prefix="stoker-dry-run-") as folder:
        path = Path(folder) / "script.sh"
        path.write_text(script, errors="surrogateescape")
        try:
            said = CommandRunner(limit_s=site.provider.command_limit_s, folder=path.parent).run(
                ["sbatch", "--test-only", path.name]
            )
        except BatchTrouble as trouble:
            return f"Slurm could not be asked whether it takes this: {trouble}", False
    words = said.words.removeprefix("sbatch: ")
    if said.code and is_not_now(words):
        return f"Slurm could not be asked whether it takes this: {words}", False
    return (f"Slurm refuses this: {words}", True) if said.code else (f"Slurm would take this: {words}", False)
