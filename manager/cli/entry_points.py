"""What installed packages add to the `stoker` command, found by entry points. A package declares, in its metadata:

    stoker.apps         NAME = module:command     a click command: `stoker run NAME`
    stoker.commands     NAME = module:command     a click command or group: `stoker NAME`
    stoker.forecasts    NAME = module:WORK        a `stoker.planning.Work`: `stoker plan SITE NAME`

Stoker's own applications are declared in the same way (setup.cfg). An editable install keeps the entry points of the
day on which it was made; where the checkout is newer, its setup.cfg is read. Nothing is imported before it is asked
for, and what cannot be imported is told in a sentence: it breaks no other command.
"""

from __future__ import annotations

import configparser
import importlib.metadata
from collections.abc import Iterable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import click

import stoker
from stoker.errors import StokerError

APPS, COMMANDS, FORECASTS = "stoker.apps", "stoker.commands", "stoker.forecasts"
RENEW = (
    "the list of entry points in this environment is older than Stoker's code: install Stoker again"
    " (in a checkout: make install, or pip install -e .)"
)
"""What to do where not even Stoker's own entry points are found."""
CHECKOUT = Path(stoker.__file__).parents[2] / "setup.cfg"
"""Where a checkout declares its entry points; an installed Stoker has no such file."""


def names(group: str) -> list[str]:
    """The names in a group, sorted."""
    return sorted({point.name for point in _points(group)})


def matching(group: str, name: str) -> str:
    """The name in the group that is meant, `-` and `_` being the same; empty if there is none."""
    return next((each for each in names(group) if each.replace("-", "_") == name.replace("-", "_")), "")


def load(group: str, name: str) -> Any:
    """What the entry point of this name leads to.

    Raises StokerError where it cannot be imported, or two packages declare the name.
    """
    points = {point.value: point for point in _points(group) if point.name == name}
    if not points:
        raise StokerError(f"no installed package declares {name} in {group}")
    if len(points) > 1:
        by = " and ".join(sorted(f"{_package(point)} ({point.value})" for point in points.values()))
        raise StokerError(f"{name} is declared twice in {group}, by {by}; uninstall one of them")
    [point] = points.values()
    try:
        return point.load()
    except ModuleNotFoundError as error:
        missing = error.name or str(error)
        if point.module == missing or point.module.startswith(f"{missing}."):
            raise _broken(name, point, error) from error
        extra = ': pip install "stoker[models]"' if _package(point) == "stoker" else ""
        raise StokerError(f"{name} needs the module {missing}, which is not installed{extra}") from error
    except Exception as error:  # whatever a package's code does when it is imported
        raise _broken(name, point, error) from error


def load_command(group: str, name: str) -> click.Command:
    """The click command that the entry point leads to. Raises StokerError as `load`, and for anything else."""
    found = load(group, name)
    if not isinstance(found, click.Command):
        raise StokerError(
            f"{name} in {group} leads to a {type(found).__name__}, and must lead to a click command: put"
            " @click.command() above the function"
        )
    return found


def _points(group: str) -> Iterable[EntryPoint]:
    """The entry points of a group: of every installed package, and those that Stoker's checkout has since."""
    found = importlib.metadata.entry_points(group=group)
    declared = configparser.ConfigParser()
    declared.read(CHECKOUT)
    lines = declared.get("options.entry_points", group, fallback="").split("\n")
    pairs = [line.split("=", 1) for line in lines if "=" in line]
    own = [EntryPoint(name.strip(), value.strip(), group) for name, value in pairs]
    there = {(point.name, point.value) for point in found}
    return [*found, *(point for point in own if (point.name, point.value) not in there)]


def _broken(name: str, point: EntryPoint, error: Exception) -> StokerError:
    return StokerError(
        f"{name} cannot be imported ({point.value}, of the package {_package(point)}): {type(error).__name__}: {error}"
    )


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.value.partition(".")[0]
