"""What goes to a node that sees neither this environment nor, perhaps, this file system; and how a pilot starts there.

    <session>/carried/<site>/session/
        start.sh             what the job runs: finds a Python, or takes the one from base.tar.gz
        start.pyz            `stoker.pilot.starter`: gets the packages and becomes the pilot
        environment.json     what they are (`archive.Packed`)
        python               what the interpreter is called on compute nodes; empty: it travels
        base.tar.gz          the interpreter, where it travels

    where nodes do not see this machine's files, for a pilot to take this folder for the session's:
        session.json         where the manager is
        seed.address         where the seed is, from which the packages come
        keys/transfer.json   the key of peer transfers; closed to everybody else
        copied               says that this is not the session's own folder

A job without a shared file system has the folder copied into its sandbox, as `session`, and beside it the key of its
block.

`prepare` does this for a new session, for each site whose environment travels.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
import zipfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from stoker import startup
from stoker.contexts.objects import publish
from stoker.errors import SessionError
from stoker.manager.environment.archive import Packed, pack_environment
from stoker.pilot.transfer.fetch import SEED_FILE
from stoker.protocol.session import SessionFolder
from stoker.site import EnvironmentKind, Site
from stoker.units import show_bytes
from stoker.whole_files import draft_of, write_whole

CARRIED_AS = "session"
"""The name of the folder in a job's sandbox."""
_KEYS = ("transfer",)
_STARTER = (
    "connections.py",
    "errors.py",
    "log_files.py",
    "whole_files.py",
    "contexts/manifest.py",
    "pilot/starter/*.py",
    "pilot/transfer/*.py",
)
"""The parts of this package in `start.pyz`."""


def carried_folder(folder: SessionFolder, site: Site) -> Path:
    return folder.path / "carried" / site.name / CARRIED_AS


def carry(folder: SessionFolder, site: Site, environment: Packed) -> Path:
    """Write the files for nodes of a site, and return their folder. Raises SessionError."""
    place = carried_folder(folder, site)
    root = Path(startup.__file__).parent
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Each file is written whole: a batch system may be copying it just now.
        write_whole(place / "start.sh", (root / "pilot" / "starter" / "start.sh").read_bytes(), mode=0o700)
        _write_starter(place / "start.pyz", root)
        write_whole(place / "environment.json", msgspec.json.format(msgspec.json.encode(environment)))
        write_whole(place / "python", environment.interpreter.encode())
        if environment.base:
            _link(Path(environment.base), place / "base.tar.gz")
        if not site.provider.shared_files:
            (place / "keys").mkdir(mode=0o700, exist_ok=True)
            write_whole(place / "copied", b"")
        publish(folder.objects, (environment.packages,))
    except OSError as error:
        raise SessionError(f"{place} cannot be made: {error}; make room there") from error
    return place


def starter_files(folder: SessionFolder, site: Site) -> list[Path]:
    """Return the folders that a job must bring to its node; none if nodes see this machine's files. Call it just before
    each submission: the manager may have moved."""
    if site.provider.shared_files:
        return []
    place = carried_folder(folder, site)
    for file in (folder.file, folder.path / SEED_FILE):
        if file.exists():
            write_whole(place / file.name, file.read_bytes())
    for role in _KEYS:
        with suppress(FileNotFoundError):
            write_whole(place / "keys" / f"{role}.json", folder.key_file(role).read_bytes())
    return [place]


def starter_command(folder: SessionFolder, site: Site, options: Sequence[str]) -> list[str]:
    """Return the command that starts a pilot there. `options`: those of `stoker-pilot`, without `--session`."""
    if site.provider.shared_files:
        return ["sh", str(carried_folder(folder, site) / "start.sh"), "--session", str(folder.path), *options]
    return ["sh", f"{CARRIED_AS}/start.sh", "--session", CARRIED_AS, *options]


def _write_starter(target: Path, root: Path) -> None:
    with draft_of(target) as draft, zipfile.ZipFile(draft, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("__main__.py", "import sys\nfrom stoker.pilot.starter.main import main\nsys.exit(main())\n")
        for package in ("", "pilot/", "contexts/"):
            archive.writestr(f"stoker/{package}__init__.py", "")
        for pattern in _STARTER:
            for module in sorted(root.glob(pattern)):
                archive.write(module, Path("stoker", *module.parts[len(root.parts) :]))


def _link(source: Path, target: Path) -> None:
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


# ---- for the sites of a session


log = logging.getLogger("stoker")

_EVERY_S = 5.0


def prepare(folder: SessionFolder, sites: Iterable[Site], *, say: Callable[[str], None] = log.warning) -> None:
    """Pack the environment if necessary, and write the files for nodes of these sites. `say` is told the progress if it
    takes long. Raises ConfigError for an environment that cannot be packed, SessionError without disk space."""
    for site in sites:
        if site.environment.kind is EnvironmentKind.PACKED:
            progress = _Progress(site.name, say)
            carry(folder, site, pack_environment(python=site.environment.python, on_progress=progress.tell))


class _Progress:
    """Reports the progress of packing every few seconds."""

    def __init__(self, site: str, say: Callable[[str], None]) -> None:
        self._site = site
        self._say = say
        self._next = time.monotonic() + _EVERY_S / 5

    def tell(self, done: int, total: int) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _EVERY_S
            self._say(
                f"packing this environment for site {self._site}, once: {show_bytes(done)} of {show_bytes(total)}"
            )
