"""Clock faults: the clock of a machine jumps and is corrected later."""

from __future__ import annotations

import math
import struct
from pathlib import Path

from batch.chaos import Stage, Step, Way
from batch.chaos_victims import HEAD

WRONG_S = (0.5, 6.0)
"""Minimum and maximum seconds that a clock is wrong."""
PATCH = """
import mmap, os, struct, time
try:
    with open(os.path.join({folder!r}, os.environ.get("SLURMD_NODENAME", {head!r}))) as file:
        ahead = mmap.mmap(file.fileno(), 8, prot=mmap.PROT_READ)
except OSError:
    pass
else:
    def _patch(really=time.time, really_ns=time.time_ns, unpack=struct.Struct("d").unpack_from):
        time.time = lambda: really() + unpack(ahead)[0]
        time.time_ns = lambda: really_ns() + int(unpack(ahead)[0] * 1e9)
    _patch()
"""


class Clocks:
    """Clock faults. `folder`: one clock file per machine."""

    def __init__(self, stage: Stage, folder: Path) -> None:
        self._stage = stage
        self._folder = folder

    def ways(self) -> dict[str, Way]:
        nodes = self._stage.cluster.shape.nodes
        return {
            "clock of the head": Way(200, lambda step: self._set(HEAD, step)),
            "clock of a node": Way(200, lambda step: self._set(step.of(nodes), step)),
        }

    def _set(self, machine: str, step: Step) -> str:
        key = f"clock of {machine}"
        if not self._stage.is_free(key):
            return ""
        ahead = math.copysign(3600 ** abs(2 * step.length - 1), step.length - 0.5)
        set_ahead(self._folder / machine, ahead)
        seconds = step.between(WRONG_S)
        self._stage.hold(key, seconds, lambda: set_ahead(self._folder / machine, 0.0))
        return f"{machine} by {ahead:.0f} s for {seconds:.1f} s"


def install(packages: Path, folder: Path, machines: tuple[str, ...]) -> None:
    folder.mkdir()
    for machine in machines:
        set_ahead(folder / machine, 0.0)
    (packages / "chaos_clock.py").write_text(PATCH.format(folder=str(folder), head=HEAD))
    (packages / "chaos_clock.pth").write_text("import chaos_clock\n")


def set_ahead(file: Path, seconds: float) -> None:
    """Set a clock without changing the inode, because processes have mapped the file."""
    with file.open("r+b" if file.exists() else "wb") as opened:
        opened.write(struct.pack("d", seconds))
