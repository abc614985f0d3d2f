"""`condor_submit` adds jobs. `condor_rm`, `condor_hold`, `condor_release`, `condor_vacate_job` change the queue."""

from __future__ import annotations

import getpass
import os
import re
import sys
import warnings
from pathlib import Path

from batch.condor.ads import HELD, IDLE, REMOVED, RUNNING, Ad, is_true, no_longer_held, now, turn, value
from batch.condor.queue import DOWN, Queue, id_of, schedd_is_up

# ---- submit


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import htcondor

_LINE = re.compile(r"\s*([A-Za-z_][\w.]*)\s*=\s*(.*\S|)\s*$")


def condor_submit(folder: Path, arguments: list[str]) -> int:
    terse, dry_run, file = False, "", ""
    words = iter(arguments)
    for word in words:
        if word == "-terse":
            terse = True
        elif word in ("-dry-run", "-dry"):
            dry_run = next(words)
        elif word.startswith("-"):
            return _failed(f"Unknown option: {word}", begin="")
        else:
            file = word
    if not dry_run and not schedd_is_up(folder):
        return _failed(f"Failed to connect to local queue manager\n{DOWN}", begin="\nERROR: ")
    try:
        text = Path(file).read_text()
    except OSError as error:
        return _failed(f"Failed to open command file ({file}) ({os.strerror(error.errno or 0)})", begin="\nERROR: ")
    return _submit(folder, text, terse=terse, dry_run=dry_run)


def _submit(folder: Path, text: str, *, terse: bool, dry_run: str) -> int:
    if not terse:
        print("Dry-Run job(s)" if dry_run else "Submitting job(s)", end="", flush=True)
    try:
        if dry_run:
            ads = _ads(text, cluster=1)
            shown = "\n".join(ad.printOld() for ad in ads)
            Path(dry_run).write_text(re.sub(r"^(\w+) = ", r"\1=", shown, flags=re.MULTILINE))
        else:
            queue = Queue(folder)
            with queue.change():
                ads = _ads(text, cluster=queue.new_cluster())
                for ad in ads:
                    queue.put(ad)
    except (htcondor.HTCondorException, ValueError, RuntimeError) as error:
        return _failed(str(error).strip().removeprefix("ERROR:").strip(), begin="\nERROR: ")
    if not terse:
        print("." * len(ads))
    for line in _unused(text):
        print(f"WARNING: the line '{line}' was unused by condor_submit. Is it a typo?", file=sys.stderr)
    cluster, last = ads[0]["ClusterId"], ads[-1]["ProcId"]
    done = "dry-run to" if dry_run else "submitted to"
    print(f"{cluster}.0 - {cluster}.{last}" if terse else f"{len(ads)} job(s) {done} cluster {cluster}.")
    if not terse and not dry_run:
        print(f"To monitor your job(s), run: condor_watch_q -clusters {cluster}", file=sys.stderr)
    return 0


def _ads(text: str, *, cluster: int) -> list[Ad]:
    """Raises ValueError or RuntimeError (base classes of HTCondor's exceptions) with the message of the command."""
    if not re.search(r"^\s*queue\b", text, re.IGNORECASE | re.MULTILINE):
        raise ValueError("No 'queue' commands found in the submit file")
    ads = []
    parsed = _parsed(text)
    for made in parsed.jobs(clusterid=cluster):
        ad = Ad()
        ad.update(made)
        ad["JobStatus"], ad["QDate"], ad["EnteredCurrentStatus"] = IDLE, now(), now()
        ad["NumShadowStarts"], ad["NumJobStarts"] = 0, 0
        if value(ad, "TransferExecutable", True) and not os.access(ad["Cmd"], os.R_OK):
            raise ValueError(f"Can't access executable file {parsed.expand('executable')}: No such file or directory")
        ads.append(ad)
    return ads


def _parsed(text: str) -> htcondor.Submit:
    """Parse the description. The error of the bindings names no line, so find the shortest unreadable beginning."""
    try:
        return htcondor.Submit(text)
    except htcondor.HTCondorException:
        lines = text.splitlines()
        for number in range(1, len(lines) + 1):
            try:
                htcondor.Submit("\n".join(lines[:number]))
            except htcondor.HTCondorException as error:
                raise ValueError(str(error).strip() or f"Failed to parse command file (line {number}).") from None
        raise


def _unused(text: str) -> list[str]:
    lines = text.splitlines()
    found = []
    for number, line in enumerate(lines):
        setting = _LINE.match(line)
        if setting is None or (lines[number - 1 : number] and lines[number - 1].endswith("\\")):
            continue
        changed = [*lines[:number], f"{setting[1]} = no_such_thing", *lines[number + 1 :]]
        try:
            if _fixed("\n".join(changed)) == _fixed(text):
                found.append(f"{setting[1]} = {setting[2]}")
        except (htcondor.HTCondorException, ValueError, RuntimeError):
            continue
    return found


def _fixed(text: str) -> list[str]:
    return [str(ad) for ad in htcondor.Submit(text + "\n").jobs(clusterid=1, qdate=1)]


def _failed(what: str, *, begin: str = "ERROR: ") -> int:
    print(f"{begin}{what}", file=sys.stderr)
    return 1


# ---- act


_WORDS = {
    "condor_rm": ("remove", "marked for removal"),
    "condor_hold": ("hold", "held"),
    "condor_release": ("release", "released"),
    "condor_vacate_job": ("vacate", "vacated"),
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
