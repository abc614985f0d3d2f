"""A world in which contexts keep less between calls than they could: what a baseline does without."""

from __future__ import annotations

from msgspec.structs import replace

from stoker.contexts.recipe import Awareness
from stoker.manager.sim.world import World

LEVELS = (Awareness.NONE, Awareness.DISK, Awareness.FULL)
"""From nothing to all of it."""


def limited(world: World, most: Awareness | None) -> World:
    """The world, with contexts that keep at most this much of themselves; None = what each says."""
    if most is None:
        return world
    contexts = {
        name: replace(model, awareness=min(model.awareness, most, key=LEVELS.index))
        for name, model in world.contexts.items()
    }
    return replace(world, contexts=contexts)
