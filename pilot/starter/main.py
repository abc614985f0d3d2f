"""From a bare node to a pilot: what `start.pyz` does.

    start.pyz HERE [--begun DIR] --session DIR ...

`HERE` is the folder with `environment.json`. What follows are the pilot's options; `--walltime-s` is passed on less
what starting took. Ends by becoming the pilot (exit code 1 and a line on standard error when it cannot).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stoker.pilot.starter import fetching, node_python
from stoker.pilot.starter.place import KEPT_S, Environments, StartError, base_folder


def main(arguments: Sequence[str] | None = None) -> int:
    """Become a pilot. Returns only when that is not possible."""
    began = time.monotonic()
    given, rest = _parser().parse_known_args(arguments)
    os.umask(0o077)
    try:
        facts = _read(Path(given.here) / "environment.json")
        folder, archive = _enter(given, facts)
    except (StartError, OSError) as error:
        print(f"stoker: {error}", file=sys.stderr)  # noqa: T201  # the one line that a batch log needs
        return 1
    finally:
        if given.begun:
            shutil.rmtree(given.begun, ignore_errors=True)
    command = [str(folder / "bin" / "python"), "-P", "-m", "stoker.pilot.main", "--session", given.session, *rest]
    if given.scratch:
        command += ["--scratch", given.scratch]
    if given.cache_age is not None:
        command += ["--cache-age", f"{given.cache_age:g}"]
    if given.walltime_s:
        command += ["--walltime-s", f"{max(1.0, given.walltime_s - (time.monotonic() - began)):.0f}"]
    command += ["--environment", f"{facts['packages']['name']}={archive}"]
    os.execve(command[0], command, node_python.environ_for(folder, begun=given.begun))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="start.pyz", allow_abbrev=False, add_help=False)
    parser.add_argument("here")
    parser.add_argument("--begun", default="")
    parser.add_argument("--session", required=True)
    parser.add_argument("--scratch", default="")
    parser.add_argument("--cache-age", type=float, default=None)
    parser.add_argument("--walltime-s", type=float, default=0.0)
    return parser


def _read(file: Path) -> dict[str, Any]:
    try:
        facts: dict[str, Any] = json.loads(file.read_bytes())
        packages = facts["packages"]
        for value, kind in (
            (packages["name"], str),
            (packages["source"], str),
            (packages["size_bytes"], int),
            (facts["unpacked_bytes"], int),
            (facts["interpreter"], str),
            (facts["python"], str),
        ):
            if not isinstance(value, kind):
                raise ValueError(f"it says {value!r} where it should say a {kind.__name__}")
        return facts
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise StartError(f"{file} can't be read on {os.uname().nodename}: {error}; the job must bring it") from error


def _enter(given: argparse.Namespace, facts: dict[str, Any]) -> tuple[Path, Path]:
    """The environment's folder on this node, and the archive that it was made from."""
    packages, named = facts["packages"], facts["interpreter"]
    kept_s = KEPT_S if given.cache_age is None else given.cache_age
    home = Environments(base_folder(given.scratch), kept_s=kept_s)
    name = packages["name"].partition(".")[0][-32:] + ("-" + "".join(filter(str.isalnum, named)) if named else "")
    folder = home.enter(
        name,
        room_bytes=int(facts["unpacked_bytes"]) + int(packages["size_bytes"]),
        get=lambda archive: fetching.get(packages, archive, session=Path(given.session)),
        finish=lambda place: node_python.finish(
            place, version=facts["python"], named=named, base=Path(given.here) / "base.tar.gz"
        ),
    )
    return folder, home.archive(name)


if __name__ == "__main__":
    sys.exit(main())
