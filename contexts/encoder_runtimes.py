"""Families: contexts that serve the same calls, each for inputs up to a length (Arlo §3.1).

A *runtime* is a context whose library pads, or is compiled, for one length: `Recipe.longest_input`. A family lists a
model's runtimes, the shortest first. A call names those that are long enough for its input; a policy that honours
variants chooses among them.

    from stoker import app, encoder_family

    @app(context=encoder_family("models/all-MiniLM-L6-v2", lengths=[32, 64, 128, 256]))
    def embed(model, texts):
        return model.embed(texts)

See docs/embeddings.md. Nothing here imports a GPU library.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from stoker.contexts.encoder import encoder
from stoker.contexts.encoder_facts import SHORTEST_RUNTIME
from stoker.contexts.length_profiles import kept_encoder_profile, lengths_that_pay
from stoker.contexts.model_source import TokenCounter, model_source
from stoker.contexts.recipe import Recipe
from stoker.errors import InputTooLongError, RecipeError

# ---- runtime family


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
        """Return the contexts that can serve an input of this length, the shortest first. Raises InputTooLongError."""
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
    """Make a family of contexts, each under the longest input that it takes, in tokens. `count` as in `Family`."""
    for tokens, recipe in runtimes.items():
        if not isinstance(recipe, Recipe):
            raise RecipeError(f"a family wants a recipe for each length; for {tokens} it got {recipe!r:.80}")
    recipes = (msgspec.structs.replace(runtimes[tokens], longest_input=tokens) for tokens in sorted(runtimes))
    return Family(tuple(recipes), count)


# ---- encoder runtimes


def encoder_family(
    path: str | os.PathLike[str],
    *,
    lengths: Sequence[int] | None = None,
    texts: Iterable[str] | None = None,
    truncate: bool = False,
    **options: Any,
) -> Family:
    """The runtimes of an encoder, each of them `encoder(path, length=...)`; `options` are `encoder`'s.

    - `lengths`: in tokens, rising. None: those that pay by the profile that `stoker run encoder_lengths` has kept.
    - `texts`: texts like those that will come, by whose lengths these are chosen; without them every length that was
      measured is expected as often.
    - `truncate`: the function truncates texts, so longer ones go to the longest runtime.

    A call's first argument has to be a text, a pair of texts (a tuple), or a list of these, of which the longest one
    counts. Raises RecipeError for lengths that are none or that the model does not read, where no profile is kept, and
    whatever `encoder` raises.
    """
    if "length" in options:
        raise RecipeError("encoder_family has several lengths: lengths=[...]", option="length")
    source, _ = model_source(os.fspath(path))
    if lengths is None:
        lengths = _chosen(path, TokenCounter(source), texts, truncate=truncate, options=options)
    elif texts is not None:
        raise RecipeError("encoder_family takes lengths, or texts by which it chooses them; not both", option="texts")
    checked = _checked(lengths)
    count = TokenCounter(source, most=checked[-1] if truncate else 0)
    return family({tokens: encoder(path, length=tokens, **options) for tokens in checked}, count=count)


def _chosen(
    path: str | os.PathLike[str],
    count: TokenCounter,
    texts: Iterable[str] | None,
    *,
    truncate: bool,
    options: dict[str, Any],
) -> tuple[int, ...]:
    asked = {name: options[name] for name in ("dtype", "compiled") if name in options}
    profile = kept_encoder_profile(path, **asked)
    if profile is None:
        told = " ".join(f"--{name} {_told(value)}" for name, value in asked.items())
        raise RecipeError(
            f"nothing is known of the lengths of {path}: name them, lengths=[64, 128, ...], or measure them first:"
            f" stoker run encoder_lengths --model {path} {told}".rstrip(),
            path=os.fspath(path),
        )
    longest = profile.lengths[-1].tokens
    counts = [count(text) for text in texts or ()]
    return lengths_that_pay(profile, [min(each, longest) for each in counts] if truncate else counts).tokens


def _told(value: bool | str) -> str:
    return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else value


def _checked(lengths: Any) -> tuple[int, ...]:
    found = tuple(lengths) if isinstance(lengths, Sequence) and not isinstance(lengths, str) else ()
    whole = all(type(tokens) is int and tokens >= SHORTEST_RUNTIME for tokens in found)
    if not found or not whole or any(a >= b for a, b in pairwise(found)):
        raise RecipeError(
            f"encoder_family(lengths={lengths!r:.80}): whole numbers of tokens, {SHORTEST_RUNTIME} or more, each larger"
            " than the one before, at least one",
            option="lengths",
        )
    return found
