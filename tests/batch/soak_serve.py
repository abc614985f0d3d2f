"""`make soak-serve`: unattended clients of `stoker serve` on a real Slurm while jobs start and end."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from batch.lab import commands
from batch.lab.cluster import Cluster
from batch.lab.commands import until
from batch.lab.shape import LabError, Shape
from batch.serve_clients import Clients, Outage
from batch.sessions import write_site
from faults.world import World, kill
from gateway.running import RunningGateway

MINUTES, EVERY_S, WALLTIME, CLIENTS = 30.0, 30.0, "3 min", 12
PAUSE_S = 0.5
"""Maximum pause of a client between requests, in seconds."""
MANAGER_AT, GATEWAY_AT = 0.4, 0.7
"""Times of the kills as shares of the run."""
STREAMS_BAR = 0.999
HOT_S = 400.0
"""Maximum seconds until two jobs have loaded their models on a busy machine."""
SHAPE = Shape(gpus=("a10:1", "a10:1"), settings={"DefMemPerCPU": "1500"})
MODELS = '[models.small]\npath = "models/tiny"\nmin = 2\n'


class ServeSoak:
    def __init__(
        self, folder: Path, *, seed: int, every_s: float, walltime: str, clients: int, pause_s: float = PAUSE_S
    ) -> None:
        self.folder = folder
        self.record: dict[str, Any] = {
            "seed": seed, "every_s": every_s, "walltime": walltime, "clients": clients, "ok": False, "events": [],
        }  # fmt: skip
        self._seed, self._every_s, self._walltime, self._many = seed, every_s, walltime, clients
        self._pause_s = pause_s
        self._begun = 0.0
        folder.mkdir(parents=True, exist_ok=True)

    def run(self, *, seconds: float) -> dict[str, Any]:
        """Serve, send requests and inject faults for this time; return the record. Ignore gateway errors."""
        environ = dict(os.environ)
        place = Path(tempfile.mkdtemp(prefix="soak-", dir="/tmp"))  # paths of sockets must be short
        self.record["load_before"] = os.getloadavg()
        try:
            with World(place / "world").entered(limit_s=60, folders=False) as world, Cluster(SHAPE) as cluster:
                os.environ.update(cluster.environ)
                self._over(world, cluster, seconds=seconds)
        except Exception as error:
            self.record.setdefault("error", f"{type(error).__name__}: {error}"[:4000])
        finally:
            os.environ.clear()
            os.environ.update(environ)
            shutil.rmtree(place, ignore_errors=True)
        self.record["load_after"] = os.getloadavg()
        self._judge()
        (self.folder / "record.json").write_text(json.dumps(self.record, indent=1, default=str) + "\n")
        return self.record

    def _over(self, world: World, cluster: Cluster, *, seconds: float) -> None:
        gateway = RunningGateway(world.path / "work", "lab.toml", "models.toml")
        write_site(
            gateway.folder,
            provider={"gpus": "a10:1", "walltime": self._walltime, "command_limit": "5 s"},
            pilot={"init_blocks": 2, "max_blocks": 2},
        )
        (gateway.folder / "models.toml").write_text(MODELS)
        gateway.start()
        try:
            self._hot(gateway)
            clients = Clients(gateway.url, clients=self._many, seed=self._seed, pause_s=self._pause_s)
            asyncio.run(self._ask(clients, Disturbance(world, cluster, gateway, clients, self), seconds=seconds))
            self.record |= clients.tally.record()
            self.record["addresses"] = sorted({clients.url, gateway.url})
            self.record["outages_s"] = [round(each.back_at - each.killed_at, 1) for each in clients.outages]
            self.record["status"] = httpx.get(f"{gateway.url}/status", timeout=30).json()
        finally:
            self._keep(world, gateway)
            gateway.end()

    async def _ask(self, clients: Clients, disturbance: Disturbance, *, seconds: float) -> None:
        await clients.learn()
        over = asyncio.Event()
        self._begun = time.monotonic()
        asking = asyncio.create_task(clients.ask_until(over))
        try:
            await asyncio.to_thread(disturbance.run, seconds=seconds)
        finally:
            over.set()
            await asking
            self.record["seconds"] = round(time.monotonic() - self._begun, 1)

    def _hot(self, gateway: RunningGateway) -> None:
        def both() -> bool:
            return bool(httpx.get(f"{gateway.url}/status", timeout=30).json()["models"][0]["hot"] == 2)

        until(both, limit_s=HOT_S, what="the model hot on both nodes")

    def note(self, what: str) -> None:
        self.record["events"].append([round(time.monotonic() - self._begun, 1), what])

    def _keep(self, world: World, gateway: RunningGateway) -> None:
        logs = self.folder / "logs"
        shutil.rmtree(logs, ignore_errors=True)
        logs.mkdir(parents=True)
        (logs / "gateway.said").write_text("".join(gateway.said))
        for log in world.home.rglob("*.log"):
            shutil.copy(log, logs / "-".join(log.relative_to(world.home).parts))

    def _judge(self) -> None:
        record, ended = self.record, self.record.get("ended", {})
        streams = ended.get("stream", 0) + ended.get("stream failed", 0)
        record["streams_whole"] = ended.get("stream", 0) / streams if streams else 0.0
        record["ok"] = (
            "error" not in record
            and ended.get("plain", 0) > 0
            and not ended.get("plain failed", 0)
            and record["streams_whole"] >= STREAMS_BAR
            and len(record.get("addresses", ())) == 1
        )


class Disturbance:
    def __init__(
        self, world: World, cluster: Cluster, gateway: RunningGateway, clients: Clients, soak: ServeSoak
    ) -> None:
        self._world, self._cluster, self._gateway, self._clients, self._soak = world, cluster, gateway, clients, soak
        self.done: Counter[str] = Counter()

    def run(self, *, seconds: float) -> None:
        every_s = self._soak.record["every_s"]
        plan = [(every_s * number, self._take_a_job) for number in range(1, int(seconds / every_s) + 1)]
        plan += [(seconds * MANAGER_AT, self._kill_manager), (seconds * GATEWAY_AT, self._kill_gateway)]
        begun = time.monotonic()
        for at_s, act in sorted(plan, key=lambda step: step[0]):
            self._wait(begun + at_s)
            if at_s < seconds - every_s / 3:  # no fault near the end, so that open requests can finish
                act()
        self._wait(begun + seconds)
        self._soak.record["done"] = dict(self.done)

    def _wait(self, at: float) -> None:
        time.sleep(max(0.0, at - time.monotonic()))

    def _take_a_job(self) -> None:
        way = ("preempted", "cancelled")[sum(self.done[each] for each in ("preempted", "cancelled")) % 2]
        jobs = [line for line in self._cluster.queue("--partition=backfill", "--sort=S") if line[2] == "RUNNING"]
        if not jobs:
            self.done["no job to take"] += 1
            self._soak.note("no job to take")
            return
        job = jobs[-1][0]
        node = self._cluster.job(job).get("NodeList", "")
        if way == "cancelled":
            self._cluster.cancel(job)
        else:
            pusher = self._cluster.submit(
                "sleep 2", "--partition=main", "--gres=gpu:a10:1", f"--nodelist={node}", "--time=1"
            )
            self._cluster.wait(pusher, "RUNNING", "COMPLETED")
        self.done[way] += 1
        self._soak.note(f"{way} job {job} on {node}")

    def _kill_manager(self) -> None:
        kill([self._world.manager()])
        self.done["manager killed"] += 1
        self._soak.note("manager killed")

    def _kill_gateway(self) -> None:
        outage = Outage(time.monotonic())
        self._clients.outages.append(outage)
        before = self._gateway.url
        self._gateway.kill()
        self._soak.note("gateway killed")
        self._gateway.start()
        outage.back_at = time.monotonic()
        if self._gateway.url != before:
            raise LabError(f"the gateway was at {before} and is at {self._gateway.url}")
        self.done["gateway killed"] += 1
        self._soak.note("gateway is back")


def told(record: dict[str, Any]) -> list[str]:
    ended = record.get("ended", {})
    lines = [
        f"soak of the gateway {'is well' if record['ok'] else 'FAILED'}: seed {record['seed']},"
        f" {record.get('seconds', 0)} s, {record.get('done', {})}",
        f"  ended: {ended}; cut by the gateway's kill and asked again: {record.get('cut')}; never accepted while it was"
        f" down: {record.get('never_accepted')}",
        f"  streams whole {100 * record['streams_whole']:.2f} %; first token, s {record.get('first_s')}; longest"
        f" silence, s {record.get('silence_s')}; without a stream, s {record.get('plain_s')}",
    ]
    lines += [f"  {record['error']}"] if "error" in record else []
    return lines + [f"  failed: {json.dumps(each)[:600]}" for each in record.get("failed", ())[:20]]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make soak-serve", description="Disturb a gateway over a real Slurm.")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="how long clients ask (default %(default)s)")
    parser.add_argument("--every", type=float, default=EVERY_S, help="seconds between preemptions (%(default)s)")
    parser.add_argument("--walltime", default=WALLTIME, help="of each job, whole minutes (default %(default)s)")
    parser.add_argument("--clients", type=int, default=CLIENTS, help="half of them stream (default %(default)s)")
    parser.add_argument("--seed", type=int, default=int(os.environ.get("STOKER_SOAK_SEED") or secrets.randbelow(10**6)))
    parser.add_argument("--folder", type=Path, default=Path("runs/soak-serve"), help="for the record, and logs")
    given = parser.parse_args(arguments)
    if why := commands.missing_for_slurm():
        print(f"no soak here: {why}", file=sys.stderr)
        return 2
    print(f"soak of the gateway: {given.minutes:g} minutes; the same again: STOKER_SOAK_SEED={given.seed}", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM ends the soak like Ctrl-C
    soak = ServeSoak(
        given.folder.absolute(), seed=given.seed, every_s=given.every, walltime=given.walltime, clients=given.clients
    )
    record = soak.run(seconds=60 * given.minutes)
    print("\n".join(told(record)), flush=True)
    return 0 if record["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
