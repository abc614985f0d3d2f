"""The variant "authors' program": settings of SLINFER's published program, added row by row.

`authors_program.toml` contains the values with sources. Rows that require another policy or simulator are omitted;
`docs/reproduction/slinfer.md` lists these rows.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.papers.slinfer.worlds import CPU, GPU, Nodes
from stoker.manager.core.nouns import Device, Library
from stoker.manager.core.seams import Action, Policies, Unload, View
from stoker.manager.policies import SHIPPED
from stoker.manager.policies.slinfer.dispatch import OfferByHeadroom
from stoker.manager.policies.slinfer.validation import list_unstopped_libraries
from stoker.protocol.calls import Objective

FILE = Path(__file__).with_name("authors_program.toml")
ROWS = ("memory", "caps", "cache", "polls", "keep_alive", "margin")
_GB = 1e9


@cache
def program() -> dict[str, Any]:
    return tomllib.loads(FILE.read_text())


def nodes_of(rows: Iterable[str], size: str, nodes: Nodes) -> Nodes:
    """Return nodes for models of one size, with memory and load times of these rows."""
    changes: dict[str, Any] = {}
    if "memory" in rows:
        memory, caps = program()["memory"], program()["caps"]
        for kind in (GPU, CPU):
            free_gb = memory[f"{kind}_gb"] - memory["instance_gb"] * caps[kind][size]
            changes[f"{kind}_memory_bytes"] = round(free_gb * _GB)
    if "cache" in rows:
        changes["cache_s_per_gb"] = program()["cache"]["s_per_gb"]
    return msgspec.structs.replace(nodes, **changes)


def objective_of(rows: Iterable[str], objective: Objective) -> Objective:
    """Return the scheduler's objectives, scaled by the row *margin*."""
    if "margin" not in rows:
        return objective
    share = program()["margin"]["share"]
    return msgspec.structs.replace(
        objective, ttft_s=objective.ttft_s * share, ttft_per_token_s=objective.ttft_per_token_s * share,
        ttft_most_s=objective.ttft_most_s * share, tpot_s=objective.tpot_s * share,
    )  # fmt: skip


def baseline_settings(rows: Iterable[str]) -> dict[str, float]:
    """Return the arguments of `sllm`."""
    found = dict[str, float]()
    if "polls" in rows:
        found["poll_s"] = program()["polls"]["every_s"]
    if "keep_alive" in rows:
        stays = program()["keep_alive"]
        found |= {"keep_alive_s": stays["gpu_s"] + stays["gpu_end_s"], "cpu_keep_alive_s": stays["cpu_s"]}
    return found


def slinfer(rows: Iterable[str], size: str, **settings: Any) -> Policies:
    """Return a policy `slinfer` in which these rows replace parts of the object."""
    policies = SHIPPED["slinfer"].make(**settings)
    dispatch = policies.dispatch
    assert isinstance(dispatch, OfferByHeadroom)
    places, out_of_calls = dispatch._placement.find_places, dispatch.on_out_of_calls

    def capped(*args: Any, **more: Any) -> Iterator[tuple[Device, int, list[Library]]]:
        for device, memory, idle in places(*args, **more):
            if len(list_unstopped_libraries(device)) < program()["caps"][device.facts.kind][size]:
                yield device, memory, idle

    def ends(view: View, library: Library) -> Iterable[Action]:
        if library.devices[0].facts.on_host:
            return (Unload(library.id, "it serves nothing"),)
        return out_of_calls(view, library)

    if "polls" in rows:
        dispatch.period_s = program()["polls"]["every_s"]
    if "caps" in rows:
        dispatch._placement.find_places = capped  # type: ignore[method-assign]
    if "keep_alive" in rows:
        dispatch.on_out_of_calls = ends  # type: ignore[method-assign]
    return policies
