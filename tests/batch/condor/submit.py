"""`condor_submit`: a description in, job ads into the queue."""

from __future__ import annotations

import os
import re
import sys
import warnings
from pathlib import Path

from batch.condor.ads import IDLE, Ad, now, value
from batch.condor.queue import Queue, schedd_is_up, why_down

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import htcondor

_LINE = re.compile(r"\s*([A-Za-z_][\w.]*)\s*=\s*(.*\S|)\s*$")


def main(folder: Path, arguments: list[str]) -> int:
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
        return _failed(f"Failed to connect to local queue manager\n{why_down(folder)}", begin="\nERROR: ")
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
    """Raises ValueError, RuntimeError (HTCondor's exceptions are both) in the command's words."""
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
    """The description. The bindings do not say which line is wrong: the first with which it can't be read."""
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
