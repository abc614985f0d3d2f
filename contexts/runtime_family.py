"""Families: contexts that serve the same calls, each of them inputs up to a length of its own (Arlo §3.1).

A *runtime* is a context whose library pads, or is compiled, for one length: `Recipe.longest_input`. A family lists a
model's runtimes, the shortest first. A call names those that are long enough for its input: the shortest is its ideal,
and the longer ones serve it too, with more padding. A policy that honours variants chooses among them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import msgspec

from stoker.contexts.recipe import Recipe
from stoker.errors import InputTooLongError, RecipeError


class Family(msgspec.Struct, frozen=True):
    """The runtimes of one model, the shortest first. `count` gives the length of a call's input, in tokens, from the
    call's first argument; None: each call says it itself (`features={"input_length": ...}`)."""

    recipes: tuple[Recipe, ...]
    count: Callable[[Any], int] | None = None

    def __post_init__(self) -> None:
        lengths = self.lengths
        if not lengths or lengths[0] <= 0 or any(a >= b for a, b in pairwise(lengths)):
            raise RecipeError(f"a family's contexts have rising lengths, at least one: they have {list(lengths)}")

    @property
    def lengths(self) -> tuple[int, ...]:
        """In tokens, rising."""
        return tuple(recipe.longest_input for recipe in self.recipes)

    def serving(self, tokens: int) -> tuple[Recipe, ...]:
        """The contexts that can serve an input of this length, the shortest first. Raises InputTooLongError."""
        found = tuple(recipe for recipe in self.recipes if recipe.longest_input >= tokens)
        if not found:
            longest = self.lengths[-1]
            raise InputTooLongError(
                f"an input of {tokens} tokens, and the longest runtime of {self.recipes[-1].name} takes {longest}: "
                "split it, let the family have a longer runtime, or let its beginning count (truncate)",
                tokens=tokens, longest=longest,
            )  # fmt: skip
        return found


def family(runtimes: Mapping[int, Recipe], *, count: Callable[[Any], int] | None = None) -> Family:
    """The family of some contexts, each under the longest input that it takes, in tokens. `count` as in `Family`."""
    for tokens, recipe in runtimes.items():
        if not isinstance(recipe, Recipe):
            raise RecipeError(f"a family wants a recipe for each length; for {tokens} it got {recipe!r:.80}")
    recipes = (msgspec.structs.replace(runtimes[tokens], longest_input=tokens) for tokens in sorted(runtimes))
    return Family(tuple(recipes), count)
