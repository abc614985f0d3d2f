"""The family of an encoder's runtimes: one context for each of several lengths, of which a call gets one that is long
enough (Arlo).

    from stoker import app, encoder_family

    @app(context=encoder_family("models/all-MiniLM-L6-v2", lengths=[32, 64, 128, 256]))
    def embed(model, texts):
        return model.embed(texts)

docs/embeddings.md tells the rest. Nothing here imports a GPU library.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from stoker.contexts.encoder import encoder
from stoker.contexts.encoder_facts import SHORTEST_RUNTIME
from stoker.contexts.length_profiles import kept_encoder_profile, lengths_that_pay
from stoker.contexts.model_source import model_source
from stoker.contexts.runtime_family import Family, family
from stoker.contexts.token_counts import TokenCounter
from stoker.errors import RecipeError


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
    """An option's value as the command has it."""
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
