"""models.toml: models by the name that requests ask for, as `stoker serve` and `stoker batch` read them.

[models.small]
path = "models/small"       a folder or file as `causal_lm` and `encoder` take it; it counts from this file
kind = "chat"               or "embedding"
engine = "auto"             what writes: "continuous", "static", "transformers", "vllm"
graphs = true               the continuous engine captures its steps as CUDA graphs; left out: it does not
dtype = "auto"              "float32", "bfloat16", "float16", or "fp32", "bf16", "fp16"
memory = "4 GB"             host memory and device memory that it may take; left out: measured
device_memory = "8 GB"
ttft = "1 s"                objectives: the time to the first token, and for each further one
tpot = "100 ms"
min = 1                     the least number of libraries that stay loaded
max = 4                     the largest number of libraries that are loaded at once; left out: any number
keep_alive = "10 min"       a library idle for this time is unloaded, as long as `min` stay; left out: it
                            stays until its room is wanted
cold = "wait"               a request that finds it not loaded waits, also beyond `ttft`; "refuse": it is told when to
                            come again. Left out: it waits, if no `ttft` says otherwise
"""

from __future__ import annotations

import enum
import os
from pathlib import Path
from typing import Annotated, Any

import msgspec

import stoker
from stoker.config import Duration, Size
from stoker.contexts import Recipe, dtype_named, encoder_class
from stoker.decoding import read_text
from stoker.errors import ConfigError, RecipeError
from stoker.toml_files import read_struct

_DTYPES = ("auto", "float32", "bfloat16", "float16", "fp32", "bf16", "fp16")
_ENGINES = ("auto", "transformers", "continuous", "static", "vllm")


class ModelKind(enum.Enum):
    """The task of a model."""

    CHAT = "chat"
    """Texts: `/v1/chat/completions` and `/v1/completions`."""
    EMBEDDING = "embedding"
    """Vectors: `/v1/embeddings`."""


class Cold(enum.Enum):
    """What happens to a request for a model that is not loaded."""

    WAIT = "wait"
    """It waits until the model is loaded."""
    REFUSE = "refuse"
    """It is refused with 503, and the model is loaded."""


class ModelSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One model. Sizes in bytes, times in seconds; 0 = not given."""

    path: str
    kind: ModelKind = ModelKind.CHAT
    engine: str = "auto"
    graphs: bool = False
    dtype: str = "auto"
    memory: Size = Size(0)
    device_memory: Size = Size(0)
    ttft: Duration = Duration(0)
    tpot: Duration = Duration(0)
    min: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 0
    max: Annotated[int, msgspec.Meta(ge=1, le=1000)] | None = None
    keep_alive: Duration | None = None
    cold: Cold | None = None
    """None: the request waits if there is no `ttft`, else as long as `ttft` allows."""

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("path is empty; name a folder or a file")
        if self.engine not in _ENGINES:
            raise ValueError(f"engine = {self.engine!r} is not available; there are {', '.join(_ENGINES)}")
        try:
            dtype_named(self.dtype, what="dtype")
        except RecipeError:
            raise ValueError(f"dtype = {self.dtype!r} is not available; there are {', '.join(_DTYPES)}") from None
        if self.kind is ModelKind.EMBEDDING and self.engine != "auto":
            raise ValueError("engine is for models that write; an embedding model has none")
        if self.kind is ModelKind.EMBEDDING and self.graphs:
            raise ValueError("graphs is for models that write; an embedding model has none")
        if self.graphs and self.engine in ("static", "vllm"):
            raise ValueError(f'graphs = true is for engine = "continuous"; {self.engine} cannot take it')
        if self.max is not None and self.min > self.max:
            raise ValueError(f"min = {self.min} is more than max = {self.max}")


class _ModelsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    models: dict[str, ModelSettings]


def read_models(path: Path) -> dict[str, ModelSettings]:
    """Read the models of a file. Raises ConfigError with line and setting."""
    try:
        text = read_text(path)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; docs/serve.md shows one", file=str(path)) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error}", file=str(path)) from None
    return parse_models(text, file=str(path), folder=path.absolute().parent)


def parse_models(text: str, *, file: str, folder: Path) -> dict[str, ModelSettings]:
    """Parse a models file; paths are relative to `folder`. Raises ConfigError."""
    found = read_struct(text, _ModelsFile, file=file).models
    if not found:
        raise ConfigError(f"{file}: names no model; write [models.NAME] and its path", file=file)
    models = {name: _placed(settings, folder) for name, settings in found.items()}
    for name, settings in models.items():
        if settings.kind is ModelKind.CHAT and (encoder := encoder_class(settings.path)):
            raise ConfigError(
                f'{file}: [models.{name}] {settings.path} is an encoder ({encoder}), which writes no text; write kind ='
                ' "embedding"',
                file=file, key="kind",
            )  # fmt: skip
    return models


def identity_of(recipe: Recipe, path: str = "") -> str:
    """Return the identity of a model: the digest of its files, or its path if that is a name on the model hub."""
    return ", ".join(part.name for part in recipe.objects) or path


def recipe_of(settings: ModelSettings) -> Recipe:
    """Return the context of a model; equal settings give the same context. Raises RecipeError."""
    options: dict[str, Any] = {
        "dtype": settings.dtype, "memory": _in_bytes(settings.memory),
        "device_memory": _in_bytes(settings.device_memory), "min_libraries": settings.min,
        "max_libraries": settings.max, "keep_alive": settings.keep_alive,
    }  # fmt: skip
    if settings.kind is ModelKind.EMBEDDING:
        return stoker.encoder(settings.path, **options)
    return stoker.causal_lm(settings.path, engine=settings.engine, graphs=settings.graphs, **options)


def _in_bytes(size: Size) -> str | None:
    """Return a size as a context's option takes it; None for 0."""
    return f"{int(size)} B" if size else None


def _placed(settings: ModelSettings, folder: Path) -> ModelSettings:
    """Make the path absolute; a path that does not exist may be a name on the model hub."""
    path = os.path.expanduser(settings.path)
    there = folder / path
    looks_local = path.startswith((".", "/")) or there.exists()
    return msgspec.structs.replace(settings, path=os.path.abspath(there) if looks_local else settings.path)
