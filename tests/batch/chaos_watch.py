from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil
from batch.chaos_scene import PROGRAMS, Scene
from faults.world import command_of

SAMPLE_S = 10.0
YOUNG_S = 300.0
"""Seconds after its start during which memory and descriptors of a process may grow."""
MORE_FDS = 64
MORE_BYTES = 200 << 20
LIBRARY_FDS = 4
"""Descriptors of a pilot per hot library: two sockets, two cache files."""
KINDS = {
    "stoker.manager.main": "manager",
    "stoker.manager.factory.main": "factory",
    "stoker.pilot.transfer.seed": "seed",
    "stoker.pilot.main": "pilot",
    "stoker.pilot.zygote": "library or zygote",
    "chaos_program.py": "program",
    "stoker.manager.cli.entry": "attach",
}


class Growth:
    """The resources of a process at the age of `YOUNG_S` seconds, and their later maximum."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.fds = self.rss = self.fds_most = self.rss_most = 0
        self.age_s = 0.0

    def sample(self, *, fds: int, rss: int, age_s: float) -> None:
        self.age_s = age_s
        if age_s < YOUNG_S:
            self.fds, self.rss = max(self.fds, fds), max(self.rss, rss)
        self.fds_most, self.rss_most = max(self.fds_most, fds), max(self.rss_most, rss)

    def too_much(self) -> str:
        """Return the growth beyond the limits, or ""."""
        if self.age_s < 2 * YOUNG_S:
            return ""
        if self.fds_most > self.fds + MORE_FDS:
            return f"{self.kind}: {self.fds} descriptors when young, {self.fds_most} later"
        if self.rss_most > 1.5 * self.rss + MORE_BYTES:
            return f"{self.kind}: {self.rss >> 20} MB when young, {self.rss_most >> 20} MB later"
        return ""


class Watch(threading.Thread):
    def __init__(self, scene: Scene, *, limit_s: float, folder: Path, log: Callable[[], list[str]]) -> None:
        super().__init__(name="chaos-watch", daemon=True)
        self.stalled = ""
        self.longest: dict[str, Any] = {"seconds": 0.0}
        self.growth: dict[tuple[int, float], Growth] = {}
        self.trouble: list[str] = []
        self._scene = scene
        self._limit_s = limit_s
        self._folder = folder
        self._log = log
        self._over = threading.Event()
        self._seen: dict[str, tuple[int, float]] = {}

    def check(self) -> None:
        if self.stalled:
            raise StalledError(self.stalled)

    def stop(self) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        sample_at = 0.0
        while not self._over.wait(1.0):
            now = time.monotonic()
            self._progress(now)
            if now >= sample_at:
                sample_at = now + SAMPLE_S
                self._sample()

    def _progress(self, now: float) -> None:
        for kind, count in self._scene.results().items():
            before, since = self._seen.get(kind, (-1, now))
            if kind.partition(" ")[0] not in PROGRAMS:
                continue  # this process is killed on purpose
            if count != before:
                self._seen[kind] = count, now
                since = now if before < 0 else since
            if now - since > self.longest["seconds"]:
                self.longest = {"seconds": round(now - since, 1), "of": kind, "faults": self._log()[-30:]}
            waits = count == before and now - since > self._limit_s and not self._scene.stop.exists()
            if waits and not self.stalled:
                with contextlib.suppress(Exception):
                    self.evidence(self._folder / "stall")
                self.stalled = f"no result of {kind} for {now - since:.0f} s; see {self._folder / 'stall'}"

    def evidence(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        scene = self._scene
        (folder / "faults").write_text("\n".join(self._log()))
        (folder / "processes").write_text("\n".join(_lines(scene.world.processes())))
        (folder / "slurm").write_text(scene.cluster.tails())
        asked: dict[str, tuple[str, ...]] = {
            "status": ("status", scene.session), "calls": ("calls", scene.session),
            "status.json": ("status", scene.session, "--json"), "explain": ("explain", scene.session),
        }  # fmt: skip
        for name, words in asked.items():
            said = scene.stoker(*words, limit_s=60)
            (folder / name).write_text(said.stdout + said.stderr)
            if name == "calls":
                for call in [word for word in said.stdout.split() if word.startswith("c-")][:6]:
                    told = scene.stoker("explain", call, "--session", scene.session, limit_s=60)
                    (folder / call).write_text(told.stdout + told.stderr)
        for log in [*scene.folder.rglob("*.log"), *scene.work.glob("*.log"), *scene.folder.glob("journal*")]:
            place = folder / "logs" / "-".join(log.parts[-3:])
            place.parent.mkdir(exist_ok=True)
            with contextlib.suppress(OSError):
                shutil.copy(log, place)

    # ---- resources of processes

    def _sample(self) -> None:
        for pid in self._scene.world.processes():
            kind = next((kind for word, kind in KINDS.items() if word in " ".join(command_of(pid))), "")
            if not kind:
                continue
            with contextlib.suppress(psutil.Error, OSError):
                process = psutil.Process(pid)
                born = process.create_time()
                facts = self.growth.setdefault((pid, born), Growth(kind))
                facts.sample(fds=own_fds(process, kind), rss=process.memory_info().rss, age_s=time.time() - born)

    def summary(self) -> dict[str, dict[str, float]]:
        """For each kind, return the maxima over its processes and the growth of its oldest process."""
        found: dict[str, dict[str, float]] = {}
        for kind in sorted({each.kind for each in self.growth.values()}):
            mine = [each for each in self.growth.values() if each.kind == kind]
            oldest = max(mine, key=lambda each: each.age_s)
            found[kind] = {
                "processes": len(mine),
                "fds_most": max(each.fds_most for each in mine),
                "rss_most_mb": max(each.rss_most for each in mine) >> 20,
                "oldest_s": round(oldest.age_s),
                "oldest_fds": oldest.fds_most,
                "oldest_rss_young_mb": oldest.rss >> 20,
                "oldest_rss_mb": oldest.rss_most >> 20,
            }
        return found

    def grown(self) -> list[str]:
        return [said for each in self.growth.values() if (said := each.too_much())]


def own_fds(process: psutil.Process, kind: str) -> int:
    """Return the descriptors of a process, except those that a pilot needs for libraries."""
    children = len(process.children(recursive=True)) if kind == "pilot" else 0
    return max(0, int(process.num_fds()) - LIBRARY_FDS * children)


class StalledError(Exception):
    """Raised if no result arrives within the limit."""


def _lines(pids: Iterable[int]) -> list[str]:
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            found.append(f"{pid} {psutil.Process(pid).status()} {' '.join(command_of(pid))}")
    return found
