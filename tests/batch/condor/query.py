"""`condor_q` and `condor_history`: ads out, as JSON or as values."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from batch.condor.ads import Ad, is_true, now, print_json, print_values
from batch.condor.analyze import analyze
from batch.condor.queue import NOBODY, Queue, id_of, schedd_is_up, why_down

_NOTHING = f"\n-- Failed to fetch ads from: {NOBODY.removeprefix('Failed to connect to ')} : submit.pool\n"


class Asked:
    """What the words of the command line ask for. Raises ValueError in the command's words."""

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
                self.attributes += list(words)  # whatever follows is an attribute, ids too
            elif word.startswith("-") and word not in ("-allusers", "-nobatch", "-all"):
                raise ValueError(f"Error: unrecognized argument {word}")
            elif not word.startswith("-"):
                self.ids.append(word)

    def matches(self, ad: Ad) -> bool:
        job = id_of(ad)
        named = not self.ids or str(job) in self.ids or str(job.cluster) in self.ids
        return named and (not self.constraint or is_true(ad, self.constraint))


def condor_q(folder: Path, arguments: list[str]) -> int:
    """Jobs in the queue. Prints nothing at all when `-json` finds none."""
    try:
        asked = Asked(arguments)
        if not schedd_is_up(folder):
            print(f"{_NOTHING}\n{why_down(folder)}", file=sys.stderr)
            return 1
        found = [ad for ad in Queue(folder).jobs() if asked.matches(ad)]
    except (SyntaxError, TypeError):  # of the constraint
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
    """Jobs that have left the queue, the latest first. It reads a file: the schedd need not be there."""
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
        print(" ID      ST")  # the table is for people; no program reads it
        for ad in ads:
            print(f"{id_of(ad)!s:8} {'UIRXCH>S'[int(ad['JobStatus'])]}")
