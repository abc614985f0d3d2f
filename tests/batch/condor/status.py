"""`condor_status` and `condor_config_val`: slots, daemons, and the settings that Stoker asks for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from batch.condor.ads import Ad, is_true, print_values
from batch.condor.analyze import slots

_SETTINGS = {"UID_DOMAIN": "submit.pool", "FILESYSTEM_DOMAIN": "submit.pool"}


def condor_status(folder: Path, arguments: list[str]) -> int:
    """What `-af` asks for of slots, of daemons (`-startd`), or of the negotiator."""
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
