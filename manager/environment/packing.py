"""`pack_environment`: this environment as archives in the state folder, made once for each of its states.

Two archives: the packages, which a pilot gets from the session or from another pilot, and the interpreter, which is
small and goes along with the job, so that a node without any Python can begin with it. A site that names the
interpreter of its compute nodes needs the first alone.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from stoker import locks
from stoker.contexts.folders import state_folder
from stoker.contexts.objects import object_of
from stoker.contexts.recipe import ObjectRef
from stoker.decoding import UNREADABLE
from stoker.errors import SessionError
from stoker.manager.environment.archive import Progress, write_archive
from stoker.manager.environment.installed import this_environment
from stoker.manager.environment.members import ArchiveMember, interpreter_members, package_members
from stoker.protocol.session import PYTHON
from stoker.units import show_bytes
from stoker.whole_files import draft_of, write_whole

_KEPT = 4
_KEPT_S = 7 * 86400.0
"""Archives that nobody has used for so long go, but for the newest few: a session that runs may still hand one on."""


class Archive(msgspec.Struct, frozen=True):
    """An archive on this machine, as an object, and what it takes unpacked."""

    object: ObjectRef
    unpacked_bytes: int


class Packed(msgspec.Struct, frozen=True):
    """An environment that is ready to travel; as JSON it is what a starting pilot reads.

    `packages` is the archive of the packages as an object. `python` is the version that they are for, `interpreter`
    what it is called on compute nodes; empty: `base`, an archive on this machine, brings it.
    """

    packages: ObjectRef
    unpacked_bytes: int
    python: str
    interpreter: str = ""
    base: str = ""


def pack_environment(*, python: str = "", on_progress: Progress | None = None) -> Packed:
    """This environment, packed now or before. `python` is what the interpreter is called on compute nodes; empty: it
    travels too. Raises ConfigError for what can't travel, and SessionError where there is no room for it."""
    installed = this_environment()
    place = state_folder() / "environments"
    packages = _archive(place, f"packages-{installed.key}", lambda: package_members(installed), on_progress)
    base = None if python else _archive(place, f"interpreter-{_interpreter_key()}", interpreter_members, None)
    return Packed(
        packages=packages.object,
        unpacked_bytes=packages.unpacked_bytes,
        python=PYTHON,
        interpreter=python,
        base=base.object.source if base is not None else "",
    )


def _archive(
    place: Path, name: str, members: Callable[[], list[ArchiveMember]], on_progress: Progress | None
) -> Archive:
    """An archive of that name: the one that is there, or a new one. One program makes it, others wait for it."""
    known = []
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (place / f"{name}.lock").open("ab") as turn:
            locks.wait(turn.fileno())
            facts, path = place / f"{name}.json", place / f"{name}.tar.gz"
            found = _read(facts)
            if found is not None and path.exists():
                os.utime(facts)
                return found
            _forget_old(place)
            known = members()
            with draft_of(path, draft=place / f"{name}.draft") as draft:  # large: a killed writer leaves one at most
                draft.unlink(missing_ok=True)
                write_archive(draft, known, on_progress=on_progress)
            made = Archive(object_of(path), sum(member.size_bytes for member in known))
            write_whole(facts, msgspec.json.encode(made))
            return made
    except OSError as error:
        size = show_bytes(sum(member.size_bytes for member in known))
        raise SessionError(
            f"the environment ({size}) could not be packed in {place}: {error}; make room there, or name another place"
            " with STOKER_HOME"
        ) from error


def _read(facts: Path) -> Archive | None:
    try:
        return msgspec.json.decode(facts.read_bytes(), type=Archive)
    except (OSError, *UNREADABLE):
        return None


def _forget_old(place: Path) -> None:
    here = sorted(place.glob("*.json"), key=lambda facts: facts.stat().st_mtime, reverse=True)
    for facts in here[_KEPT:]:
        if time.time() - facts.stat().st_mtime > _KEPT_S:
            for kind in (".tar.gz", ".json"):
                facts.with_suffix(kind).unlink(missing_ok=True)


def _interpreter_key() -> str:
    executable = os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable)
    facts = os.stat(executable)
    parts = "\0".join((sys.version, executable, str(facts.st_size), str(facts.st_mtime_ns)))
    return hashlib.sha256(parts.encode(errors="replace")).hexdigest()[:32]
