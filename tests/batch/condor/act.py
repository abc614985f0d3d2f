"""`condor_rm`, `condor_hold`, `condor_release`, `condor_vacate_job`: what they print, and write into the queue."""

from __future__ import annotations

import getpass
import sys
from pathlib import Path

from batch.condor.ads import HELD, IDLE, REMOVED, RUNNING, Ad, is_true, no_longer_held, turn
from batch.condor.queue import Queue, id_of, schedd_is_up

_WORDS = {
    "condor_rm": ("remove", "marked for removal"),
    "condor_hold": ("hold", "held"),
    "condor_release": ("release", "released"),
    "condor_vacate_job": ("vacate", "vacated"),
    "condor_vacate_job -fast": ("fast-vacate", "fast-vacated"),
}


def main(folder: Path, command: str, arguments: list[str]) -> int:
    ids, clusters, constraint, reason, force = [], [], "", f"via {command} (by user {getpass.getuser()})", False
    words = iter(arguments)
    for word in words:
        if word == "-constraint":
            constraint = next(words)
        elif word == "-reason":
            reason = f"{next(words)} (by user {getpass.getuser()})"
        elif word == "-forcex":
            force = True
        elif word == "-fast" and command == "condor_vacate_job":
            command += " -fast"
        elif word == "-all":
            constraint = "ClusterId >= 0"
        elif word.replace(".", "", 1).isdecimal():
            (ids if "." in word else clusters).append(word)
        else:
            print(f"Unrecognized option: {word}", file=sys.stderr)
            return 1
    if not (ids or clusters or constraint):
        print("You did not specify any jobs", file=sys.stderr)
        return 1
    if not schedd_is_up(folder):
        print("DCSchedd::actOnJobs:6001:Failed to connect to schedd", file=sys.stderr)
        for job in ids:
            print(f"No result found for job {job}", file=sys.stderr)
        return 1
    act = _Act(Queue(folder), command, reason=reason, force=force)
    worked = [act.on_ids(ids)] if ids else []
    if clusters:
        constraint = " || ".join(
            [*([f"({constraint})"] if constraint else []), *(f"ClusterId == {c}" for c in clusters)]
        )
    if constraint:
        whose = (
            f" in cluster {clusters[0]}" if len(clusters) == 1 and not ids else f" matching constraint ({constraint})"
        )
        worked.append(act.on_constraint(constraint, whose=whose))
    return 0 if all(worked) else 1


class _Act:
    def __init__(self, queue: Queue, command: str, *, reason: str, force: bool) -> None:
        self._queue, self._command, self._reason, self._force = queue, command, reason, force
        self._verb, self._done = _WORDS[command]
        if force:
            self._done = "removed locally (remote state unknown)"

    def on_ids(self, ids: list[str]) -> bool:
        with self._queue.change():
            there = {str(id_of(ad)): ad for ad in self._queue.jobs()}
            problems = {job: self._do(there[job]) if job in there else "not found" for job in ids}
        worked = not all(problems.values())
        if not worked:
            print(file=sys.stderr)
        for job, problem in problems.items():
            print(f"Job {job} {problem or self._done}", file=sys.stderr if problem else sys.stdout)
        return worked

    def on_constraint(self, constraint: str, *, whose: str) -> bool:
        with self._queue.change():
            worked = [not self._do(ad) for ad in self._queue.jobs() if is_true(ad, constraint)]
        if any(worked):
            print(f"All jobs{whose} have been {self._done}")
            return True
        print(f"\nCouldn't find/{self._verb} all jobs{whose}", file=sys.stderr)
        return False

    def _do(self, ad: Ad) -> str:
        """Act on one job; what is in the way, if anything."""
        status = int(ad["JobStatus"])
        if self._force and status != REMOVED:
            return "not in `X' state to be forcibly removed"
        if self._force:
            self._queue.leave(ad)
        elif status == REMOVED:
            return "already marked for removal"
        elif self._command == "condor_rm":
            turn(ad, REMOVED, RemoveReason=self._reason, **no_longer_held(ad))
            self._queue.put(ad)
        elif self._command == "condor_hold" and status == HELD:
            return "already held"
        elif self._command == "condor_hold":
            turn(ad, HELD, HoldReason=self._reason, HoldReasonCode=1, HoldReasonSubCode=0)
            self._queue.put(ad)
        elif self._command == "condor_release":
            if status != HELD:
                return "not held to be released"
            turn(ad, IDLE, **no_longer_held(ad))
            self._queue.put(ad)
        elif status != RUNNING:
            return f"not running to be {self._done}"
        else:
            self._queue.order_vacate(id_of(ad), wanted=True)
        return ""
