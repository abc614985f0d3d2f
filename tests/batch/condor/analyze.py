"""`condor_q -better-analyze`: which part of a job's requirements how many slots meet. As in HTCondor's manual."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import classad
from batch.condor.ads import Ad, machine_ad
from batch.condor.queue import id_of


def analyze(folder: Path, ads: Sequence[Ad]) -> str:
    return "".join(_one(folder, ad) for ad in ads)


def _one(folder: Path, job: Ad) -> str:
    offered = list(slots(folder))
    lines = [f"The Requirements expression for job {id_of(job)} reduces to these conditions:", "", "        Slots"]
    lines += ["Step   Matched  Condition", "----- --------- ---------"]
    for number, condition in enumerate(_conditions(str(job.lookup("Requirements")))):
        met = sum(_meets(job, slot, condition) for slot in offered)
        lines.append(f"[{number}]{met:>12}  {condition}")
    fit = sum(_meets(job, slot, str(job.lookup("Requirements"))) for slot in offered)
    cluster, proc = id_of(job)
    lines += [
        "", "", f"{cluster:03}.{proc:03}:  Run analysis summary ignoring user priority.  "
        f"Of {len(offered)} slots on {len(offered)} machines,",
        f"  {len(offered) - fit:5} slots are rejected by your job's requirements",
        f"  {0:5} slots reject your job because of their own requirements",
        f"  {fit:5} slots match and are willing to run your job", "",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def slots(folder: Path) -> Iterator[Ad]:
    for machine in json.loads((folder / "pool.json").read_text())["machines"]:
        free = {"Cpus": machine["cpus"], "Memory": machine["memory_mb"], "Disk": machine["disk_mb"] * 1024}
        yield machine_ad(machine, name=f"slot1@{machine['name']}", free=free, gpus=machine["gpus"])


def _meets(job: Ad, slot: Ad, condition: str) -> bool:
    asking, offering = Ad(), Ad()
    asking.update(job)
    offering.update(slot)
    asking["Requirements"] = classad.ExprTree(condition)
    offering["Requirements"] = True
    return bool(asking.symmetricMatch(offering))


def _conditions(expression: str) -> list[str]:
    parts, depth, begin = [], 0, 0
    for place, letter in enumerate(expression):
        depth += (letter == "(") - (letter == ")")
        if depth == 0 and expression.startswith("&&", place):
            parts.append(expression[begin:place])
            begin = place + 2
    parts.append(expression[begin:])
    return [part.strip()[1:-1] if part.strip().startswith("(") else part.strip() for part in parts]
