"""What `stoker up --dry-run` shows: the exact submit script of a site, and what its batch system says to it.

Only Slurm can judge a script without submitting it (`sbatch --test-only`). It knows what no site file says: who may use
a partition, and for how long. `stoker doctor` asks the same.
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
from stoker.protocol.session import SessionFolder
from stoker.site import Engine, ProviderKind, Site

_EXAMPLE = "k3v9"
"""Stands for the id of the session, which a dry run does not have."""


class SlurmVerdict(msgspec.Struct, frozen=True):
    """Slurm's answer to a script in words; `refused` is None if Slurm could not be asked."""

    words: str
    refused: bool | None = None


class DryRunLines(msgspec.Struct, frozen=True):
    """The lines for one site, and whether its batch system would refuse the job."""

    lines: tuple[str, ...]
    refused: bool = False


def show(site: Site, *, place: str = "") -> DryRunLines:
    """What would be submitted for one site. Raises ConfigError for settings that its batch system cannot have."""
    parsl_parts.import_in_parts()
    from stoker.manager.factory.batches import SUBMIT_COMMANDS  # imports parts of Parsl

    folder, text = _script(site, place)
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
    verdict = _judge(site, text)
    return DryRunLines((*lines, f"# site {site.name}: {verdict.words}"), refused=verdict.refused is True)


def ask_slurm(site: Site) -> SlurmVerdict:
    """Ask Slurm whether it would take a block of this site, without submitting one."""
    _, text = _script(site, "")
    return _judge(site, text)


def _script(site: Site, place: str) -> tuple[SessionFolder, str]:
    parsl_parts.import_in_parts()
    from stoker.manager.factory.batches import dry_run  # imports parts of Parsl

    folder = SessionFolder(place or detached.default_place(_EXAMPLE))
    return folder, dry_run(site, session=_EXAMPLE, folder=folder, block="b1", python_path=detached.python_path())


def _judge(site: Site, script: str) -> SlurmVerdict:
    from stoker.manager.factory.submitting import is_not_now  # loads Parsl, which takes a while

    if shutil.which("sbatch") is None:
        return SlurmVerdict("Slurm was not asked whether it takes this: no sbatch on the PATH of this host")
    with tempfile.TemporaryDirectory(prefix="stoker-dry-run-") as folder:
        path = Path(folder) / "script.sh"
        path.write_text(script, errors="surrogateescape")
        try:
            said = CommandRunner(limit_s=site.provider.command_limit_s, folder=path.parent).run(
                ["sbatch", "--test-only", path.name]
            )
        except BatchTrouble as trouble:
            return SlurmVerdict(f"Slurm could not be asked whether it takes this: {trouble}")
    words = said.words.removeprefix("sbatch: ")
    if said.code and is_not_now(words):
        return SlurmVerdict(f"Slurm could not be asked whether it takes this: {words}")
    refused = said.code != 0
    return SlurmVerdict(f"Slurm {'refuses' if refused else 'would take'} this: {words}", refused)
