"""Calls to a family of contexts: each wants the shortest runtime that is long enough, and the longer ones beside it.

As a program's calls do (`stoker.contexts.encoder`): in a scenario, contexts that name the same `family` and a
`longest_input` are the runtimes of one model, and a workload names the family.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from stoker.errors import ConfigError
from stoker.manager.sim.client import Arrival
from stoker.manager.sim.world import World


def contexts_named(world: World, names: Iterable[str]) -> tuple[str, ...]:
    """The contexts that names stand for, each once: themselves, or the runtimes of a family."""
    families = _families(world)
    return tuple(dict.fromkeys(context for name in names for context in families.get(name, (name,))))


def of_lengths(world: World, arrivals: Iterable[Arrival]) -> Iterator[Arrival]:
    """The same calls; those to a family want the runtimes that are long enough. Raises ConfigError for a call that is
    longer than all of them."""
    families = _families(world)
    if not families:
        yield from arrivals
        return
    for number, arrival in enumerate(arrivals):
        runtimes = families.get(arrival.context)
        if runtimes is None:
            yield arrival
            continue
        length = arrival.prompt
        serving = [name for name in runtimes if world.contexts[name].longest_input >= length]
        if not serving:
            longest = world.contexts[runtimes[-1]].longest_input
            raise ConfigError(f"call {number} is {length} tokens long, and {arrival.context} takes {longest}")
        yield replace(arrival, context=serving[0], variants=tuple(serving[1:]))


def _families(world: World) -> dict[str, tuple[str, ...]]:
    """The runtimes of each family, the shortest first."""
    found: dict[str, list[str]] = {}
    for name, model in world.contexts.items():
        if model.family:
            found.setdefault(model.family, []).append(name)
    return {
        family: tuple(sorted(names, key=lambda name: world.contexts[name].longest_input))
        for family, names in found.items()
    }
