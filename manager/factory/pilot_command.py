"""The key pairs of blocks: each is made when its block is asked for, and removed when the block is over.

A node has the key of its own block and no other, so what leaks there opens no more than that block's place: the manager
lets a block's key speak for pilots of that block alone (`manager.live.admission`).

The command that starts a pilot. Nothing secret is in it: the keys lie in the session folder.
"""

from __future__ import annotations

import math
import os
import shlex
import sys
import sysconfig
from collections.abc import Iterable

from zmq import curve_keypair

from stoker.errors import SessionError
from stoker.folders import refuse_odd_path, working_folder
from stoker.manager.environment.carrying import starter_command
from stoker.manager.live import interfaces
from stoker.protocol.session import KeyPair, SessionFolder
from stoker.site import AUTO_PROBE, Engine, EnvironmentKind, Pilot, ProviderKind, Site

# ---- block keys


def issue_block_key(folder: SessionFolder, block: str) -> None:
    """Make a block's key pair, unless it has one. Raises SessionError."""
    file = folder.block_key_file(block)
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not file.exists():
            public, secret = curve_keypair()
            folder.write_block_key(block, KeyPair(public=public.decode(), secret=secret.decode()))
    except OSError as error:
        raise SessionError(
            f"the key of block {block} cannot be written: {error}; make room at {file.parent}"
        ) from error


def is_block_key_issued(folder: SessionFolder, block: str) -> bool:
    """Whether a block has a key pair: its submission has begun, and it is not over."""
    try:
        return folder.block_key_file(block).exists()
    except (OSError, SessionError):
        return False


def revoke_block_key(folder: SessionFolder, block: str) -> None:
    """Remove a block's key pair: who still has it is let in no more. No-op if there is none."""
    try:
        folder.block_key_file(block).unlink(missing_ok=True)
    except (OSError, SessionError):  # the file system is away: the key is of a block without a pilot
        return


# ---- pilot command


PILOT, TASKVINE_PILOT = "stoker.pilot.main", "stoker.pilot.taskvine.main"
"""The modules that pilots run."""


def pilot_command(site: Site, *, folder: SessionFolder, block: str, python_path: str = "") -> str:
    """The shell command of a pilot of this site. `python_path`: folders to import from, beyond the environment."""
    options = ["--block", block]
    if not site.is_local:
        options += ["--source", site.name, "--walltime-s", str(walltime_s(site))]
        if site.provider.gpu_count:
            options += ["--asked-gpus", str(site.provider.gpu_count)]
    options += pilot_options(site.pilot)
    if site.environment.kind is EnvironmentKind.PACKED:
        return shlex.join(starter_command(folder, site, options))
    words = ["env", f"PYTHONPATH={python_path}"] if python_path else []
    if site.engine is Engine.TASKVINE:
        words += [sys.executable, "-P", "-m", TASKVINE_PILOT, "--session", str(folder.path), "--site", site.name]
        if site.provider.kind is not ProviderKind.LOCAL:  # workers are told where it is: a session may have moved
            words += ["--host", interfaces.resolve(site.session.interface or interfaces.AUTO)]
        return shlex.join([*words, "--block", block])
    words += [site.environment.python or sys.executable, "-P", "-m", PILOT]
    return shlex.join([*words, "--session", str(folder.path), *options])


def walltime_s(site: Site) -> int:
    """How long a block may last: batch systems count in minutes, so that what was asked for is rounded up."""
    return math.ceil(site.provider.walltime_s / 60) * 60


def pilot_options(pilot: Pilot) -> list[str]:
    """What a site says of its pilots, as options of the pilot's command."""
    options = ["--devices", pilot.devices, "--cache-size", f"{int(pilot.cache_bytes)} B"]
    if pilot.mixed:
        options += ["--gpu-cores", str(pilot.gpu_cores)]
    if pilot.cache_age_s != Pilot().cache_age_s:
        options += ["--cache-age", f"{pilot.cache_age_s:g}"]
    if pilot.probe != AUTO_PROBE:
        options += ["--probe", pilot.probe]
    if pilot.probe_every_s != Pilot().probe_every_s:
        options += ["--probe-every", f"{pilot.probe_every_s:g}"]
    return [*options, "--scratch", os.path.expanduser(pilot.scratch)] if pilot.scratch else options


def python_path() -> str:
    """What this program can import beyond its environment: a pilot should be able to import it too."""
    inside = {os.path.realpath(sysconfig.get_paths()[key]) for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths = []
    for entry in sys.path:
        path = os.path.realpath(entry or working_folder())
        if os.path.isdir(path) and path not in inside and not path.startswith(os.path.join(sys.base_prefix, "lib")):
            paths.append(path)
    paths = list(dict.fromkeys([*paths, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]))
    refuse_odd_imports(paths)
    return os.pathsep.join(paths)


def refuse_odd_imports(paths: Iterable[str]) -> None:
    """Raise SessionError for a place of modules that no pilot can be told."""
    for path in paths:
        refuse_odd_path(
            path, what="a folder that this program imports from", advice="rename it, or take it out of PYTHONPATH"
        )
