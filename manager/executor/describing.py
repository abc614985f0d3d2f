"""Publishes a recipe's objects, so that pilots can fetch them from each other or from the session's seed."""

from __future__ import annotations

import logging
from pathlib import Path

from stoker.contexts.objects import manifest_of, publish
from stoker.contexts.recipe import Recipe
from stoker.errors import RecipeError
from stoker.protocol.to_manager import DefineManifest

logger = logging.getLogger("stoker")

MOST_BYTES = 4_000_000
"""Larger manifests are not sent: the first pilot that reads the object makes one, and hands it on."""


def describe(recipe: Recipe, objects: Path) -> list[DefineManifest]:
    """Let the seed serve a recipe's objects; returns their manifests. `objects` is the session's folder for objects.

    An object that has changed since the recipe was made gets no manifest: a pilot that reads it reports the change.
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
