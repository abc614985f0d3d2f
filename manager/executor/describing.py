"""What pilots need to get a recipe's objects from each other, or from the session's seed."""

from __future__ import annotations

import logging
from pathlib import Path

from stoker.contexts.objects import manifest_of
from stoker.contexts.published import publish
from stoker.contexts.recipe import Recipe
from stoker.errors import RecipeError
from stoker.manager.protocol.to_manager import DefineManifest

logger = logging.getLogger("stoker")

MOST_BYTES = 4_000_000
"""Larger manifests stay here: whoever reads the object first makes its own, and hands it on."""


def describe(recipe: Recipe, objects: Path) -> list[DefineManifest]:
    """Let the seed serve a recipe's objects, and say what they are made of. `objects` is the session's folder of them.

    An object that was changed meanwhile is not described: a pilot that reads it says what is wrong.
    """
    try:
        publish(objects, recipe.objects)
    except OSError as error:
        logger.warning("pilots that see no files of this machine can't have those of %s: %s", recipe.name, error)
    told = []
    for ref in recipe.objects:
        try:
            manifest = manifest_of(ref)
        except RecipeError as error:
            logger.warning("%s of %s: %s", ref.source, recipe.name, error)
            continue
        if len(manifest) <= MOST_BYTES:
            told.append(DefineManifest(ref.name, manifest))
    return told
