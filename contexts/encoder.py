"""A ready-made context: an encoder for embeddings and classification through Transformers, on a CPU or a GPU.

    from stoker import app, encoder

    @app(context=encoder("models/all-MiniLM-L6-v2"))
    def embed(model, text):
        return model.embed([text])[0]

The context is in `encoding`. It is not imported here, so a login node writes recipes without a GPU library.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import msgspec

from stoker.contexts.causal_lm import dtype_named
from stoker.contexts.encoder_facts import SHORTEST_RUNTIME, longest_of_folder
from stoker.contexts.factory import context
from stoker.contexts.model_source import CallableModule, architectures, model_source, shown_name
from stoker.contexts.recipe import Awareness, Recipe
from stoker.errors import RecipeError

if TYPE_CHECKING:
    from stoker.contexts.encoding import EncoderModel

_PRELOAD = (
    "torch",
    "transformers",
    "stoker.contexts.encoder_loading",
    "transformers:AutoModel",
    "transformers:AutoTokenizer",
    "transformers:AutoConfig",
)
_USUAL_ARCHITECTURE = "BertModel"
_MOST_IN_A_BATCH = 4096
_MOST_TOKENS = 1_000_000


@context
def encoder_model(
    path: str, *, dtype: str = "auto", threads: int = 0, length: int = 0, batch: int = 1, compiled: bool | str = "auto"
) -> EncoderModel:
    """Load the model once; the process then serves call after call."""
    from stoker.contexts.encoder_loading import load_encoder  # it loads torch, which only a library may do

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
    memory: str | int | None = None,
    device_memory: str | int | None = None,
    kinds: tuple[str, ...] = (),
    load_limit: str | float = "30 min",
    awareness: str | Awareness = "full",
    calls_per_library: int = 0,
    min_libraries: int = 0,
    max_libraries: int | None = None,
    keep_alive: str | float | None = None,
) -> Recipe:
    """The recipe of an encoder; the context is a `stoker.contexts.encoding.EncoderModel`, with `embed` and `classify`.

    - `path`: a folder as `save_pretrained` or sentence-transformers write it, which travels to the pilot as an object.
      Or a name on the model hub, which the library itself downloads where it can.
    - `dtype`: `float32`, `bfloat16`, `float16` (or `fp32`, `bf16`, `fp16`); `auto` is float32 on a CPU
      and the model's own on a GPU.
    - `threads`: threads of one library on a CPU; 0 leaves it as the pilot has set it (one a core).
    - `slots`: calls that run at once in one library; their texts are computed in batches together.

    With a `length` the context is a *runtime*, which computes every batch in one shape (docs/embeddings.md):

    - `length`: tokens that each text is padded to, 3 or more; a longer text raises InputTooLongError, unless it is
      truncated. 0: batches are as long as their texts.
    - `batch`: texts of a batch; where there are fewer, the rest is padding, too.
    - `compiled`: `True` has the load fail if the runtime cannot be compiled; `"auto"` compiles on a GPU, and where that
      fails computes without; `False` never compiles.

    The other options are `@context`'s. Raises RecipeError for a path that is no model folder, for a `length` that the
    model does not read, and for options of a runtime without a `length`.
    """
    runtime = _runtime_options(length, batch, compiled)
    dtype = dtype_named(dtype, what="encoder")
    named = os.fspath(path)
    if not named:
        raise RecipeError("encoder wants a model: a folder, or a name on the model hub", path=named)
    source, is_local = model_source(named)
    if source.endswith(".gguf"):
        raise RecipeError(
            f"encoder reads no GGUF file, as {source}; name a folder as save_pretrained writes it", path=named
        )
    if length and is_local:
        _refuse_longer(length, longest_of_folder(source), model=shown_name(named))
    classes = architectures(source) or (_USUAL_ARCHITECTURE,)
    factory = encoder_model.with_options(
        files=("path",) if is_local else (), preload=(*_PRELOAD, *(f"transformers:{name}" for name in classes)),
        slots=slots, memory=memory, device_memory=device_memory, kinds=kinds, load_limit=load_limit,
        awareness=awareness, calls_per_library=calls_per_library, min_libraries=min_libraries,
        max_libraries=max_libraries, keep_alive=keep_alive,
    )  # fmt: skip
    recipe = factory.named(shown_name(named))(source, dtype=dtype, threads=threads, **runtime)
    return msgspec.structs.replace(recipe, longest_input=length)


def _runtime_options(length: Any, batch: Any, compiled: Any) -> dict[str, Any]:
    """Return the loader's options of a runtime; none without a length. Raises RecipeError."""
    if type(length) is not int or (length and not SHORTEST_RUNTIME <= length <= _MOST_TOKENS):
        raise RecipeError(
            f"encoder(length={length!r}): a whole number of tokens, {SHORTEST_RUNTIME} or more (0: no runtime)",
            option="length",
        )
    if type(batch) is not int or not 1 <= batch <= _MOST_IN_A_BATCH:
        raise RecipeError(f"encoder(batch={batch!r}): a whole number of texts, 1 to {_MOST_IN_A_BATCH}", option="batch")
    if compiled not in (True, False, "auto") or type(compiled) not in (bool, str):
        raise RecipeError(f'encoder(compiled={compiled!r}): True, False or "auto"', option="compiled")
    if not length:
        for name, value, usual in (("batch", batch, 1), ("compiled", compiled, "auto")):
            if value != usual:
                raise RecipeError(f"encoder({name}={value!r}) is a runtime's: name its length, too", option=name)
        return {}
    return {"length": length, "batch": batch, "compiled": compiled}


def _refuse_longer(length: int, longest: int, *, model: str) -> None:
    if longest and length > longest:
        raise RecipeError(
            f"encoder(length={length}): {model} reads {longest} tokens at the most", option="length", longest=longest
        )


sys.modules[__name__].__class__ = CallableModule
