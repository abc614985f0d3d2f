"""Ready-made contexts: an encoder for embeddings and classification, and families of an encoder's runtimes.

    from stoker import app, encoder_family

    @app(context=encoder_family("models/all-MiniLM-L6-v2", lengths=[32, 64, 128, 256]))
    def embed(model, texts):
        return model.embed(texts)

A *runtime* pads every batch to one length (Arlo §3.1). The policy chooses among the runtimes that are long enough for
a call's input (docs/embeddings.md). This module imports no GPU library.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Unpack

import msgspec

from stoker.contexts.causal_lm import dtype_named
from stoker.contexts.factory import context
from stoker.contexts.length_profiles import kept_encoder_profile, lengths_that_pay
from stoker.contexts.model_source import (
    MODEL_PRELOAD,
    SHORTEST_RUNTIME,
    CallableModule,
    TokenCounter,
    find_model_source,
    read_max_text_tokens,
    shown_name,
)
from stoker.contexts.recipe import Recipe, RecipeOptions
from stoker.errors import InputTooLongError, RecipeError

if TYPE_CHECKING:
    from stoker.contexts.encoding import EncoderModel

_MOST_IN_A_BATCH = 4096
_MOST_TOKENS = 1_000_000
_YES_OR_NO = {True: "yes", False: "no"}


@context  # a recipe's key depends on this function's code, docstring and import
def encoder_model(
    path: str, *, dtype: str = "auto", threads: int = 0, length: int = 0, batch: int = 1, compiled: bool | str = "auto"
) -> EncoderModel:
    """Load the model once; the process then serves call after call."""
    from stoker.contexts.encoder_loading import load_encoder  # the module imports torch, which only a library may do

    return load_encoder(path, dtype=dtype, threads=threads, length=length, batch=batch, compiled=compiled)


def encoder(
    path: str | os.PathLike[str],
    *,
    dtype: str = "auto",
    threads: int = 0,
    length: int = 0,
    batch: int = 1,
    compiled: bool | str = "auto",
    slots: int | str = "auto",
    **options: Unpack[RecipeOptions],
) -> Recipe:
    """Return the recipe of an encoder. The context is a `stoker.contexts.encoding.EncoderModel`.

    Args:
        path: A folder from `save_pretrained` or sentence-transformers, which Stoker sends to the pilot. With a name on
            the model hub, the library downloads the model.
        dtype, threads: As in `stoker.causal_lm`.
        length: Number of tokens, 3 or more. The context becomes a *runtime*, which pads each text to this length. A
            longer text raises InputTooLongError unless it is truncated. 0: no runtime.
        batch: Texts per batch of the runtime; smaller batches are padded.
        compiled: `"auto"` compiles a runtime on a GPU and ignores failures. With `True`, the load fails if compiling
            fails.
        slots: Concurrent calls in one library, whose texts share batches.
        **options: Other options of `stoker.context`.

    Raises:
        RecipeError: The path is not a model folder, or an option is invalid.
    """
    runtime = _check_runtime_options(length, batch, compiled)
    dtype = dtype_named(dtype, what="encoder")
    named = os.fspath(path)
    if not named:
        raise RecipeError("encoder needs a model: a folder, or a name on the model hub", path=named)
    source, is_local = find_model_source(named)
    if source.endswith(".gguf"):
        raise RecipeError(f"encoder cannot read the GGUF file {source}; give a folder from save_pretrained", path=named)
    longest = read_max_text_tokens(source) if length and is_local else 0
    if longest and length > longest:
        why = f"encoder(length={length}): {shown_name(named)} accepts at most {longest} tokens"
        raise RecipeError(why, option="length", longest=longest)
    files = ("path",) if is_local else ()
    factory = encoder_model.with_options(files=files, preload=MODEL_PRELOAD, slots=slots, **options)
    recipe = factory.named(shown_name(named))(source, dtype=dtype, threads=threads, **runtime)
    return msgspec.structs.replace(recipe, longest_input=length)


def _check_runtime_options(length: Any, batch: Any, compiled: Any) -> dict[str, Any]:
    problem = ""
    if type(length) is not int or (length and not SHORTEST_RUNTIME <= length <= _MOST_TOKENS):
        option, problem = "length", f"write a whole number of tokens, {SHORTEST_RUNTIME} or more (0: no runtime)"
    elif type(batch) is not int or not 1 <= batch <= _MOST_IN_A_BATCH:
        option, problem = "batch", f"write a whole number of texts, 1 to {_MOST_IN_A_BATCH}"
    elif compiled not in (True, False, "auto") or type(compiled) not in (bool, str):
        option, problem = "compiled", 'write True, False or "auto"'
    elif not length and (batch != 1 or compiled != "auto"):
        option, problem = "batch" if batch != 1 else "compiled", "only a runtime has this option; give length=, too"
    options = {"length": length, "batch": batch, "compiled": compiled}
    if problem:
        raise RecipeError(f"encoder({option}={options[option]!r}): {problem}", option=option)
    return options if length else {}


sys.modules[__name__].__class__ = CallableModule


class Family(msgspec.Struct, frozen=True):
    """The runtimes of one model, shortest first.

    `count` returns the number of tokens in a call's first argument. Without `count`, each call states its length
    (`features={"input_length": ...}`).
    """

    recipes: tuple[Recipe, ...]
    count: Callable[[Any], int] | None = None

    def __post_init__(self) -> None:
        lengths = self.lengths
        if not lengths or lengths[0] <= 0 or any(a >= b for a, b in pairwise(lengths)):
            raise RecipeError(f"a family needs lengths, each larger than the one before: it has {list(lengths)}")

    @property
    def lengths(self) -> tuple[int, ...]:
        """Longest input of each runtime in tokens, ascending."""
        return tuple(recipe.longest_input for recipe in self.recipes)

    def serving(self, tokens: int) -> tuple[Recipe, ...]:
        """Return the recipes that accept an input, shortest first.

        Args:
            tokens: Length of the input.

        Raises:
            InputTooLongError: The input is longer than the longest runtime.
        """
        found = tuple(recipe for recipe in self.recipes if recipe.longest_input >= tokens)
        if not found:
            longest = self.lengths[-1]
            told = (
                f"the input has {tokens} tokens, and the longest runtime of {self.recipes[-1].name} accepts {longest}"
            )
            advice = "split it, add a longer runtime to the family, or use only its beginning (truncate)"
            raise InputTooLongError(f"{told}: {advice}", tokens=tokens, longest=longest)
        return found


def family(runtimes: Mapping[int, Recipe], *, count: Callable[[Any], int] | None = None) -> Family:
    """Return a family of contexts.

    Args:
        runtimes: Recipes by maximum input in tokens.
        count: Returns the number of tokens in a call's first argument. None: each call states its length in `features`.

    Raises:
        RecipeError: A runtime is not a recipe, or a length is not positive.
    """
    for tokens, recipe in runtimes.items():
        if not isinstance(recipe, Recipe):
            raise RecipeError(f"a family needs a recipe for each length; for {tokens} it got {recipe!r:.80}")
    recipes = (msgspec.structs.replace(runtimes[tokens], longest_input=tokens) for tokens in sorted(runtimes))
    return Family(tuple(recipes), count)


def encoder_family(
    path: str | os.PathLike[str],
    *,
    lengths: Sequence[int] | None = None,
    texts: Iterable[str] | None = None,
    truncate: bool = False,
    **options: Any,
) -> Family:
    """Return a family of runtimes. `encoder(path, length=...)` creates each runtime.

    The first argument of a call is a text, a pair of texts (a tuple), or a list of these. The longest text selects the
    runtime.

    Args:
        path: As in `encoder`.
        lengths: Numbers of tokens, ascending. None: Stoker chooses from the profile of `stoker run encoder_lengths`.
        texts: Expected texts, from which Stoker chooses the lengths. Without texts, all measured lengths are equally
            likely.
        truncate: True if the function truncates texts, so that longer texts use the longest runtime.
        **options: Options of `encoder`.

    Raises:
        RecipeError: A length exceeds the model's limit, or no profile is stored.
    """
    if "length" in options:
        raise RecipeError("encoder_family takes several lengths; write lengths=[...]", option="length")
    source, _ = find_model_source(os.fspath(path))
    if lengths is None:
        asked = {name: options[name] for name in ("dtype", "compiled") if name in options}
        profile = kept_encoder_profile(path, **asked)
        if profile is None:
            told = "".join(f" --{name} {_YES_OR_NO.get(value, value)}" for name, value in asked.items())
            advice = f"give lengths=[64, 128, ...], or measure them: stoker run encoder_lengths --model {path}{told}"
            raise RecipeError(f"no lengths were measured for {path}: {advice}", path=os.fspath(path))
        count = TokenCounter(source, most=profile.lengths[-1].tokens if truncate else 0)
        lengths = lengths_that_pay(profile, map(count, texts or ())).tokens
    elif texts is not None:
        raise RecipeError("encoder_family takes lengths, or texts to choose lengths from, not both", option="texts")
    given: Any = lengths
    found = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else ()
    whole = all(type(tokens) is int and tokens >= SHORTEST_RUNTIME for tokens in found)
    if not found or not whole or any(a >= b for a, b in pairwise(found)):
        advice = f"write whole numbers of tokens, {SHORTEST_RUNTIME} or more, each larger than the one before"
        raise RecipeError(f"encoder_family(lengths={given!r:.80}): {advice}", option="lengths")
    count = TokenCounter(source, most=found[-1] if truncate else 0)
    return family({tokens: encoder(path, length=tokens, **options) for tokens in found}, count=count)
