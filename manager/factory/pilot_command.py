"""Build the command that starts a pilot, and the key pair of its block. The command contains no secret.

A block's key pair exists from before its job is submitted until the block ends. A node receives only the key of its own
block. The manager accepts this key only for pilots of that block (`manager.live.admission`).
"""

from __future__ import annotations

import math
import os
import shlex
import sys
import sysconfig
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from zmq import curve_keypair

from stoker.errors import SessionError
from stoker.folders import refuse_non_utf8_path, working_folder
from stoker.manager.live import interfaces
from stoker.protocol.session import KeyPair, SessionFolder
from stoker.site import AUTO_PROBE, Engine, EnvironmentKind, Pilot, ProviderKind, Site

PILOT, TASKVINE_PILOT = "stoker.pilot.main", "stoker.pilot.taskvine.main"


def issue_block_key(folder: SessionFolder, block: str) -> None:
    """Create the block's key pair if it is missing. Raises SessionError."""
    file = folder.block_key_file(block)
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not file.exists():
            public, secret = curve_keypair()
            folder.write_block_key(block, KeyPair(public=public.decode(), secret=secret.decode()))
    except OSError as error:
        text = f"the key of block {block} cannot be written: {error}; make room in {file.parent}"
        raise SessionError(text) from error


def is_block_key_issued(folder: SessionFolder, block: str) -> bool:
    """True if the block's submission has begun and the block has not ended."""
    try:
        return folder.block_key_file(block).exists()
    except (OSError, SessionError):
        return False


def revoke_block_key(folder: SessionFolder, block: str) -> None:
    # If the file system does not answer, the key file may remain. This is harmless, because no pilot of this block can
    # use the key any more.
    with suppress(OSError, SessionError):
        folder.block_key_file(block).unlink(missing_ok=True)


def build_pilot_command(site: Site, *, folder: SessionFolder, block: str, python_path: str = "") -> str:
    options = ["--block", block]
    if not site.is_local:
        options += ["--source", site.name, "--walltime-s", str(rounded_walltime_s(site))]
        if site.provider.gpu_count:
            options += ["--asked-gpus", str(site.provider.gpu_count)]
    options += build_pilot_options(site.pilot)
    if site.environment.kind is EnvironmentKind.PACKED:
        from stoker.manager.environment.carrying import pilot_starter_command  # slow import

        return shlex.join(pilot_starter_command(folder, site, options))
    words = ["env", f"PYTHONPATH={python_path}"] if python_path else []
    if site.engine is Engine.TASKVINE:
        words += [sys.executable, "-P", "-m", TASKVINE_PILOT, "--session", str(folder.path), "--site", site.name]
        # The session may move to another host, so workers need the name of its current host.
        if site.provider.kind is not ProviderKind.LOCAL:
            words += ["--host", interfaces.resolve_interface(site.session.interface or interfaces.AUTO)]
        return shlex.join([*words, "--block", block])
    words += [site.environment.python or sys.executable, "-P", "-m", PILOT]
    return shlex.join([*words, "--session", str(folder.path), *options])


def rounded_walltime_s(site: Site) -> int:
    """Return the walltime in seconds, rounded up to minutes, the unit of batch systems."""
    return math.ceil(site.provider.walltime_s / 60) * 60


def build_pilot_options(pilot: Pilot) -> list[str]:
    options = ["--devices", pilot.devices, "--cache-size", f"{int(pilot.cache_bytes)} B"]
    if pilot.offers_gpus_and_cpus:
        options += ["--gpu-cores", str(pilot.gpu_cores)]
    if pilot.cache_age_s != Pilot().cache_age_s:
        options += ["--cache-age", f"{pilot.cache_age_s:g}"]
    if pilot.probe != AUTO_PROBE:
        options += ["--probe", pilot.probe]
    if pilot.probe_every_s != Pilot().probe_every_s:
        options += ["--probe-every", f"{pilot.probe_every_s:g}"]
    return [*options, "--scratch", os.path.expanduser(pilot.scratch)] if pilot.scratch else options


def build_python_path() -> str:
    """Return the import folders of this program that are outside its Python environment."""
    inside = [os.path.realpath(sysconfig.get_paths()[key]) for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths = []
    for entry in sys.path:
        path = os.path.realpath(entry or working_folder())
        # setuptools adds its own folder to sys.path. In PYTHONPATH, this folder would hide installed packages.
        in_environment = any(Path(path).is_relative_to(each) for each in inside)
        if os.path.isdir(path) and not in_environment and not path.startswith(os.path.join(sys.base_prefix, "lib")):
            paths.append(path)
    paths = list(dict.fromkeys([*paths, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]))
    reject_invalid_import_paths(paths)
    return os.pathsep.join(paths)


def reject_invalid_import_paths(paths: Iterable[str]) -> None:
    """Raise SessionError for a folder whose name cannot be passed to a pilot."""
    advice = "rename the folder, or remove it from PYTHONPATH"
    for path in paths:
        refuse_non_utf8_path(path, what="a folder that this program imports from", advice=advice)
