"""`gateway_objectives` with a stand-in for the devices' processors, so that the models take no core of the machine.

This is an experiment about the cause of missed bars. It judges no bar, because CPU devices need no stand-in.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from benchmarks.serving.gateway_objectives import measured_table
from benchmarks.tables import Table

NAME, TITLE = "gateway_objectives_paced", "the same, with a stand-in for the devices' processors"
SEEDS = (30, 31, 32)


def measure(say: Callable[[str], None], *, quick: bool = False) -> Table:
    table = measured_table(NAME, TITLE, say, "--paced", quick=quick, seeds=SEEDS)
    return replace(table, lines=[replace(line, bar=None) for line in table.lines])
