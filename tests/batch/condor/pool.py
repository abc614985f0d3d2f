"""The stand-in pool: machines, commands for PATH, faults of jobs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from batch.condor.ads import HELD, IDLE, REMOVED, Ad, no_longer_held, turn
from batch.condor.queue import Queue, id_of, schedd_is_up
from live.peers import until
from polling import PATIENCE_S

COMMANDS = (
    "condor_submit", "condor_q", "condor_history", "condor_rm", "condor_hold", "condor_release", "condor_vacate_job",
    "condor_status", "condor_config_val",
)  # fmt: skip
_TESTS = Path(__file__).parents[2]
_COMMAND = """#!/bin/sh
exec '{python}' -IS '{client}' '{folder}' {name} "$@"
"""


class Pool:
    is_real = False

    def __init__(
        self,
        folder: Path,
        *machines: dict[str, Any],
        kill_s: float = 5.0,
        rematch_s: int = 60,
        match_s: int = 0,
    ) -> None:
        self.folder, self.bin = folder, folder / "bin"
        self.bin.mkdir(parents=True)
        pool = {"machines": machines, "kill_s": kill_s, "rematch_s": rematch_s, "match_s": match_s}
        (folder / "pool.json").write_text(json.dumps(pool))
        for name in COMMANDS:
            client = Path(__file__).with_name("client.py")
            text = _COMMAND.format(python=sys.executable, client=client, folder=folder, name=name)
            (self.bin / name).write_text(text)
            (self.bin / name).chmod(0o755)
        self._queue = Queue(folder)
        self._commands = self._start("batch.condor.commands")
        self._schedd: subprocess.Popen[bytes] | None = None
        self.start_schedd()
        until(lambda: (folder / "commands").exists(), what="the process for commands")

    # ---- a user's actions

    def run(self, *words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run([self.bin / words[0], *words[1:]], cwd=cwd, capture_output=True, text=True, timeout=60)

    def ad(self, job: str) -> Ad:
        for ad in [*self._queue.jobs(), *self._queue.history()]:
            if str(id_of(ad)) == job:
                return ad
        raise KeyError(f"no job {job} in {[str(id_of(ad)) for ad in self._queue.jobs()]}, nor in the history")

    def queued(self) -> list[str]:
        return [str(id_of(ad)) for ad in self._queue.jobs()]

    def status(self, job: str) -> int:
        """Return JobStatus: 1 idle, 2 running, 3 removed, 4 completed, 5 held."""
        return int(self.ad(job)["JobStatus"])

    def wait(self, job: str, status: int, *, seconds: float = PATIENCE_S) -> Ad:
        until(lambda: self.status(job) == status, seconds=seconds, what=f"job {job} in status {status}")
        return self.ad(job)

    # ---- events of jobs

    def evict(self, job: str, why: str = "PREEMPT expression evaluated to True", *, code: int = 1011) -> None:
        with self._queue.change():
            ad = self.ad(job)
            turn(ad, int(ad["JobStatus"]), VacateReason=why, VacateReasonCode=code, VacateReasonSubCode=0)
            self._queue.put(ad)
            self._queue.order_vacate(id_of(ad), wanted=True)

    def hold(
        self, job: str, reason: str, *, code: int, subcode: int = 0, used_mb: int = 0, held_for_s: int = 0
    ) -> None:
        """Hold the job, backdated by `held_for_s` seconds, with `used_mb` MB of used memory."""
        with self._queue.change():
            ad = self.ad(job)
            more = {"ResidentSetSize_RAW": used_mb * 1024} if used_mb else {}
            turn(ad, HELD, HoldReason=reason, HoldReasonCode=code, HoldReasonSubCode=subcode, **more)
            ad["EnteredCurrentStatus"] = ad["EnteredCurrentStatus"] - held_for_s
            self._queue.put(ad)

    def release(self, job: str) -> None:
        with self._queue.change():
            ad = self.ad(job)
            turn(ad, IDLE, **no_longer_held(ad))
            self._queue.put(ad)

    def change(self, job: str, **attributes: Any) -> None:
        with self._queue.change():
            ad = self.ad(job)
            for name, value in attributes.items():
                ad[name] = value
            self._queue.put(ad)

    def clear(self) -> None:
        """Find lost machines again, remove every job, and wait until they are gone."""
        for mark in (self.folder / "lost").glob("*"):
            mark.unlink()
        until(self._removed, what="the queue being empty")

    def _removed(self) -> bool:
        with self._queue.change():
            for ad in self._queue.jobs():
                if ad["JobStatus"] != REMOVED:
                    turn(ad, REMOVED, RemoveReason="for the next test", WantGracefulRemoval=False)
                    self._queue.put(ad)
        return not self.queued()

    def lose(self, name: str) -> None:
        (self.folder / "lost" / name).touch()

    def crash(self, name: str) -> None:
        """Power off a machine: its jobs die without a message."""
        self.lose(name)
        for start in self._starts():
            if start["machine"] == name:
                _kill_tree(start["pid"])

    def _starts(self) -> list[dict[str, Any]]:
        return [json.loads(start.read_text()) for start in (self.folder / "running").glob("*/start.json")]

    def processes(self, job: str) -> list[psutil.Process]:
        try:
            start = json.loads((self.folder / "running" / job / "start.json").read_text())
        except FileNotFoundError:
            return []
        return list(psutil.Process(start["pid"]).children(recursive=True))

    def stop_schedd(self) -> None:
        if self._schedd is not None:
            self._schedd.kill()
            self._schedd.wait()
            self._schedd = None

    def start_schedd(self) -> None:
        self._schedd = self._start("batch.condor.schedd")
        until(lambda: schedd_is_up(self.folder) and (self.folder / "lost").is_dir(), what="the schedd")

    def _start(self, module: str) -> subprocess.Popen[bytes]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("STOKER_")}
        environment["PYTHONPATH"] = str(_TESTS)
        command = [sys.executable, "-P", "-m", module, str(self.folder)]
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)

    def close(self) -> None:
        self._commands.kill()
        self._commands.wait()
        self.stop_schedd()
        for start in self._starts():
            _kill_tree(start["pid"])


def _kill_tree(pid: int) -> None:
    with suppress(psutil.Error):
        starter = psutil.Process(pid)
        # kill the starter first, because it would report the end of its job
        for process in [starter, *starter.children(recursive=True)]:
            with suppress(psutil.Error):
                process.kill()
