"""Run the session under faults with its programs; collect results and leftovers."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from batch import chaos_clocks, chaos_scheduler
from batch.chaos_victims import HEAD
from batch.lab.cluster import Cluster
from batch.lab.commands import until
from batch.lab.shape import Shape
from batch.sessions import write_site
from environment.small import SharedEnvironment, SmallEnvironment
from faults.world import World

from stoker.pilot.agent.scratch import remove_folders_of_dead_pilots

SHAPE = Shape(gpus=("a10:1", "a10:1", "titanx:1"), namespaces=True)
PROGRAMS = ("main", "mixed")
"""Programs that are never killed, whose results must arrive exactly once."""
PROGRAM = Path(__file__).with_name("chaos_program.py")


class Scene:
    """A session over a cluster and this machine: `start` the session, then clients. `packed`: pilots unpack an
    environment instead of sharing the environment of the programs.
    """

    def __init__(self, cluster: Cluster, world: World, *, disk: Path, packed: bool) -> None:
        self.world, self.cluster, self.disk = world, cluster, disk
        self.work = world.path / "work"
        self.work.mkdir()
        self.ran, self.stop = self.work / "ran", self.work / "stop"
        self.clocks, self.mood = world.path / "clocks", world.path / "mood"
        self.clients: dict[str, subprocess.Popen[str]] = {}
        self._packed = packed
        if packed:
            small = SmallEnvironment(world.path / "venv", world.path / "home")
            small.bring_all("parsl", "rich", "click")
        environment = small if packed else SharedEnvironment(world.path / "venv")
        chaos_clocks.install(environment.packages, self.clocks, (HEAD, *cluster.shape.nodes))
        self._python = environment.python
        self._path = chaos_scheduler.wrap(world.path / "bin", self.mood)
        # only the session under test uses this /dev/shm, so leftovers are visible
        for machine in cluster.machines.values():
            subprocess.run(machine.inside("mount", "-t", "tmpfs", "shm", "/dev/shm"), check=True)
        self.session = self._start_session()
        self.folder = disk / "session"
        # Objects of clients are on a separate disk that is never full.
        objects = world.path / "objects"
        shutil.copytree(self.folder / "objects", objects)
        shutil.rmtree(self.folder / "objects")
        (self.folder / "objects").symlink_to(objects)

    def _start_session(self) -> str:
        scratch = self.world.scratch
        slurm = write_site(
            self.world.path,
            provider={"gpus": "1", "command_limit": "5 s"},
            pilot={"init_blocks": 3, "max_blocks": 3, "scratch": f"{scratch}/$SLURMD_NODENAME"},
            session={"interface": "10.77.0.1"},
            environment={"kind": "packed" if self._packed else "shared"},
        )
        here = write_site(
            self.world.path,
            name="here",
            provider={"kind": "local"},
            pilot={"devices": "cpu:2", "scratch": f"{scratch}/{HEAD}"},
            session={"interface": "10.77.0.1"},
        )
        lines = here.read_text().splitlines()
        slurms = re.compile("(partition|cores|walltime|poll|command_limit) = ")
        here.write_text("\n".join(line for line in lines if not slurms.match(line)) + "\n")
        said = self.stoker("up", str(slurm), str(here), "--folder", str(self.disk / "session"))
        found = re.match(r"session (\w{4}) is up", said.stdout)
        if not found:
            raise RuntimeError(f"the session did not come up: {said.stdout}{said.stderr}")
        return found.group(1)

    def stoker(self, *arguments: str, limit_s: float = 180.0) -> subprocess.CompletedProcess[str]:
        process = self.world.spawn(self._command(*arguments), folder=self.world.path, PATH=self._path)
        try:
            out, err = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            err += f"\nkilled: it did not end within {limit_s:g} s"
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def _command(self, *arguments: str) -> list[str]:
        return self.cluster.on_head(self._python, "-m", "stoker.manager.cli.entry", *arguments)

    def start(self, name: str) -> None:
        if name == "attach":
            command = self._command("attach", self.session)
        else:
            command = self.cluster.on_head(self._python, str(PROGRAM), self.session, name, str(self.work))
        log = self.work / f"{name}.log"
        before = self.clients.get(name)
        self.clients[name] = self.world.spawn(
            ["sh", "-c", 'exec "$@" >>"$0" 2>&1', str(log), *command], folder=self.world.path, PATH=self._path
        )
        if before is not None:
            before.communicate()

    def check(self) -> None:
        for name, process in self.clients.items():
            if process.poll() is not None:
                raise RuntimeError(f"{name} has ended by itself ({process.returncode}): {self.said(name)}")

    def said(self, name: str) -> str:
        log = self.work / f"{name}.log"
        return log.read_text(errors="replace")[-4000:] if log.exists() else ""

    def results(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for file in self.work.glob("*.now"):
            found.update({f"{file.stem} {kind}": count for kind, count in json.loads(file.read_text()).items()})
        return found

    # ---- the end

    def wait_for_programs(self, *, limit_s: float) -> list[str]:
        """Wait for the programs after `stop`; return the programs that still run."""
        until_s = time.monotonic() + limit_s
        slow = []
        for name in (*PROGRAMS, "guest"):
            try:
                self.clients[name].wait(timeout=max(0.1, until_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                slow.append(name)
        return slow

    def found(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name in (*PROGRAMS, "guest"):
            file = self.work / f"{name}.json"
            said = {"exit": self.clients[name].poll(), "said": self.said(name)}
            found[name] = json.loads(file.read_text()) if file.exists() else said
        return found

    def status(self) -> dict[str, Any]:
        said = self.stoker("status", self.session, "--json")
        found: dict[str, Any] = json.loads(said.stdout)["status"] if said.returncode == 0 else {"error": said.stderr}
        return found

    def replayed(self) -> str:
        """Return the first decision of a manager that a replay of the journal does not repeat, or ""."""
        said = self.stoker("replay", self.session, "--json")
        if said.returncode and not said.stdout.startswith("{"):
            return f"stoker replay: {said.stdout}{said.stderr}"[:2000]
        found = json.loads(said.stdout)["replayed"]["difference"]
        return json.dumps(found)[:2000] if found else ""

    def _clear_completing_jobs(self) -> None:
        """Set nodes with jobs stuck in COMPLETING down and up again, like a cluster operator."""

        def nodes() -> set[str]:
            return {node for _, _, state, _, node, *_ in self.cluster.queue() if state == "COMPLETING"}

        ends_at = time.monotonic() + 10
        while nodes() and time.monotonic() < ends_at:
            time.sleep(0.5)
        for node in nodes():
            for state in ("DOWN", "RESUME"):
                self.cluster.ask("scontrol", "update", f"NodeName={node}", f"State={state}", "Reason=completing")

    def end(self) -> list[str]:
        self._clear_completing_jobs()
        left = []
        ended = self.stoker("down", self.session)
        if ended.returncode:
            left.append(f"stoker down: {ended.stdout}{ended.stderr}")
        left += [" ".join(line) for line in self.cluster.queue() if "stoker" in " ".join(line)]
        try:
            until(lambda: not self.world.processes(), limit_s=30, what="no process left")
        except Exception:
            left += self.world.left(folders=False)
        for name, machine in self.cluster.machines.items():
            listed = subprocess.run(
                machine.inside("ls", "/dev/shm"), capture_output=True, text=True, check=False
            ).stdout
            left += [f"{name}: /dev/shm/{each}" for each in listed.split()]
        for place in self.world.scratch.glob("*/stoker-*"):
            # Imitate the next pilot on the node, which removes folders of killed pilots.
            remove_folders_of_dead_pilots(place)
            left += map(str, place.glob("pilot-*"))
        return left
