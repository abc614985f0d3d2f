from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from batch.chaos import Stage, Step, Way
from batch.chaos_processes import Processes
from batch.chaos_victims import HEAD, node_of
from faults.world import is_alive, kill, until

from stoker.locks import is_locked

FULL_S = (0.5, 4.0)
READ_ONLY_S = (0.5, 3.0)
SIZE = "4g"


@contextlib.contextmanager
def disks(folders: Sequence[Path]) -> Iterator[None]:
    """Mount in-memory file systems at these folders before the cluster starts, so that all machines see them."""
    mounted = []
    try:
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE},mode=700", "chaos", str(folder)], check=True)
            mounted.append(folder)
        yield
    finally:
        for folder in mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=False)


class Disks:
    def __init__(self, stage: Stage, processes: Processes, *, disk: Path) -> None:
        self._stage = stage
        self._processes = processes
        self._disk = disk
        self._wiped = 0

    def ways(self) -> dict[str, Way]:
        return {
            "full scratch": Way(200, self._fill_scratch),
            "full journal": Way(200, lambda step: self._fill(self._disk, "the session's disk", step)),
            "wiped node": Way(50, self._wipe_node),
            "scratch is gone": Way(50, self._remove_scratch),
            "read-only cache": Way(150, self._protect_cache),
            "cut object": Way(200, self._cut_object),
            "lost tail": Way(40, lambda step: self._spoil_journal(step, _cut)),
            "damaged journal": Way(30, lambda step: self._spoil_journal(step, _flip)),
        }

    def scratch(self, node: str) -> Path:
        return self._stage.world.scratch / node

    def _fill_scratch(self, step: Step) -> str:
        node = step.of((HEAD, *self._stage.cluster.shape.nodes))
        return self._fill(self.scratch(node), node, step)

    def _fill(self, disk: Path, name: str, step: Step) -> str:
        key, seconds = f"full {name}", step.between(FULL_S)
        if not self._stage.is_free(key):
            return ""
        facts = os.statvfs(disk)
        used = (facts.f_blocks - facts.f_bfree) * facts.f_frsize
        if not _remount(disk, f"size={used}"):
            return ""
        self._stage.hold(key, seconds, lambda: _remount(disk, f"size={SIZE}"))
        return f"{name} for {seconds:.1f} s"

    def _wipe_node(self, step: Step) -> str:
        node = self._processes.end_pilot(step, lambda pid: kill([pid]))
        if node:
            self._empty(node)
        return node

    def _remove_scratch(self, step: Step) -> str:
        """Remove scratch folders like a faulty cleanup job."""
        return self._processes.end_pilot(step, lambda pid: self._empty(node_of(pid)))

    def _empty(self, node: str) -> None:
        """Remove pilot files on a machine with one rename, because the next pilot may start at once."""
        self._wiped += 1
        gone = self.scratch(node) / f"gone-{self._wiped}"
        gone.mkdir()
        for place in self.scratch(node).glob("stoker-*"):
            with contextlib.suppress(OSError):  # the disk is full
                place.rename(gone / place.name)
        shutil.rmtree(gone, ignore_errors=True)

    def _protect_cache(self, step: Step) -> str:
        node = step.of(self._stage.cluster.shape.nodes)
        key, seconds = f"cache of {node}", step.between(READ_ONLY_S)
        caches = sorted(self.scratch(node).glob("stoker-*/cache"))
        if not caches or not self._stage.is_free(key):
            return ""
        cache = caches[0]
        machine = self._stage.cluster.machines[node]
        script = f"mount --bind '{cache}' '{cache}' && mount -o remount,bind,ro '{cache}'"
        if _run(machine.inside("sh", "-c", script)):
            return ""
        self._stage.hold(key, seconds, lambda: _run(machine.inside("umount", "--lazy", str(cache))))
        return f"{node} for {seconds:.1f} s"

    def _cut_object(self, step: Step) -> str:
        """Truncate a cached file to half its size while no library uses the file."""
        found = []
        for entry in sorted(self._stage.world.scratch.glob("*/stoker-*/cache/entries/[!.]*")):
            place = entry.parents[1] / "objects" / entry.name
            if place.is_file() and place.stat().st_size > 1 and not is_locked(entry):
                found.append(place)
        if not found:
            return ""
        place = step.of(found)
        with contextlib.suppress(OSError):
            os.truncate(place, place.stat().st_size // 2)
        return str(place.relative_to(self._stage.world.scratch))

    def _spoil_journal(self, step: Step, spoil: Callable[[Path, Step], str]) -> str:
        """Crash the manager host; the journal loses its last bytes or gets a wrong byte."""
        managers, keepers = self._stage.victims.managers(), [pid for _, pid in self._stage.victims.keepers()]
        if not managers or not self._processes.may_kill_manager() or not self._stage.is_free("all frozen"):
            return ""
        [(_, manager), *_] = managers
        kill(keepers, signal.SIGSTOP)
        try:
            kill([manager])
            until(lambda: not is_alive(manager), why="the manager is dead")
            self._processes.manager_was_killed()
            written = [path for path in self._stage.session.glob("journal*") if _SEGMENT.fullmatch(path.name)]
            return spoil(max(written, key=lambda path: path.stat().st_mtime_ns), step)
        finally:
            kill(keepers, signal.SIGCONT)


_SEGMENT = re.compile(r"journal(\.\d+)?")


def _cut(journal: Path, step: Step) -> str:
    size = journal.stat().st_size
    lost = int(step.between((1, 20_000)))
    os.truncate(journal, max(0, size - lost))
    return f"{journal.name}: {min(size, lost)} of {size} bytes"


def _flip(journal: Path, step: Step) -> str:
    size = journal.stat().st_size
    at = int(step.between((0.5, 1.0)) * (size - 1))
    with journal.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))
    return f"{journal.name}: byte {at} of {size}"


def _remount(disk: Path, options: str) -> bool:
    return not _run(["mount", "-o", f"remount,{options}", str(disk)])


def _run(command: list[str]) -> int:
    return subprocess.run(command, capture_output=True, check=False, timeout=30).returncode
