"""Find the HTCondor daemons, or the Python bindings for the stand-in."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
from pathlib import Path
from typing import NamedTuple

NO_BINDINGS = "the fake HTCondor needs HTCondor's bindings for its job ads: pip install 'htcondor<25'"
AS_ROOT = "HTCondor takes no jobs of root: `make condor` runs these tests as an ordinary user of a namespace"


class Daemons(NamedTuple):
    release: Path
    bin: Path
    sbin: Path
    libexec: Path


@functools.cache
def daemons() -> Daemons | None:
    master, submit = shutil.which("condor_master"), shutil.which("condor_submit")
    if master is None or submit is None:
        return None
    sbin = Path(master).resolve().parent
    release = sbin.parent
    places = (release / "libexec" / "condor", release / "libexec")
    libexec = next((place for place in places if (place / "condor_gpu_discovery").exists()), places[0])
    return Daemons(release, Path(submit).resolve().parent, sbin, libexec)


def missing() -> str:
    """Return the reason why tests of HTCondor cannot run here, or ""."""
    if daemons() is not None:
        return AS_ROOT if os.geteuid() == 0 else ""
    return "" if importlib.util.find_spec("htcondor") else NO_BINDINGS
