"""`make soak`: ten thousand faults over a real Slurm and local pilots, unattended."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batch.chaos import Chaos, Stage
from batch.chaos_clocks import Clocks
from batch.chaos_disks import Disks, disks
from batch.chaos_processes import Processes
from batch.chaos_scene import PROGRAMS, SHAPE, Scene
from batch.chaos_scheduler import Scheduler
from batch.chaos_sockets import Sockets
from batch.chaos_victims import HEAD, Ran
from batch.chaos_watch import Watch
from batch.lab import commands
from batch.lab.cluster import Cluster
from batch.lab.commands import until
from batch.lab.shape import LabError
from faults.world import World

EVERY_S = 0.36
"""Average seconds between faults, for ten thousand faults an hour."""
STALL_S = 120.0
FIRST_S = 180.0
"""Maximum seconds until the first results; pilots unpack their environment first."""


class Soak:
    def __init__(
        self,
        folder: Path,
        *,
        seed: int,
        every_s: float,
        stall_s: float,
        packed: bool = True,
    ) -> None:
        self.folder = folder
        self.stall_s = stall_s
        self.seed = seed
        self.every_s = every_s
        self.packed = packed
        self.record: dict[str, Any] = {"seed": seed, "ok": False, "faults_total": 0, "faults": {}, "left": []}
        self.ways = 0
        folder.mkdir(parents=True, exist_ok=True)
        for old in ("stall", "failure", "left"):
            shutil.rmtree(folder / old, ignore_errors=True)
        (folder / "faults.log").write_text("")

    def run(self, *, seconds: float = float("inf"), faults: int | None = None) -> dict[str, Any]:
        """Inject faults into a session and check its results; return the record. Session failures do not raise."""
        environ = dict(os.environ)
        place = Path(tempfile.mkdtemp(prefix="soak-", dir="/tmp"))  # paths of sockets must be short
        world = World(place / "world")
        disk = place / "disk"
        machines = [world.scratch / name for name in (HEAD, *SHAPE.nodes)]
        try:
            with disks([disk, *machines]), world.entered(limit_s=60, folders=False), Cluster(SHAPE) as cluster:
                os.environ.update(cluster.environ)
                self._over(Scene(cluster, world, disk=disk, packed=self.packed), seconds=seconds, faults=faults)
        except Exception as error:
            self.record.setdefault("error", f"{type(error).__name__}: {error}"[:4000])
        finally:
            os.environ.clear()
            os.environ.update(environ)
            shutil.rmtree(place, ignore_errors=True)
        self._judge()
        self.write()
        return self.record

    def _over(self, scene: Scene, *, seconds: float, faults: int | None) -> None:
        for name in (*PROGRAMS, "guest", "attach"):
            scene.start(name)
        stage = Stage(scene.cluster, scene.world, ran=scene.ran, session=scene.folder, restart=scene.start)
        processes = Processes(stage)
        sockets = Sockets(stage, seed=self.seed)
        families = (
            processes,
            sockets,
            Disks(stage, processes, disk=scene.disk),
            Clocks(stage, scene.clocks),
            Scheduler(stage, processes, mood=scene.mood),
        )
        ways = {name: way for family in families for name, way in family.ways().items()}
        self.ways = len(ways)
        with (self.folder / "faults.log").open("a", buffering=1) as log:
            watch = Watch(scene, limit_s=self.stall_s, folder=self.folder, log=lambda: list(chaos.log))

            def check() -> None:
                scene.check()
                watch.check()
                self._count(chaos)

            chaos = Chaos(
                stage,
                ways,
                seed=self.seed,
                every_s=self.every_s,
                check=check,
                write=lambda line: log.write(line + "\n"),
            )
            began = time.monotonic()
            try:
                self._disturb(scene, chaos, watch, seconds=seconds, faults=faults)
            except KeyboardInterrupt:
                self.record["stopped"] = "by Ctrl-C"
            except Exception as error:
                self.record["error"] = f"{type(error).__name__}: {error}"[:4000]
                if not watch.stalled:
                    watch.evidence(self.folder / "failure")
            self.record["seconds"] = round(time.monotonic() - began, 1)
            self._count(chaos)
            self._finish(scene, chaos, watch)
        sockets.close()

    def _disturb(self, scene: Scene, chaos: Chaos, watch: Watch, *, seconds: float, faults: int | None) -> None:
        main = scene.clients["main"]
        until(
            lambda: len(scene.results()) >= 4 or main.poll() is not None, limit_s=FIRST_S, what="results of each kind"
        )
        scene.check()
        watch.start()
        chaos.run(seconds=seconds, faults=faults)

    def _finish(self, scene: Scene, chaos: Chaos, watch: Watch) -> None:
        record = self.record
        calm = sum(scene.results().values())
        if "error" not in record:
            try:
                until(lambda: sum(scene.results().values()) > calm + 50, limit_s=self.stall_s, what="results again")
            except LabError as error:
                record["error"] = f"after all was put back: {error}"
                watch.evidence(self.folder / "failure")
        if watch.is_alive():
            watch.stop()
        scene.stop.touch()
        slow = scene.wait_for_programs(limit_s=30.0 if "error" in record else self.stall_s)
        if slow and "error" not in record:
            record["error"] = f"{', '.join(slow)}: not ended {self.stall_s:g} s after all was put back"
            watch.evidence(self.folder / "failure")
            record["error"] += "".join(
                f"\n{file.read_text()}" for file in sorted((self.folder / "failure").glob("c-*"))[:1]
            )
        record["programs"] = scene.found()
        facts = scene.status().items()
        record["status"] = {key: fact for key, fact in facts if not isinstance(fact, list) or key == "notices"}
        told = json.dumps([record["status"].get("notices"), record["programs"]])
        if "error" not in record and ("please report" in told or '"wrong": ["' in told or '"failed": ["' in told):
            watch.evidence(self.folder / "failure")
        ran = Ran(scene.ran)
        ran.look()
        record["begun"], record["calls_begun"] = ran.begun(), len(ran.names())
        record["longest_stall"] = watch.longest
        record["processes"] = watch.summary()
        record["grown"] = watch.grown()
        record["left"] = scene.end()
        record["replay"] = scene.replayed()
        if record["left"] and "error" not in record:
            watch.evidence(self.folder / "left")
        self._count(chaos)

    def _count(self, chaos: Chaos) -> None:
        self.record["faults"] = dict(sorted(chaos.done.items()))
        self.record["faults_total"] = chaos.done.total()
        self.record["missed"] = dict(sorted(chaos.missed.items()))
        self.record["steps"] = chaos.steps
        if chaos.steps % 200 == 0:
            self.write()

    def _judge(self) -> None:
        record = self.record
        programs = record.get("programs", {})
        for figure in ("lost", "twice", "many_wrong", "many_failed"):
            record[figure] = sum(programs.get(name, {}).get(figure, 0) for name in PROGRAMS)
        whole = all("results" in programs.get(name, {}) for name in PROGRAMS)
        record["results"] = sum(sum(programs[name]["results"].values()) for name in PROGRAMS) if whole else 0
        bad = [record["lost"], record["twice"], record["many_wrong"], record["many_failed"], len(record["left"])]
        reports = [notice for notice in record.get("status", {}).get("notices", ()) if "please report" in str(notice)]
        bad += [len(record.get("grown", ())), len(record.get("replay", "")), len(reports)]
        record["ok"] = whole and "error" not in record and not any(bad)

    def write(self) -> None:
        (self.folder / "record.json").write_text(json.dumps(self.record, indent=1, default=str) + "\n")


def told(record: dict[str, Any]) -> list[str]:
    stall = record.get("longest_stall", {})
    figures = ("lost", "twice", "many_wrong", "many_failed")
    lines = [
        f"soak {'is well' if record['ok'] else 'FAILED'}: seed {record['seed']}, "
        f"{record['faults_total']} faults of {len(record['faults'])} kinds, {record['results']} results",
        ", ".join(f"{record[figure]} {figure.removeprefix('many_')}" for figure in figures)
        + f", {len(record['left'])} left behind; longest stall {stall.get('seconds', 0)} s ({stall.get('of', 'none')})",
    ]
    lines += [f"  {record[key]}" for key in ("error", "stopped", "replay") if record.get(key)]
    return (
        lines + [f"  left: {each}" for each in record["left"][:20]] + [f"  grown: {x}" for x in record.get("grown", ())]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make soak", description="Disturb a session on a real Slurm.")
    parser.add_argument("--faults", type=int, default=10_000, help="how many (default 10,000, about an hour)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="longest run in seconds")
    parser.add_argument("--every", type=float, default=EVERY_S, help="seconds between two faults (default %(default)s)")
    parser.add_argument("--seed", type=int, default=int(os.environ.get("STOKER_SOAK_SEED") or secrets.randbelow(10**6)))
    parser.add_argument(
        "--stall", type=float, default=STALL_S, help="seconds without a result of some kind that end it"
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/soak"), help="for the record, and evidence")
    given = parser.parse_args(arguments)
    if why := commands.missing_for_namespaces():
        print(f"no soak here: {why}", file=sys.stderr)
        return 2
    print(f"soak: {given.faults} faults; to do the same again: STOKER_SOAK_SEED={given.seed}", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM ends the soak like Ctrl-C
    soak = Soak(given.folder.absolute(), seed=given.seed, every_s=given.every, stall_s=given.stall)
    record = soak.run(seconds=given.seconds, faults=given.faults)
    print("\n".join(told(record)), flush=True)
    return 0 if record["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
