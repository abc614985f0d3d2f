"""`condor_q -better-analyze` counts slots per requirement, as in HTCondor's manual. `condor_q` and `condor_history`
print ads as JSON or values. `condor_status` and `condor_config_val` print slots, daemons, and the settings that Stoker
reads.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import classad
from batch.condor.ads import Ad, is_true, machine_ad, now, print_json, print_values
from batch.condor.queue import DOWN, NOBODY, Queue, id_of, schedd_is_up

# ---- analyze


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


# ---- query


_NOTHING = f"\n-- Failed to fetch ads from: {NOBODY.removeprefix('Failed to connect to ')} : submit.pool\n"


class Asked:
    """A parsed command line. Raises ValueError with the message of the real command."""

    def __init__(self, arguments: list[str]) -> None:
        self.ids: list[str] = []
        self.constraint = ""
        self.json = False
        self.attributes: list[str] = []
        self.letters: str | None = None
        self.limit = 0
        self.analyze = False
        words = iter(arguments)
        for word in words:
            if word in ("-constraint", "-const"):
                self.constraint = next(words)
            elif word == "-json":
                self.json = True
            elif word in ("-attributes", "-attrs"):
                self.attributes += next(words).split(",")
            elif word in ("-better-analyze", "-better"):
                self.analyze = True
            elif word in ("-limit", "-match"):
                self.limit = int(next(words))
            elif word == "-autoformat" or word.split(":")[0] in ("-af", "-autoformat"):
                self.letters = word.partition(":")[2]
                self.attributes += list(words)  # all further words are attributes, including ids
            elif word.startswith("-") and word not in ("-allusers", "-nobatch", "-all"):
                raise ValueError(f"Error: unrecognized argument {word}")
            elif not word.startswith("-"):
                self.ids.append(word)

    def matches(self, ad: Ad) -> bool:
        job = id_of(ad)
        named = not self.ids or str(job) in self.ids or str(job.cluster) in self.ids
        return named and (not self.constraint or is_true(ad, self.constraint))


def condor_q(folder: Path, arguments: list[str]) -> int:
    """Print queued jobs. `-json` prints nothing if there are no jobs."""
    try:
        asked = Asked(arguments)
        if not schedd_is_up(folder):
            print(f"{_NOTHING}\n{DOWN}", file=sys.stderr)
            return 1
        found = [ad for ad in Queue(folder).jobs() if asked.matches(ad)]
    except (SyntaxError, TypeError):  # the constraint is invalid
        print(f"{_NOTHING}\n", file=sys.stderr)
        return 1
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    for ad in found:
        ad["ServerTime"] = now()
    if asked.json and not found:
        return 0
    if asked.analyze:
        print(analyze(folder, found))
        return 0
    _print(asked, found)
    return 0


def condor_history(folder: Path, arguments: list[str]) -> int:
    """Print jobs that have left the queue, latest first. The jobs are in a file, so the schedd may be down."""
    try:
        asked = Asked(arguments)
        found = [ad for ad in Queue(folder).history() if asked.matches(ad)]
    except (ValueError, SyntaxError, TypeError) as error:
        print(error, file=sys.stderr)
        return 1
    _print(asked, found[: asked.limit or None])
    return 0


def _print(asked: Asked, ads: Iterable[Ad]) -> None:
    if asked.json:
        body = print_json(ads, asked.attributes)
        print(f"[\n{body}\n]" if body else "[\n]")
    elif asked.letters is not None:
        for ad in ads:
            print(print_values(ad, asked.attributes, letters=asked.letters))
    else:
        print(" ID      ST")  # no program reads this table
        for ad in ads:
            print(f"{id_of(ad)!s:8} {'UIRXCH>S'[int(ad['JobStatus'])]}")


# ---- status


_SETTINGS = {"UID_DOMAIN": "submit.pool", "FILESYSTEM_DOMAIN": "submit.pool"}


def condor_status(folder: Path, arguments: list[str]) -> int:
    """Print the `-af` attributes of slots, of daemons (`-startd`), or of the negotiator."""
    constraint, kind, attributes = "true", "", list[str]()
    words = iter(arguments)
    for word in words:
        if word == "-constraint":
            constraint = next(words)
        elif word in ("-startd", "-negotiator"):
            kind = word
        elif word == "-af":
            attributes = list(words)
        else:
            print(f"Error: unrecognized argument {word}", file=sys.stderr)
            return 1
    for ad in _ads(folder, kind):
        if is_true(ad, constraint):
            print(print_values(ad, attributes, letters=""))
    return 0


def _ads(folder: Path, kind: str) -> Iterator[Ad]:
    if kind == "-negotiator":
        yield from [] if (folder / "no-negotiator").exists() else [Ad({"Name": "submit.pool"})]
    elif kind == "-startd":
        yield from (Ad({"Name": slot["Machine"], "MyType": "StartDaemon"}) for slot in slots(folder))
    else:
        yield from slots(folder)


def condor_config_val(arguments: list[str]) -> int:
    [name] = arguments
    if name not in _SETTINGS:
        print(f"Not defined: {name}", file=sys.stderr)
        return 1
    print(_SETTINGS[name])
    return 0
